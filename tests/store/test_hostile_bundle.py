"""Bundles that nobody sane makes, and import and export where everything else goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store, faults
from forkserve.store.bundle import _MANIFEST, _add, _hash, _signed, export_bundle, import_bundle
from forkserve.store.collect import collect
from forkserve.store.depots import FaultyDepot, LocalDepot
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine, snapshot
from .test_travel import traveller

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Members]:
    """A bundle with a session and a name; its snapshot, and what is in the file."""
    folder = tmp_path_factory.mktemp("made")
    before = traveller(folder / "s")
    eng = engine(folder / "s")
    eng.resume("a")
    eng.publish("a", name="state")
    assert eng.store is not None
    export_bundle(eng.store.vault, folder / "bundle", ["state"], ["a"])
    eng.shutdown()
    with tarfile.open(folder / "bundle") as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    return folder / "bundle", before, members


def write(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            _add(tar, name, data)
    return path


def manifest_of(members: Members) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.loads(members[0][1])["manifest"])
    return found


def empty(store: Store) -> bool:
    tables = ("session", "node", "run", "name", "bill", "decision")
    return not any(store.catalog.read(f"SELECT 1 FROM {table}") for table in tables)


# -------------------------------------------------------------------- files


def nested(body: str) -> bytes:
    return json.dumps({"manifest": body, "hash": _hash(body, None)}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000,
        nested("[" * 200_000),
        nested('{"format": 3, "x": ' + "[" * 200_000 + "]" * 200_000 + "}"),
        nested("9" * 5000),
        nested("null"),
        nested('{"format": [], "names": 5}'),
        nested('{"format": 3, "names": [], "chunks": [], "sessions": 5}'),
        nested('{"format": 3, "names": [], "chunks": [], "sessions": [5]}'),
        nested('{"format": 3, "names": [], "chunks": [], "bills": {"a": 1}}'),
        b"{}",
        b"\xff\xfe",
    ],
    ids=lambda raw: raw[:40].decode("latin-1"),
)
def test_a_manifest_that_is_none_is_a_typed_error(tmp_path: Path, raw: bytes) -> None:
    file = write(tmp_path / "bundle", [(_MANIFEST, raw)])
    with Store(tmp_path / "to") as store:
        for extra in ({}, {"as_session": "b"}):
            with pytest.raises(StoreError):
                import_bundle(store.vault, file, **extra)  # type: ignore[arg-type]
        assert empty(store)


def test_a_member_that_claims_more_than_the_file_holds_is_not_read(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    """A sparse file of a tar takes a few bytes, and a terabyte of memory when it is read."""
    members = made[2]
    manifest = manifest_of(members)
    manifest["chunks"][0]["bytes"] = 1 << 40
    info = tarfile.TarInfo(members[1][0])
    info.size = 512
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": members[1][0],
        "GNU.sparse.realsize": str(1 << 40),
    }
    with tarfile.open(tmp_path / "bundle", "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, _MANIFEST, _signed(manifest, None))
        tar.addfile(info, io.BytesIO(b"1\n0\n1\n".ljust(512, b"\0")))
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError, match=r"has 1099511627776 bytes, not|was changed|cut off"):
            import_bundle(store.vault, tmp_path / "bundle")
        assert empty(store)


def test_a_chunk_of_another_length_than_the_manifest_says_is_refused(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    manifest = manifest_of(made[2])
    manifest["chunks"][0]["bytes"] += 1
    file = write(tmp_path / "bundle", [(_MANIFEST, _signed(manifest, None)), *made[2][1:]])
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError, match="not the"):
            import_bundle(store.vault, file)
        assert store.catalog.usage() == {}


@pytest.mark.parametrize("end", [1, 600, -30_000, -12_000])
def test_a_bundle_that_is_cut_off_is_refused_under_another_id_too(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members], end: int
) -> None:
    (tmp_path / "bundle").write_bytes(made[0].read_bytes()[:end])
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError):
            import_bundle(store.vault, tmp_path / "bundle", as_session="b")
        assert empty(store)


Edit = Callable[[dict[str, Any]], object]
TREES: dict[str, Edit] = {
    "a cycle": lambda one: one["node"][0].update(parent=one["node"][-1]["id"]),
    "its own parent": lambda one: one["node"][-1].update(parent=one["node"][-1]["id"]),
    "two roots": lambda one: one["node"][-1].update(parent=None, start=0),
    "a root that begins late": lambda one: one["node"][0].update(start=5),
    "an id that no integer holds": lambda one: one["node"][0].update(id=2**63),
    "a line of nobody": lambda one: one["node"][-1].update(line=2**62),
    "lines that will be given again": lambda one: one.update(next_line=1),
    "a tip of another line": lambda one: [tip.update(node=3) for tip in one["tip"]],
    "a line that goes on after its tip": lambda one: one["tip"][0].update(node=1),
    "two children of one line": lambda one: (one["node"][1].update(line=0), one["tip"].pop()),
}


@pytest.mark.parametrize("what", TREES)
def test_a_tree_that_is_none_is_refused_under_either_id(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members], what: str
) -> None:
    manifest = manifest_of(made[2])
    TREES[what](manifest["sessions"][0])
    file = write(tmp_path / "bundle", [(_MANIFEST, _signed(manifest, None)), *made[2][1:]])
    with Store(tmp_path / "to") as store:
        for extra in ({}, {"as_session": "b"}):
            with pytest.raises(StoreError):
                import_bundle(store.vault, file, **extra)  # type: ignore[arg-type]
        assert empty(store)


# -------------------------------------------------------------------- surroundings


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_while_a_session_comes_in_leaves_nothing_visible(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members], code: int
) -> None:
    file, before, _ = made
    disk = FaultyDepot(LocalDepot(tmp_path / "to" / "chunks"))
    with Store(tmp_path / "to", disk=disk) as store:
        eng = engine(store)
        h = eng.open(PROMPT[:20], session="mine")
        disk.fail["put"] = code
        with pytest.raises(OSError, match="injected"):
            import_bundle(store.vault, file, as_session="b")
        assert store.catalog.read("SELECT id FROM session") == [("mine",)]
        assert store.catalog.read("SELECT 1 FROM name UNION SELECT 1 FROM bill") == []
        assert eng.generate(h.id, 3) == cold(PROMPT[:20], 3), "tokens go on"
        disk.fail.clear()
        import_bundle(store.vault, file, as_session="b")
        eng.resume("b")
        assert snapshot(eng, "b") == before
        assert verify(store.vault).clean
        eng.shutdown()


def test_a_catalog_that_is_full_takes_all_of_a_session_or_nothing(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    with Store(tmp_path / "to") as store:
        with store.catalog.locked() as db:
            db.execute("VACUUM")  # migrations leave free pages
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreError, match="full"):
            import_bundle(store.vault, made[0])
        assert empty(store)
        with store.catalog.locked() as db:
            db.execute("PRAGMA max_page_count = 100000")
        assert import_bundle(store.vault, made[0]).sessions == ("a",)
        assert verify(store.vault).clean


def test_the_leftover_of_an_export_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    """Pids come again: in a container they are the same ones after every start."""
    traveller(tmp_path / "s")
    (tmp_path / f".bundle.tmp-{os.getpid()}").write_bytes(b"half a bundle")
    with Store(tmp_path / "s", "shared") as store:
        export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
        text = (tmp_path / "bundle").read_bytes()
        with pytest.raises(StoreError, match="there is no directory"):
            export_bundle(store.vault, tmp_path / "no" / "bundle", sessions=["a"])
        (tmp_path / "taken").mkdir()
        with pytest.raises(OSError, match="taken"):
            export_bundle(store.vault, tmp_path / "taken", sessions=["a"], overwrite=True)
    assert (tmp_path / "bundle").read_bytes() == text
    assert len(list(tmp_path.glob(".*.tmp-*"))) == 1, "no other one was left"


def test_a_text_that_no_bundle_holds_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forkserve.store import bundle

    traveller(tmp_path / "s")
    monkeypatch.setattr(bundle, "_MOST", 1000)
    store = Store(tmp_path / "s", "shared")
    with store, pytest.raises(StoreError, match="more than the 1000 that a bundle holds"):
        export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
    assert not list(tmp_path.glob("*bundle*"))


def test_garbage_that_is_collected_while_a_session_comes_in_costs_no_text(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    """Its chunks are named by nobody until the very end."""
    file, before, _ = made
    with Store(tmp_path / "to") as store:

        def hook(point: str) -> None:
            if point == "import.stored":
                faults.hook = None
                assert collect(store.vault, grace_s=-5).chunks == 3

        faults.hook = hook
        import_bundle(store.vault, file, as_session="b")
        eng = engine(store)
        eng.resume("b")
        assert snapshot(eng, "b") == before
        text = eng.tokens("b")
        assert eng.generate("b", 3) == cold(text, 3)
        assert verify(store.vault).clean
        eng.shutdown()


IMPORT = """
import sys
from pathlib import Path
from forkserve.store import Store, faults
from forkserve.store.bundle import import_bundle
with Store(Path(sys.argv[1])) as store:
    print("ready", flush=True)
    faults.hook = lambda point: sys.stdin.readline() if point == "import.entered" else None
    print(import_bundle(store.vault, Path(sys.argv[2]), as_session="b").sessions[0], flush=True)
"""


def test_two_processes_take_the_same_session_in(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    """The second is told who is at it; after a kill it takes over and finds nothing half done."""
    file, before, _ = made
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "to"), str(file)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    with pytest.raises(StoreError, match=f"in use by process {first.pid}"):
        Store(tmp_path / "to")
    store = Store(tmp_path / "to", "shared")
    with store, pytest.raises(StoreError, match="only the owner"):
        import_bundle(store.vault, file, as_session="b")
    first.kill()
    first.wait()
    first.stdout.close()
    assert first.stdin is not None
    first.stdin.close()
    with Store(tmp_path / "to") as store:
        assert store.catalog.read("SELECT 1 FROM session UNION SELECT 1 FROM name") == []
        import_bundle(store.vault, file, as_session="b")
        eng = engine(store)
        eng.resume("b")
        assert snapshot(eng, "b") == before
        eng.shutdown()


def test_threads_take_the_same_session_in(
    tmp_path: Path, made: tuple[Path, dict[str, Any], Members]
) -> None:
    failed: list[BaseException] = []
    with Store(tmp_path / "to") as store:

        def take(session: str) -> None:
            try:
                import_bundle(store.vault, made[0], as_session=session)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=take, args=(name,)) for name in "bbcc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert failed == []
        assert store.catalog.read("SELECT id FROM session ORDER BY 1") == [("b",), ("c",)]
        assert verify(store.vault).clean


def test_a_reader_of_the_schema_before_is_told(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    db = sqlite3.connect(tmp_path / "s" / "catalog.db")
    db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(StoreError, match="open it once for writing"):
        Store(tmp_path / "s", "reader")
