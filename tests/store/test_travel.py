"""A whole session in a file: its tree, its commits and its rows, to another store and on."""

from __future__ import annotations

import base64
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.bundle import _add, _signed, export_bundle, has_sessions, import_bundle
from forkserve.store.rebuild import verify

from .engines import PROMPT, cold, engine, prefilled, snapshot
from .test_cli import ask, run

TOLD = ("binding", "tool_time", "tool_output", "decision")


def traveller(folder: Path | Store) -> dict[str, Any]:
    """A session with a branch that lives on, commits and what was learned; its snapshot."""
    eng = engine(folder)
    h = eng.open(PROMPT, session="a", tenant="acme", salt="s", seed=5)
    trunk = h.tip
    eng.observe("a", "bash", ms=120.0)
    eng.observe("a", "json", output=[1, 2, 3], schema_stable=True)
    eng.speculate("a", eng.fork("a", trunk, "unlikely"), guess=[1], q=0.01)
    other = eng.fork("a", trunk, "other", [7, 1])
    eng.attempt("a", other)
    eng.generate("a", 4, node=other)
    eng.commit("a", trunk, PROMPT[:300], branch="main")
    eng.generate("a", 3)
    eng.publish("a")
    eng.publish("a", other)
    before = snapshot(eng, "a")
    eng.shutdown()
    return before


def rows(store: Store, table: str) -> list[tuple[Any, ...]]:
    names = [row[1] for row in store.catalog.read(f"PRAGMA table_info({table})")]
    kept = ", ".join(name for name in names if name != "id" or table == "node")
    return store.catalog.read(f"SELECT {kept} FROM {table} ORDER BY {kept}")


def test_a_session_travels_with_its_tree_its_commits_and_its_rows(tmp_path: Path) -> None:
    before = traveller(tmp_path / "from")
    with Store(tmp_path / "from", "shared") as store:
        done = export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
        assert (done.names, done.sessions, done.chunks) == ((), ("a",), 3)
        told = {table: rows(store, table) for table in TOLD}
    assert has_sessions(tmp_path / "bundle")
    with Store(tmp_path / "to") as store:
        for _ in range(2):  # a second time changes nothing
            assert import_bundle(store.vault, tmp_path / "bundle").sessions == ("a",)
        assert {table: rows(store, table) for table in told} == told
        eng = engine(store)
        eng.resume("a")
        assert snapshot(eng, "a") == before
        assert eng._core.experience["a"].pause_ms("bash") == 120.0
        assert eng._core.experience["a"].output("json")[0]
        eng.check()
        for tip in list(eng.tree("a").tips.values()):
            text = eng.tokens("a", tip.id)
            done_before = prefilled(eng)
            eng.warm("a", tip.id)
            assert eng.generate("a", 4, node=tip.id) == cold(text, 4)
            assert prefilled(eng) - done_before < 256
        assert verify(store.vault).clean
        eng.shutdown()
    assert ((tmp_path / "bundle").stat().st_mode & 0o077) == 0


def test_a_session_and_a_name_travel_together_by_the_command(tmp_path: Path) -> None:
    folder, to, file = tmp_path / "from", tmp_path / "to", tmp_path / "bundle"
    traveller(folder)
    eng = engine(folder)
    eng.resume("a")
    eng.publish("a", name="state")
    eng.publish("a", name="b")
    eng.open([1, 2], session="b", salt="x")
    eng.shutdown()
    found = ask(folder, "export", file, "state", "a")
    assert (found["names"], found["sessions"]) == (["state"], ["a"])
    assert "1 state, 1 session, 3 chunks" in run(to, "import", file).output
    assert [s["session"] for s in ask(to, "ls")["sessions"]] == ["a"]
    assert "say --session" in run(folder, "export", tmp_path / "c", "b", code=2).output
    assert ask(folder, "export", tmp_path / "c", "--session", "b")["sessions"] == ["b"]
    assert "no session 'nobody'" in run(folder, "export", tmp_path / "d", "nobody", code=2).output
    eng = engine(to)
    eng.resume("a")
    run(to, "import", tmp_path / "c", code=2)  # an engine owns the store
    eng.shutdown()
    run(to, "import", tmp_path / "c")
    assert {s["session"] for s in ask(to, "ls")["sessions"]} == {"a", "b"}


def test_only_the_owner_takes_sessions_in(tmp_path: Path) -> None:
    traveller(tmp_path / "from")
    with Store(tmp_path / "from", "shared") as store:
        export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
    with Store(tmp_path / "to", "shared") as store:
        with pytest.raises(StoreError, match="only the owner"):
            import_bundle(store.vault, tmp_path / "bundle")
        assert store.catalog.usage() == {}


def test_another_session_of_that_id_stays_as_it_is(tmp_path: Path) -> None:
    traveller(tmp_path / "from")
    with Store(tmp_path / "from", "shared") as store:
        export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
    eng = engine(tmp_path / "to")
    eng.open([1, 2, 3], session="a")
    assert eng.store is not None
    with pytest.raises(StoreError, match="another session 'a'"):
        import_bundle(eng.store.vault, tmp_path / "bundle")
    assert eng.store.catalog.usage() == {}
    assert eng.tokens("a") == [1, 2, 3]
    eng.shutdown()


# -------------------------------------------------------------------- tampered

Edit = Callable[[dict[str, Any]], Any]


def edit(field: str, value: Any, table: str = "", row: int = 0) -> Edit:
    def change(one: dict[str, Any]) -> None:
        (one[table][row] if table else one)[field] = value

    return change


EDITS: dict[str, Edit] = {
    "another text": lambda one: edit("ids", flipped(one["run"][0]["ids"]), "run")(one),
    "text cut off": lambda one: edit("ids", one["run"][0]["ids"][:400], "run")(one),
    "text of nobody": edit("node", 99, "run", -1),
    "no text": lambda one: one["run"].clear(),
    "another salt": edit("salt", base64.b64encode(b"t").decode()),
    "no base64": edit("salt", "~"),
    "no utf-8": edit("salt", "/w=="),
    "another chain": edit("chain", "0" * 64, "node", -1),
    "no chain": edit("chain", None, "node", -1),
    "an orphan": edit("parent", 77, "node", 1),
    "beyond its parent": edit("start", 10**6, "node", 1),
    "a node twice": lambda one: one["node"].append(one["node"][-1]),
    "a tip nowhere": edit("node", 99, "tip"),
    "no main line": lambda one: one["tip"].pop(0),
    "a commit twice": lambda one: one["binding"].append(one["binding"][0]),
    "an id that is used again": edit("next_node", 2),
    "a mode that is not kept": edit("mode", "spec", "node"),
    "a huge number": edit("seq", 2**70, "binding"),
    "a negative line": edit("line", -1, "tip"),
    "a seed that is none": edit("seed", "x"),
    "a time that is none": edit("created_at", "soon"),
    "another model": edit("fingerprint", "{}"),
    "a surrogate": edit("tenant", "\ud800"),
    "no id": edit("id", ""),
    "something more": edit("more", 1),
    "a table less": lambda one: one.pop("tip"),
    "learned nonsense": edit("ids", 5, "tool_output"),
    "a decision of nobody": edit("node", -1, "decision"),
    "a decision without a time": edit("at", None, "decision"),
    "a decision that says more": edit("more", 1, "decision"),
}


def flipped(text: str) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[40] ^= 1
    return base64.b64encode(raw).decode()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes]]:
    folder = tmp_path_factory.mktemp("from")
    traveller(folder / "store")
    with Store(folder / "store", "shared") as store:
        export_bundle(store.vault, folder / "bundle", sessions=["a"])
    with tarfile.open(folder / "bundle") as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]


@pytest.mark.parametrize("what", EDITS)
def test_a_session_that_was_changed_is_refused_and_nothing_is_seen(
    tmp_path: Path, members: list[tuple[str, bytes]], what: str
) -> None:
    """Whoever makes a bundle can make its hash as well: what it says must still fit together."""
    manifest = json.loads(json.loads(members[0][1])["manifest"])
    EDITS[what](manifest["sessions"][0])
    with tarfile.open(tmp_path / "bundle", "w") as tar:
        for name, data in [(members[0][0], _signed(manifest, None)), *members[1:]]:
            _add(tar, name, data)
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError):
            import_bundle(store.vault, tmp_path / "bundle")
        assert store.catalog.usage() == {}
        for table in ("session", "node", "run", "tip", "binding"):
            assert store.catalog.read(f"SELECT count(*) FROM {table}") == [(0,)]


def test_every_changed_byte_of_a_manifest_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]]
) -> None:
    with Store(tmp_path / "to") as store:
        raw = members[0][1]
        for at in range(0, len(raw), 211):
            data = bytearray(raw)
            data[at] ^= 0x04
            with tarfile.open(tmp_path / "bundle", "w") as tar:
                for name, body in [(members[0][0], bytes(data)), *members[1:]]:
                    _add(tar, name, body)
            with pytest.raises(StoreError):
                import_bundle(store.vault, tmp_path / "bundle")
        assert store.catalog.usage() == {}
        assert store.catalog.read("SELECT count(*) FROM session") == [(0,)]


def test_an_older_reader_would_refuse_a_bundle_with_sessions(
    members: list[tuple[str, bytes]],
) -> None:
    """It would leave the sessions out without a word."""
    assert json.loads(json.loads(members[0][1])["manifest"])["format"] == 3


def test_a_sealed_session_travels_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("K", "33" * 32)
    path = tmp_path / "bundle"
    with Store(tmp_path / "from", encrypt="env:K") as store:
        before = traveller(store)
        export_bundle(store.vault, path, sessions=["a"])
    needle = b"".join(t.to_bytes(4, "little") for t in PROMPT[5:13])
    assert needle not in path.read_bytes()
    assert base64.b64encode(needle)[4:-4] not in path.read_bytes()
    with Store(tmp_path / "to", encrypt="env:K") as store:
        import_bundle(store.vault, path)
        eng = engine(store)
        eng.resume("a")
        assert snapshot(eng, "a") == before
        assert eng._core.experience["a"].output("json")[0]
        eng.shutdown()
    monkeypatch.setenv("L", "44" * 32)
    for options in ({}, {"encrypt": "env:L"}):
        other = Store(tmp_path / f"no{len(options)}", **options)  # type: ignore[arg-type]
        with other, pytest.raises(StoreError, match="another key"):
            import_bundle(other.vault, path)
