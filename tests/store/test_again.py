"""What is stored once more, evicted or copied just when somebody else acts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store, faults
from forkserve.store.behind import WriteBehind
from forkserve.store.budget import Budget
from forkserve.store.collect import collect
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from forkserve.store.policies import Lru
from forkserve.store.rebuild import rebuild, verify
from forkserve.store.vault import Vault

from .engines import PROMPT, engine
from .rig import PRINT, chain, files, good, rows, vault
from .test_shared import filled

LINKS = chain(range(12))
HOUR = 3600.0
FILE = 4096


def forsake(v: Vault) -> None:
    """Nobody has used anything for years."""
    with v.catalog.write() as db:
        db.execute("UPDATE chunk SET created_at = 1, used_at = 1")


# -------------------------------------------------------------------- stored once more


@pytest.mark.parametrize("how", ["put", "adopt", "another format"])
def test_garbage_that_is_stored_once_more_begins_its_grace_anew(tmp_path: Path, how: str) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    if how == "put":
        assert v.put(PRINT, LINKS, rows).known == 3
    elif how == "adopt":
        v.adopt([v.pack(PRINT, link, rows(link)) for link in LINKS])
    else:
        pytest.importorskip("zstandard")
        v.format = "zstd"
        assert v.put(PRINT, LINKS, rows).written == 3
    assert collect(v, grace_s=HOUR).chunks == 0
    assert good(v, LINKS) == 3
    v.catalog.close()


def test_what_gc_takes_after_a_publish_has_seen_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    renew, swept = v.catalog.renew, []

    def late(*values: Any) -> set[str]:
        swept.append(collect(other, grace_s=HOUR).chunks)
        return renew(*values)

    monkeypatch.setattr(v.catalog, "renew", late)
    assert v.put(PRINT, LINKS, rows).written == 3
    assert swept == [3]
    assert good(v, LINKS) == 3
    assert collect(other, grace_s=HOUR).chunks == 0


def test_a_copy_elsewhere_is_no_use(tmp_path: Path) -> None:
    """Eviction goes by when a chunk was used: bringing it to a further place must not count."""
    far = MemoryDepot(place="object")
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.put(PRINT, LINKS, rows)
    forsake(v)
    for path in files(tmp_path):
        v.copy_one(path.stem, "disk", "object")
    rebuild(v)
    assert v.catalog.read("SELECT DISTINCT used_at FROM chunk") == [(1.0,)]


def test_a_publish_of_an_engine_renews_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Sessions of an engine that is not the owner are in no catalog: no root reaches their rows."""
    with Store(tmp_path, "shared") as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        assert eng.publish("a").wait().written == 2
        forsake(store.vault)
        assert eng.publish("a").wait().known == 2
        assert collect(store.vault, grace_s=HOUR).chunks == 0
        forsake(store.vault)
        assert collect(store.vault, grace_s=HOUR).chunks == 2
        eng.shutdown()


# -------------------------------------------------------------------- eviction


def pin(v: Vault, chain_id: bytes) -> None:
    with v.catalog.write() as db:
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (chain_id.hex(),))


def at(point: str, act: Callable[[], Any]) -> None:
    """Do `act` once, when a fault point is reached."""
    todo = [act]

    def hook(reached: str) -> None:
        if reached == point and todo:
            todo.pop()()

    faults.hook = hook


def test_what_is_named_after_it_was_chosen_is_not_evicted(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    budget = Budget(v, "disk", 3 * FILE, Lru(), low=1.0)
    at("evict.copied", lambda: pin(other, LINKS[1].id))
    with pytest.raises(StoreError, match="full of named and pinned"):
        budget.make_room(2 * FILE)
    assert good(v, LINKS) == 2, "the last one was free to go"
    assert verify(v).orphans == 0


def test_what_got_a_successor_after_it_was_chosen_is_not_evicted(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS[:2], rows)
    budget = Budget(v, "disk", 2 * FILE, Lru(), low=1.0)
    at("evict.copied", lambda: other.put(PRINT, LINKS, rows))
    with pytest.raises(StoreError, match="full of named and pinned"):
        budget.make_room(FILE)
    assert good(v, LINKS) == 3, "no hole"


def test_gc_tells_what_it_took_and_not_what_it_had_seen(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    at("gc.marked", lambda: pin(other, LINKS[1].id))
    swept = collect(v, grace_s=HOUR)
    assert (swept.chunks, good(v, LINKS)) == (1, 2)
    assert v.catalog.counters()["evicted_bytes/disk/gc"] == swept.bytes == FILE


def test_a_reader_of_a_damaged_chunk_changes_nothing(tmp_path: Path) -> None:
    v, reader = vault(tmp_path), vault(tmp_path, "reader")
    v.put(PRINT, LINKS, rows)
    damaged = files(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = files(tmp_path)
    for _ in range(2):
        assert good(reader, LINKS) < 3
    assert [fault[1] for fault in verify(reader).faults] == [damaged.stem]
    assert files(tmp_path) == before
    assert [fault[2] for fault in verify(v).faults] == ["payload"], "the owner sets it aside"
    assert len(files(tmp_path)) == 2


# -------------------------------------------------------------------- further places


class _Gone(FaultyDepot):
    """A bucket that does not exist: nothing is found there, and nothing can be put."""

    missing = True

    def put(self, items: Any) -> Any:
        if self.missing:
            raise FileNotFoundError("no such bucket")
        return super().put(items)


def test_a_further_place_that_is_missing_loses_no_chunk(tmp_path: Path) -> None:
    far = _Gone(MemoryDepot(place="object"))
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    sender = WriteBehind(v, "object")
    v.stored = lambda: None  # sent by hand
    v.put(PRINT, LINKS, rows)
    assert sender.step()
    assert sender.waiting() == 3, "a missing bucket is not a missing chunk"
    assert v.catalog.events("behind_lost") == []
    with v.catalog.write() as db:
        db.execute("DELETE FROM outbox")
    with pytest.raises(StoreError, match="are needed"):
        Budget(v, "disk", 3 * FILE, Lru(), low=1.0).make_room(FILE)
    assert good(v, LINKS) == 3, "what cannot move stays"
    far.missing = False
    assert Budget(v, "disk", 3 * FILE, Lru(), low=1.0).make_room(FILE).moved == 1
    assert good(v, LINKS) == 3


@pytest.mark.xdist_group("s3")
def test_a_bucket_that_does_not_exist_is_no_missing_chunk(
    tmp_path: Path, s3_options: dict[str, Any]
) -> None:
    """A wrong --far must not strike what lies in the right one."""
    from forkserve.store.depots.s3 import S3Depot

    far = S3Depot("nobody-made-this", "x", timeout_s=5.0, **s3_options)
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.put(PRINT, LINKS, rows)
    for path in files(tmp_path):
        with v.catalog.write() as db:
            db.execute("INSERT INTO replica VALUES (?, 'object', 1, 1, NULL)", (path.stem,))
        with pytest.raises(OSError, match="object store: ") as caught:
            v.copy_one(path.stem, "disk", "object")
        assert "\n" not in str(caught.value)
        path.unlink()
    calls: list[Callable[[], Any]] = [
        lambda: verify(v),
        lambda: collect(v, grace_s=HOUR),
        lambda: far.put([("0" * 64, [b"x"])]),
    ]
    for call in calls:
        with pytest.raises(OSError, match="object store: ") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)
    assert good(v, LINKS) == 0
    listed = "SELECT count(*) FROM replica WHERE place = 'object'"
    assert v.catalog.read(listed) == [(3,)], "nobody can say that they are gone"
    with pytest.raises(OSError, match="NoSuchBucket: The specified bucket does not exist"):
        far.open("0" * 64)


@pytest.mark.parametrize("times", [1, 3, 1000])
def test_a_copy_that_gc_takes_before_it_is_listed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    def far() -> LocalDepot:
        return LocalDepot(tmp_path / "far", place="object")

    one, left = filled(tmp_path / "one", far), [times]
    put = LocalDepot.put

    def taken(self: LocalDepot, items: Any) -> Any:
        stats = put(self, items)
        if left[0]:
            left[0] -= 1
            self.delete([key for key, _ in items])
            raise FileNotFoundError("a chunk vanished while it was written")
        return stats

    with Store(tmp_path / "two", far=[far()]) as store:
        monkeypatch.setattr(LocalDepot, "put", taken)
        if times > 100:
            with pytest.raises(OSError, match="doesn't keep chunk") as caught:
                rebuild(store.vault, take=[one])
            assert not isinstance(caught.value, FileNotFoundError)
        else:
            assert rebuild(store.vault, take=[one]).copied == 2
            assert verify(store.vault).clean
