"""Several stores in one further place: none takes an object that another relies on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.budget import Budget
from forkserve.store.checkup import checkup
from forkserve.store.collect import collect
from forkserve.store.depots import Depot, LocalDepot, SharedDepot
from forkserve.store.depots.shared import Foldered
from forkserve.store.policies import Lru
from forkserve.store.rebuild import rebuild, verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine

A = "a" * 64
Far = Callable[[], Depot]
_S3 = pytest.param("s3", marks=pytest.mark.xdist_group("s3"))


@pytest.fixture(params=["local", _S3])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Far:
    """A further place, opened anew by each call."""
    if request.param == "local":
        return lambda: LocalDepot(tmp_path / "far", place="object")
    from forkserve.store.depots.s3 import S3Depot

    options: dict[str, Any] = request.getfixturevalue("s3_options")
    prefix = f"shared{time.time_ns()}"
    return lambda: S3Depot("chunks", prefix, **options)


def filled(folder: Path, far: Far, name: str = "x") -> str:
    """A store with one named state of two chunks, brought to the further place; its id."""
    with Store(folder, far=[far()], write_behind=True) as store:
        eng = engine(store)
        eng.publish(eng.open(PROMPT, session=name).id, name=name)
        assert store.behind is not None
        assert store.behind.drain(HANGS_S)
        eng.shutdown()
        return str(store.catalog.setting("store"))


def held(folder: Path, far: Far) -> list[bool]:
    """Of each object that the store can see in the further place: is it its own."""
    with Store(folder, "shared", far=[far()]) as store:
        return [stat.own for stat in store.vault.depots["object"].entries()]


def remembered(folder: Path, far: Far) -> int:
    """Rows that come back when the local chunks are lost; the text goes on as ever."""
    shutil.rmtree(folder / "chunks")
    with Store(folder, far=[far()], restore="always") as store:
        eng = engine(store)
        found = eng.resume("x").cached_tokens
        assert eng.generate("x", 2) == cold(PROMPT, 2)
        eng.shutdown()
        return found


def test_a_collection_takes_no_object_of_another_store(tmp_path: Path, far: Far) -> None:
    filled(tmp_path / "one", far)
    filled(tmp_path / "two", far)
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        store.catalog.now = lambda: time.time() + 1e6  # everything is older than the grace
        assert collect(store.vault, grace_s=0).orphans == 0
        with store.catalog.write() as db:
            db.execute("DELETE FROM name")
            db.execute("DELETE FROM session")
        assert collect(store.vault, grace_s=0).chunks == 2
    assert held(tmp_path / "one", far) == []
    assert held(tmp_path / "two", far) == [True, True]
    assert remembered(tmp_path / "two", far) == 512


def test_a_budget_of_one_store_takes_and_counts_nothing_of_another(
    tmp_path: Path, far: Far
) -> None:
    filled(tmp_path / "one", far)
    filled(tmp_path / "two", far)
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        with store.catalog.write() as db:
            db.execute("DELETE FROM name")
            db.execute("DELETE FROM session")
        used = Budget(store.vault, "object", 1 << 40, Lru()).used()
        assert used == store.catalog.usage()["object"][0]
        Budget(store.vault, "object", used, Lru(), low=1.0).make_room(used)
    assert held(tmp_path / "one", far) == []
    assert remembered(tmp_path / "two", far) == 512


def test_a_receipt_is_for_an_object_of_ones_own(tmp_path: Path, far: Far) -> None:
    """Equal chunks of two stores are two objects: no receipt is another store's to break."""
    one, two = filled(tmp_path / "one", far), filled(tmp_path / "two", far)
    assert one != two
    whole = far()
    assert isinstance(whole, Foldered)
    assert [len(list(whole.below(store).entries())) for store in (one, two)] == [2, 2]
    assert list(whole.entries()) == [], "nothing lies outside of the folders"


def test_rebuild_copies_what_other_stores_have_if_it_is_told_to(tmp_path: Path, far: Far) -> None:
    one = filled(tmp_path / "one", far)
    with Store(tmp_path / "three", far=[far()]) as store:
        report = rebuild(store.vault)
        assert (report.adopted, report.others) == (0, [one])
        with pytest.raises(StoreError, match=f"no store {'0' * 32} has a folder.*{one}"):
            rebuild(store.vault, take=["0" * 32])
        report = rebuild(store.vault, take=[one])
        assert (report.copied, report.adopted) == (2, 2)
        assert rebuild(store.vault, take=[one]).copied == 0
        assert verify(store.vault).clean
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        store.vault.depots["object"].delete([s.key for s in store.vault.depots["object"].entries()])
    with Store(tmp_path / "three", far=[far()], restore="always") as store:
        eng = engine(store)
        assert eng.open(PROMPT).cached_tokens == 512, "the copies are its own"
        eng.shutdown()


def test_rebuild_takes_no_damaged_object_of_others(tmp_path: Path) -> None:
    far: Far = lambda: LocalDepot(tmp_path / "far", place="object")  # noqa: E731
    one = filled(tmp_path / "one", far)
    damaged, _ = sorted((tmp_path / "far" / one).rglob("*.kv"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with Store(tmp_path / "two", "shared", far=[far()]) as store:
        report = rebuild(store.vault, take=["all"])
        assert (report.copied, len(report.faults)) == (1, 1)
    assert damaged.exists(), "it is not this store's to set aside"


def outside(folder: Path, far: Far) -> None:
    """Move a store's objects to where versions without folders had put them."""
    with Store(folder, "shared", far=[far()]) as store:
        depot = store.vault.depots["object"]
        assert isinstance(depot, SharedDepot)
        for stat in list(depot.own.entries()):
            blob = depot.own.open(stat.key)
            depot.whole.put([(stat.key, [bytes(blob.data)])])
            blob.close()
            depot.own.delete([stat.key])


def test_objects_of_older_versions_are_read_and_never_deleted(tmp_path: Path, far: Far) -> None:
    filled(tmp_path / "one", far)
    outside(tmp_path / "one", far)
    assert held(tmp_path / "one", far) == [False, False]
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        assert verify(store.vault).clean
        assert all(check.ok for check in checkup(store))
    assert remembered(tmp_path / "one", far) == 512
    with Store(tmp_path / "new", "shared", far=[far()]) as store:
        store.catalog.now = lambda: time.time() + 1e6
        assert collect(store.vault, grace_s=0).orphans == 0, "whose they are cannot be known"
        assert verify(store.vault).orphans == 0
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        with store.catalog.write() as db:
            db.execute("DELETE FROM name")
            db.execute("DELETE FROM session")
        assert collect(store.vault, grace_s=-1).chunks == 2
    assert held(tmp_path / "one", far) == [False, False]


def test_rebuild_brings_objects_of_older_versions_home(tmp_path: Path, far: Far) -> None:
    filled(tmp_path / "one", far)
    outside(tmp_path / "one", far)
    with Store(tmp_path / "one", "shared", far=[far()]) as store:
        report = rebuild(store.vault)
        assert (report.copied, report.dangling) == (2, 0)
        depot = store.vault.depots["object"]
        assert isinstance(depot, SharedDepot)
        depot.whole.delete([stat.key for stat in depot.whole.entries()])
    assert remembered(tmp_path / "one", far) == 512


def test_a_damaged_object_of_an_older_version_is_struck_and_stored_anew(tmp_path: Path) -> None:
    far: Far = lambda: LocalDepot(tmp_path / "far", place="object")  # noqa: E731
    filled(tmp_path / "one", far)
    outside(tmp_path / "one", far)
    damaged, _ = sorted((tmp_path / "far").glob("??/*.kv"))
    damaged.write_bytes(b"?")
    with Store(tmp_path / "one", far=[far()], write_behind=True) as store:
        assert len(verify(store.vault).faults) == 1
        assert damaged.exists()
        assert verify(store.vault).clean
        assert store.behind is not None
        assert store.behind.catch_up() == 1
        assert store.behind.drain(HANGS_S)
        assert verify(store.vault).clean
    assert sorted(held(tmp_path / "one", far)) == [False, True]


def test_a_place_that_cannot_be_divided_is_one_stores(tmp_path: Path) -> None:
    from forkserve.store.depots import MemoryDepot

    with pytest.raises(StoreError, match="cannot be divided"):
        SharedDepot(MemoryDepot(place="object"), "0" * 32)
    with Store(tmp_path / "s", far=[MemoryDepot(place="object")]) as store:
        assert isinstance(store.vault.depots["object"], MemoryDepot)
        with pytest.raises(StoreError, match="no further place that stores share"):
            rebuild(store.vault, take=["all"])


def test_damaged_objects_of_a_directory_stay_inside_of_it(tmp_path: Path) -> None:
    one = SharedDepot(LocalDepot(tmp_path / "far", place="far"), "1" * 32)
    one.put([(A, [b"bad"])])
    one.quarantine(A, "payload")
    assert sorted(os.listdir(tmp_path)) == ["far"]
    assert one.stat(A) is None
    assert one.stores() == []


# -------------------------------------------------------------------- uploads to S3


class Racing:
    """The library `obstore` with a writer that is faster: after a look, before the upload."""

    def __init__(self, api: Any, first: bytes) -> None:
        self.api, self.first, self.modes = api, first, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.api, name)

    def put(self, store: Any, path: str, data: bytes, **options: Any) -> Any:
        self.modes.append(options["mode"])
        assert options["use_multipart"] is False, "parts would be left by an upload that breaks off"
        if len(self.modes) == 1:
            self.api.put(store, path, self.first)
        return self.api.put(store, path, data, **options)


@pytest.mark.xdist_group("s3")
@pytest.mark.parametrize(
    ("first", "modes"), [(b"good", ["create"]), (b"damaged", ["create", "overwrite"])]
)
def test_an_upload_replaces_nothing_that_came_in_between_unless_it_is_damaged(
    s3_options: dict[str, Any], first: bytes, modes: list[str]
) -> None:
    from forkserve.store.depots.s3 import S3Depot

    depot = S3Depot("chunks", f"race{time.time_ns()}", **s3_options)
    depot._api = racing = Racing(depot._api, first)
    stat = depot.put([(A, [b"go", b"od"])])[0]
    assert (stat.bytes, racing.modes) == (4, modes)
    assert bytes(depot.open(A).data) == b"good"


@pytest.mark.xdist_group("s3")
def test_a_server_without_conditional_uploads_can_be_named(s3_options: dict[str, Any]) -> None:
    from forkserve.store.depots.s3 import S3Depot

    depot = S3Depot("chunks", f"c{time.time_ns()}", conditional_put="disabled", **s3_options)
    depot._api = racing = Racing(depot._api, b"good")
    depot.put([(A, [b"good"])])
    assert racing.modes == ["overwrite"]


@pytest.mark.xdist_group("s3")
def test_folders_of_a_bucket_are_told_from_chunks(s3_options: dict[str, Any]) -> None:
    from forkserve.store.depots.s3 import S3Depot

    depot = S3Depot("chunks", f"f{time.time_ns()}", **s3_options)
    depot.put([(A, [b"old"])])
    depot.put([("b" * 64, [b"bad"])])
    depot.quarantine("b" * 64, "payload")
    assert depot.folders() == []
    depot.below("1" * 32).put([("c" * 64, [b"new"])])
    assert depot.folders() == ["1" * 32]
    assert [s.key for s in depot.entries()] == [A]
    assert [s.key for s in depot.below("1" * 32).entries()] == ["c" * 64]
