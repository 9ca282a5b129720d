"""One suite for every place that can hold chunks, then what only some of them do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forkserve.store import faults
from forkserve.store.depots import Depot, FaultyDepot, LocalDepot, MemoryDepot, local
from forkserve.store.depots.local import Waste

from .conftest import MANY

MakeDepot = Callable[[str], Depot]
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


_S3 = pytest.param("s3", marks=pytest.mark.xdist_group("s3"))  # one server, not one a worker


@pytest.fixture(params=[*MANY, _S3])
def depot(request: pytest.FixtureRequest, make_depot: MakeDepot) -> Depot:
    return make_depot(request.param)


def read(depot: Depot, key: str) -> bytes:
    blob = depot.open(key)
    try:
        return bytes(blob.data)
    finally:
        blob.close()


def test_what_was_put_can_be_read_listed_and_deleted(depot: Depot) -> None:
    assert isinstance(depot, Depot)
    stats = depot.put([(A, [b"one", b"", memoryview(b" two")]), (B, [b"x" * 100_000])])
    assert [(s.key, s.bytes) for s in stats] == [(A, 7), (B, 100_000)]
    assert read(depot, A) == b"one two"
    assert {s.key: s.bytes for s in depot.entries()} == {A: 7, B: 100_000}
    assert depot.stat(A) == stats[0]
    assert depot.head(A, 3) == (stats[0], b"one")
    assert depot.head(A, 99)[1] == b"one two"
    assert all(s.used >= s.bytes for s in stats)
    assert abs(stats[0].at - time.time()) < 60
    depot.delete([A, C])
    assert depot.stat(A) is None
    assert [s.key for s in depot.entries()] == [B]


def test_what_is_not_there_is_said_so(depot: Depot) -> None:
    assert depot.stat(A) is None
    with pytest.raises(FileNotFoundError):
        depot.open(A)
    with pytest.raises(FileNotFoundError):
        depot.head(A, 1)
    depot.delete([A])
    depot.quarantine(A, "payload")
    assert list(depot.entries()) == []


def test_a_second_write_of_a_key_changes_nothing(depot: Depot) -> None:
    first = depot.put([(A, [b"bytes"])])[0]
    assert depot.put([(A, [b"bytes"])])[0].stamp == first.stamp


def test_a_key_of_another_length_is_damaged_and_replaced(depot: Depot) -> None:
    depot.put([(A, [b"cut"])])
    depot.put([(A, [b"whole"])])
    assert read(depot, A) == b"whole"


def test_quarantine_takes_an_object_out_of_sight(depot: Depot) -> None:
    depot.put([(A, [b"bad"]), (B, [b"good"])])
    depot.quarantine(A, "payload")
    assert depot.stat(A) is None
    assert [s.key for s in depot.entries()] == [B]
    depot.put([(A, [b"mended"])])
    assert read(depot, A) == b"mended"


def test_an_open_object_outlives_its_deletion(depot: Depot) -> None:
    depot.put([(A, [b"still here"])])
    blob = depot.open(A)
    depot.delete([A])
    assert bytes(blob.data) == b"still here"
    view = blob.data
    blob.close()
    assert bytes(view) == b"still here"


def test_several_threads_may_write_the_same_key(depot: Depot) -> None:
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(5):
                depot.put([(A, [b"same" * 1000]), (B, [b"too"])])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert read(depot, A) == b"same" * 1000
    assert {s.key for s in depot.entries()} == {A, B}


def test_nothing_and_empty_objects(depot: Depot) -> None:
    assert depot.put([]) == []
    assert depot.sweep(0) == 0
    depot.close()
    depot.close()


# -------------------------------------------------------------------- local


def test_files_are_private_and_named_by_their_key(tmp_path: Path) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    depot.put([(A, [b"bytes"])])
    path = tmp_path / "chunks" / "aa" / f"{A}.kv"
    assert path.read_bytes() == b"bytes"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_name_that_is_no_content_id_never_becomes_a_path(tmp_path: Path) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    for key in ("../../etc/passwd", "A" * 64, "", "a" * 63 + "/"):
        with pytest.raises(ValueError, match="no content id"):
            depot.open(key)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_leaves_no_file_and_no_half_of_one(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    real, written = os.write, [0]

    def write(file: int, data: bytes) -> int:
        written[0] += 1
        if written[0] > 1:
            raise OSError(code, "no")
        return real(file, data[:10])  # a short write, then the fault

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="no"):
        depot.put([(A, [b"x" * 100]), (B, [b"y"])])
    monkeypatch.undo()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


STEPS = [p for p in faults.POINTS if p.startswith("chunk.")]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_a_file_is_whole_or_absent(tmp_path: Path, step: str) -> None:
    code = f"""
import os, signal
from forkserve.store import faults
from forkserve.store.depots import LocalDepot
faults.hook = lambda p: os.kill(os.getpid(), signal.SIGKILL) if p == {step!r} else None
LocalDepot({str(tmp_path / "chunks")!r}).put([("a" * 64, [b"x" * 9999]), ("b" * 64, [b"y" * 99])])
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    depot = LocalDepot(tmp_path / "chunks")
    sizes = {s.key: s.bytes for s in depot.entries()}
    assert sizes in ({}, {A: 9999, B: 99})
    assert bool(sizes) == (step in ("chunk.renamed", "chunk.durable"))
    depot.sweep(0)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".kv"]


def ended(depot: LocalDepot) -> Path:
    """A file that a process had begun to write when it ended."""
    code = f"""
import os
from forkserve.store import faults
from forkserve.store.depots import LocalDepot
faults.hook = lambda point: os._exit(0) if point == "chunk.written" else None
LocalDepot({str(depot.folder)!r}).put([({C!r}, [b"half"])])
"""
    before = set(depot.folder.rglob(".tmp-*"))
    subprocess.run([sys.executable, "-c", code], check=True)
    (path,) = set(depot.folder.rglob(".tmp-*")) - before
    return path


def test_leftovers_of_the_living_and_the_young_stay(tmp_path: Path) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    depot.put([(A, [b"a"])])
    dead = ended(depot)
    mine = depot._temp(A)
    mine.write_bytes(b"half")
    older = tmp_path / "chunks" / "aa" / ".tmp-1-1"  # as an older version wrote it
    older.write_bytes(b"half")
    assert depot.sweep(3600) == 0
    assert depot.sweep(0) == 1
    assert not dead.exists()
    old = time.time() - 100_000
    os.utime(mine, (old, old))
    os.utime(older, (old, old))
    assert depot.sweep(0) == 2


def test_what_is_unfinished_or_damaged_is_counted(tmp_path: Path) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    depot.put([(A, [b"a"]), (B, [b"b"])])
    assert depot.waste() == Waste()
    ended(depot)
    depot._temp(A).write_bytes(b"half")
    depot.quarantine(B, "payload")
    found = depot.waste()
    assert (found.leftovers, found.aside) == (2, 1)
    assert found.leftover_bytes > 0
    assert found.aside_bytes > 0
    assert depot.tidy() == 1, "only that of the process that has ended"
    assert depot.waste().leftovers == 1


def test_the_oldest_of_too_many_damaged_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    monkeypatch.setattr(local, "ASIDE_FILES", 2)
    for key in (A, B, C):
        depot.put([(key, [b"x" * 100])])
        depot.quarantine(key, "payload")
    assert sorted(p.name[0] for p in depot.aside.iterdir()) == ["b", "c"]
    assert depot.drop_aside(depot.waste().aside_bytes // 2) > 0
    assert [p.name[0] for p in depot.aside.iterdir()] == ["c"]


# -------------------------------------------------------------------- faults


def test_faults_by_plan_and_by_seed(tmp_path: Path) -> None:
    depot = FaultyDepot(MemoryDepot())
    depot.fail["put"] = errno.ENOSPC
    with pytest.raises(OSError, match="injected into put") as found:
        depot.put([(A, [b"a"])])
    assert found.value.errno == errno.ENOSPC
    del depot.fail["put"]
    depot.put([(A, [b"abc"])])
    depot.spoil = lambda data: data.__setitem__(0, 0)
    assert bytes(depot.open(A).data) == b"\0bc"

    def outcomes(seed: int) -> list[bool]:
        shaky = FaultyDepot(MemoryDepot(), rate=0.5, seed=seed)
        out = []
        for _ in range(30):
            try:
                shaky.stat(A)
                out.append(True)
            except OSError:
                out.append(False)
        return out

    assert outcomes(1) == outcomes(1)
    assert 5 < sum(outcomes(1)) < 25


def test_an_object_store_that_is_away_raises_oserror() -> None:
    pytest.importorskip("obstore")
    from forkserve.store.depots.s3 import S3Depot

    depot = S3Depot(
        "none",
        timeout_s=0.5,
        endpoint="http://127.0.0.1:9",
        region="x",
        access_key_id="x",
        secret_access_key="x",
    )
    with pytest.raises(OSError, match="object store"):
        depot.stat(A)


def test_what_a_store_is_given_comes_from_one_place() -> None:
    import forkserve.store as package
    from forkserve.store import KeepSession, S3Depot, depots, policies

    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert KeepSession is policies.KeepSession
    assert package.LocalDepot is depots.LocalDepot
    assert S3Depot.__name__ in package.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
