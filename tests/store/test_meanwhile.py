"""What other processes do between two steps of one, and bytes that nobody sane writes."""

from __future__ import annotations

import base64
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store, faults
from forkserve.store.behind import WriteBehind
from forkserve.store.bundle import _MANIFEST, _signed, export_bundle, import_bundle
from forkserve.store.catalog import Role
from forkserve.store.chunks import ChunkFault, Header, build, hash_parts, parse_header
from forkserve.store.collect import collect
from forkserve.store.depots import LocalDepot
from forkserve.store.identity import chunk_id, root_id
from forkserve.store.rebuild import rebuild, verify
from forkserve.store.scrub import scrub
from forkserve.store.vault import Vault

from .engines import PROMPT, engine
from .rig import PRINT, chain, files, good, rows, vault
from .test_hostile_bundle import manifest_of, write
from .test_travel import traveller

LINKS = chain(range(12))


def before_open(v: Vault, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Do `act` once, before the next chunk of `v` is opened."""
    depot, todo = v.depots["disk"], [act]
    opened = depot.open

    def open_(key: str) -> Any:
        if todo:
            todo.pop()()
        return opened(key)

    monkeypatch.setattr(depot, "open", open_)


@pytest.mark.parametrize("role", ["shared", "reader"])
@pytest.mark.parametrize("check", [verify, scrub])
def test_what_is_collected_while_it_is_checked_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Vault], Any], role: Role
) -> None:
    other = vault(tmp_path)
    other.put(PRINT, LINKS, rows)
    v = vault(tmp_path, role)
    before_open(v, monkeypatch, lambda: collect(other, grace_s=-5))
    report = check(v)
    assert (report.dangling, report.faults) == (0, [])
    assert not v.catalog.events("quarantine")
    assert not files(tmp_path)


def test_what_is_stored_anew_while_it_is_found_missing_stays_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file goes, its reader sees that, a publish brings it back, the reader strikes no row."""
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    (first,) = [found for found in v.find(PRINT, LINKS) if found.link is LINKS[0]]
    path = next(path for path in files(tmp_path) if path.stem == first.content)

    def opened(key: str) -> Any:
        path.unlink()
        assert other.put(PRINT, LINKS[:1], rows).written == 1
        raise FileNotFoundError(key)

    with monkeypatch.context() as patch:
        patch.setattr(v.depots["disk"], "open", opened)
        assert v.load(first) is None
    assert good(v, LINKS) == 3
    assert verify(v).orphans == 0


def test_a_lost_file_is_still_reported(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    files(tmp_path)[0].unlink()
    assert verify(v).dangling == 1
    assert [event["why"] for event in v.catalog.events("quarantine")] == ["missing"]


def test_rebuild_lists_nothing_that_is_collected_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    with v.catalog.write() as db:
        db.execute("DELETE FROM replica")
    record = v.catalog.record

    def late(*values: Any) -> list[str]:
        collect(other, grace_s=-5)
        return record(*values)

    monkeypatch.setattr(v.catalog, "record", late)
    assert rebuild(v).adopted == 0
    assert v.catalog.read("SELECT count(*) FROM part") == [(0,)]


@pytest.mark.parametrize("when", ["far.doomed", "gc.deleted"])
def test_rebuild_lists_nothing_of_a_further_place_that_is_collected_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """gc has decided, and deletes or has deleted, when rebuild notes what it read before."""
    far = LocalDepot(tmp_path / "far", place="object")
    depots = [LocalDepot(tmp_path / "chunks"), far]
    v, other = vault(tmp_path, depots=depots), vault(tmp_path, depots=depots)
    far.put([(h.content, parts) for h, parts in (v.pack(PRINT, x, rows(x)) for x in LINKS)])
    record, todo = v.catalog.record, [1]

    def late(*values: Any) -> list[str]:
        noted: list[list[str]] = []
        refused: list[FileNotFoundError] = []

        def hook(point: str) -> None:
            if point == when and not noted:
                try:
                    noted.append(record(*values))
                except FileNotFoundError as error:
                    refused.append(error)

        if todo and values[0] == "object":
            todo.pop()
            faults.hook = hook
            collect(other, grace_s=-5)
            if refused:
                raise refused[0]
            return noted[0]
        return record(*values)

    monkeypatch.setattr(v.catalog, "record", late)
    rebuild(v)
    assert list(far.entries()) == []
    assert v.catalog.read("SELECT count(*) FROM part") == [(0,)]


def test_a_chunk_that_is_collected_before_it_was_sent_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depots = [LocalDepot(tmp_path / "chunks"), LocalDepot(tmp_path / "far", place="object")]
    v, other = vault(tmp_path, depots=depots), vault(tmp_path, depots=depots)
    behind = WriteBehind(v, "object")
    v.stored = lambda: None  # sent by hand
    v.put(PRINT, LINKS, rows)
    before_open(v, monkeypatch, lambda: collect(other, grace_s=-5))
    assert behind.step()
    assert not behind.step()
    assert v.catalog.read("SELECT kind FROM event WHERE kind != 'failed'") == []
    v.put(PRINT, LINKS, rows)
    files(tmp_path)[0].unlink()
    while behind.step():
        pass
    assert len(v.catalog.events("behind_lost")) == 1


FORGED: dict[str, dict[str, Any]] = {
    "no tokens": {"count": 0},
    "fewer ids than tokens": {"count": 9},
    "no ids": {"tokens": b"", "count": 1},
    "sealed, no tokens": {"count": 0, "sealed": True},
    "no fingerprint": {"meta": '{"a":1}'},
    "a newer fingerprint": {"meta": PRINT.text.replace('"format":1', '"format":2')},
}


def forged(
    count: int = 4, tokens: bytes = b"\1\0\0\0" * 4, meta: str = PRINT.text, sealed: bool = False
) -> tuple[Header, bytes]:
    payload = bytes(128)
    link = chunk_id(bytes(32), tokens) if tokens else bytes(32)
    fields = (PRINT.digest, meta, bytes(32), link, 0, count, tokens, "raw", 128, 128)
    header, raw = build(Header(*fields, hash_parts([payload]), sealed))
    return header, raw + payload


@pytest.mark.parametrize("what", FORGED)
def test_a_chunk_that_contradicts_itself_is_refused_and_in_nobodys_way(
    tmp_path: Path, what: str
) -> None:
    header, data = forged(**FORGED[what])
    with pytest.raises(ChunkFault):
        parse_header(data, len(data))
    v = vault(tmp_path)
    member = {"content": header.content, "bytes": len(data), "places": ["disk"]}
    manifest = {"format": 1, "names": [], "chunks": [member]}
    bundle = write(
        tmp_path / "b", [(_MANIFEST, _signed(manifest, None)), (f"{header.content}.kv", data)]
    )
    with pytest.raises(StoreError, match="was changed"):
        import_bundle(v, bundle)
    v.put(PRINT, LINKS, rows)
    v.depots["disk"].put([(header.content, [data])])
    v.catalog.forget("disk", [found.content for found in v.find(PRINT, LINKS)])
    report = rebuild(v)
    assert (report.adopted, len(report.faults)) == (3, 1)
    assert good(v, LINKS) == 3


@pytest.mark.parametrize(("ids", "tokens"), [(b"\1\0\0\0\2", 2), (b"", 0)])
def test_a_name_without_a_text_is_refused(tmp_path: Path, ids: bytes, tokens: int) -> None:
    name = {"name": "n", "session": "a", "node": 0, "tenant": "t", "seed": "1", "chain": None}
    name |= {"root": root_id("").hex(), "tokens": tokens, "created_at": 1.0, "salt": ""}
    name |= {"ids": base64.b64encode(ids).decode(), "fingerprint": PRINT.text}
    manifest = {"format": 1, "names": [name], "chunks": []}
    bundle = write(tmp_path / "b", [(_MANIFEST, _signed(manifest, None))])
    with pytest.raises(StoreError, match="does not give its chain"):
        import_bundle(vault(tmp_path / "s"), bundle)


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no number after it": lambda one: one.update(next_node=2**63 - 1),
    "no line after it": lambda one: one.update(next_line=2**63 - 1),
    "no commit after it": lambda one: [n.update(generation=2**63 - 1) for n in one["node"]],
    "no binding after it": lambda one: one["binding"][-1].update(seq=2**63 - 1),
    "a tool before its time": lambda one: one["tool_time"][0].update(ms=-1.0),
    "half an id of a tool": lambda one: one["tool_output"][0].update(ids="AAAA"),
    "a negative id of a tool": lambda one: one["tool_output"][0].update(ids="/////w=="),
}


@pytest.mark.parametrize("what", ODD)
def test_a_session_that_could_not_go_on_is_refused(tmp_path: Path, what: str) -> None:
    traveller(tmp_path / "from")
    with Store(tmp_path / "from", "shared") as store:
        export_bundle(store.vault, tmp_path / "b", sessions=["a"])
    with tarfile.open(tmp_path / "b") as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    manifest = manifest_of(members)
    ODD[what](manifest["sessions"][0])
    write(tmp_path / "b", [(_MANIFEST, _signed(manifest, None)), *members[1:]])
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError, match=r"makes no sense|stored token ids"):
            import_bundle(store.vault, tmp_path / "b")
        assert store.catalog.read("SELECT 1 FROM session") == []
        assert store.catalog.usage() == {}


def test_a_sealed_state_without_a_key_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KEY", "5a" * 32)
    with Store(tmp_path, encrypt="env:KEY") as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.publish("a", name="n")
        eng.shutdown()
    with Store(tmp_path) as store:
        eng = engine(store)
        for verb in (lambda: eng.restore("n"), lambda: eng.resume("a")):
            with pytest.raises(StoreError, match="sealed with a key"):
                verb()
        with pytest.raises(StoreError, match="sealed with a key"):
            export_bundle(store.vault, tmp_path / "b", ["n"])
        eng.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_touch_the_connection(tmp_path: Path) -> None:
    v = vault(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            with v.catalog.locked():
                os._exit(1)
        except StoreError:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def between(v: Vault, monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], Any]) -> None:
    """Do `act` once, before transaction `number` (from 1) in which `v` lists what it has stored."""
    record, calls = v.catalog.record, [0]

    def late(*values: Any, **more: Any) -> list[str]:
        calls[0] += 1
        if calls[0] == number:
            act()
        return record(*values, **more)

    monkeypatch.setattr(v.catalog, "record", late)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_gc_beside_a_publish_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """gc takes what is listed already, or was found there, before the rest is listed."""
    v, other = vault(tmp_path), vault(tmp_path)
    other.put(PRINT, LINKS[:known], rows)
    monkeypatch.setattr("forkserve.store.vault._STAGED", 1)  # a transaction for each chunk
    between(v, monkeypatch, 2 if known < 2 else 1, lambda: collect(other, grace_s=-5))
    report = v.put(PRINT, LINKS, rows)
    assert good(v, LINKS) == len(LINKS)
    assert report.known + report.written >= len(LINKS)
    assert report.known == 0
    assert verify(v).orphans == 0


def test_gc_that_never_ends_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    monkeypatch.setattr("forkserve.store.vault._STAGED", 1)
    record = v.catalog.record

    def late(*values: Any, **more: Any) -> list[str]:
        if other.catalog.read("SELECT 1 FROM part"):
            collect(other, grace_s=-5)
        return record(*values, **more)

    monkeypatch.setattr(v.catalog, "record", late)
    with pytest.raises(FileNotFoundError, match="was collected before the next was stored"):
        v.put(PRINT, LINKS, rows)


def test_what_a_chunk_in_its_grace_goes_on_from_stays(tmp_path: Path) -> None:
    """Its own grace is over, as in the middle of a publish that takes longer than the grace."""
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    with v.catalog.write() as db:
        old = "UPDATE chunk SET used_at = used_at - 100, created_at = created_at - 100"
        db.execute(f"{old} WHERE chain != ?", (LINKS[-1].id.hex(),))
    assert collect(v, grace_s=50, dry_run=True).chunks == 0
    assert collect(v, grace_s=50).chunks == 0
    assert good(v, LINKS) == len(LINKS)
    assert collect(v, grace_s=-5).chunks == len(LINKS)
