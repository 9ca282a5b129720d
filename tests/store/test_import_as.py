"""A session under another id, what its tenant was charged, and ids and names that are taken."""

from __future__ import annotations

import json
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import ConfigError, SessionError, StoreError
from forkserve.store import Store
from forkserve.store.bundle import _add, _signed, export_bundle, import_bundle
from forkserve.store.catalog import Catalog
from forkserve.store.rebuild import verify

from .engines import PROMPT, cold, engine, prefilled, snapshot
from .test_cli import ask, run
from .test_travel import TOLD, rows, traveller


def bundle_of(folder: Path, file: Path, *names: str, sessions: tuple[str, ...] = ("a",)) -> Path:
    with Store(folder, "shared") as store:
        export_bundle(store.vault, file, names, sessions)
    return file


def told(store: Store, session: str) -> dict[str, list[Any]]:
    """What is on record of a session, without its id."""
    out = {}
    for table in (*TOLD, "node", "run", "tip"):
        names = [row[1] for row in store.catalog.read(f"PRAGMA table_info({table})")]
        kept = [n for n in names if n != "session" and (n != "id" or table == "node")]
        sql = f"SELECT {', '.join(kept)} FROM {table} WHERE session = ? ORDER BY {', '.join(kept)}"
        out[table] = store.catalog.read(sql, (session,))
    return out


# -------------------------------------------------------------------- another id


def test_a_session_is_taken_in_twice_under_two_ids(tmp_path: Path) -> None:
    before = traveller(tmp_path / "from")
    eng = engine(tmp_path / "from")
    eng.resume("a")
    eng.publish("a", name="state")
    eng.shutdown()
    file = bundle_of(tmp_path / "from", tmp_path / "bundle", "state")
    with Store(tmp_path / "to") as store:
        assert import_bundle(store.vault, file).sessions == ("a",)
        for _ in range(2):  # a second time changes nothing
            done = import_bundle(store.vault, file, as_session="b")
            assert (done.sessions, done.names) == (("b",), ("state",))
        assert told(store, "a") == told(store, "b")
        assert store.catalog.read("SELECT session FROM name") == [("a",)], "it was there already"
        eng = engine(store)
        for session in ("a", "b"):
            eng.resume(session)
            assert snapshot(eng, session) == before
            assert eng._core.experience[session].output("json")[0]
        text = eng.tokens("b")
        assert eng.generate("b", 4) == cold(text, 4) == eng.generate("a", 4)
        eng.check()
        assert verify(store.vault).clean
        assert store.vault.catalog.usage()["disk"][1] == 3, "their rows lie there once"
        eng.shutdown()
        with pytest.raises(StoreError, match="another session 'b': take this one in under another"):
            import_bundle(store.vault, file, as_session="b")  # it went on meanwhile
        assert import_bundle(store.vault, file, as_session="c").sessions == ("c",)


def test_a_name_stands_for_a_node_of_the_session_under_its_new_id(tmp_path: Path) -> None:
    traveller(tmp_path / "from")
    eng = engine(tmp_path / "from")
    eng.resume("a")
    eng.publish("a", name="state")
    eng.publish(eng.open([1, 2], session="other").id, name="more")
    eng.shutdown()
    file = bundle_of(tmp_path / "from", tmp_path / "bundle", "state", "more")
    with Store(tmp_path / "to") as store:
        import_bundle(store.vault, file, as_session="b")
        found = store.catalog.read("SELECT name, session FROM name ORDER BY name")
        assert found == [("more", "other"), ("state", "b")]
        assert store.catalog.read("SELECT 1 FROM session WHERE id = 'a'") == []


def test_a_sealed_session_is_sealed_anew_for_its_new_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("K", "33" * 32)
    with Store(tmp_path / "from", encrypt="env:K") as store:
        before = traveller(store)
        export_bundle(store.vault, tmp_path / "bundle", sessions=["a"])
    with Store(tmp_path / "to", encrypt="env:K") as store:
        for _ in range(2):
            import_bundle(store.vault, tmp_path / "bundle", as_session="b")
        eng = engine(store)
        eng.resume("b")
        assert snapshot(eng, "b") == before
        assert eng._core.experience["b"].output("json")[0]
        needle = b"".join(t.to_bytes(4, "little") for t in PROMPT[5:13])
        assert needle not in b"".join(r[0] for r in store.catalog.read("SELECT ids FROM run"))
        done = prefilled(eng)
        eng.warm("b")
        eng.generate("b", 1)
        assert prefilled(eng) - done < 256, "its rows are found as before"
        eng.shutdown()


@pytest.mark.parametrize("wrong", ["", "half a pair: \ud800", "a\n", "a" * 513, 5, b"x"])
def test_what_is_no_id_is_refused(tmp_path: Path, wrong: Any) -> None:
    traveller(tmp_path / "from")
    file = bundle_of(tmp_path / "from", tmp_path / "bundle")
    with Store(tmp_path / "to") as store:
        with pytest.raises(ConfigError, match="as_session"):
            import_bundle(store.vault, file, as_session=wrong)
        assert store.catalog.usage() == {}


def test_another_id_is_for_exactly_one_session(tmp_path: Path) -> None:
    eng = engine(tmp_path / "from")
    eng.publish(eng.open(PROMPT, session="a").id, name="state")
    eng.open([1, 2], session="b")
    eng.shutdown()
    for sessions, count in (((), 0), (("a", "b"), 2)):
        file = bundle_of(tmp_path / "from", tmp_path / f"b{count}", "state", sessions=sessions)
        with Store(tmp_path / "to") as store:
            with pytest.raises(StoreError, match=f"holds {count} sessions"):
                import_bundle(store.vault, file, as_session="c")
            assert store.catalog.usage() == {}


def test_the_command_takes_another_id(tmp_path: Path) -> None:
    traveller(tmp_path / "s")
    file = tmp_path / "bundle"
    run(tmp_path / "s", "export", file, "a")
    assert ask(tmp_path / "s", "import", file, "--as", "copy")["sessions"] == ["copy"]
    assert {s["session"] for s in ask(tmp_path / "s", "ls")["sessions"]} == {"a", "copy"}
    eng = engine(tmp_path / "s")
    eng.resume("a")
    eng.generate("a", 1)
    eng.shutdown()
    said = run(tmp_path / "s", "import", file, code=2).output
    assert "--as NEWID" in said
    assert "no id" in run(tmp_path / "s", "import", file, "--as", "", code=2).output


def test_a_name_that_came_while_the_bundle_was_read_is_not_passed_over(tmp_path: Path) -> None:
    eng = engine(tmp_path / "from")
    eng.publish(eng.open(PROMPT, session="a").id, name="state")
    eng.shutdown()
    file = bundle_of(tmp_path / "from", tmp_path / "bundle", "state", sessions=())
    eng = engine(tmp_path / "to")
    assert eng.store is not None
    h = eng.open([1, 2, 3], session="x")

    def meanwhile(done: int, total: int) -> None:
        if done == total:
            eng.publish(h.id, name="state")

    with pytest.raises(StoreError, match="'state' stands here for another state"):
        import_bundle(eng.store.vault, file, meanwhile)
    assert eng.tokens(eng.restore("state").id) == [1, 2, 3]
    eng.shutdown()


# -------------------------------------------------------------------- bills


def charged(store: Store, tenant: str = "acme") -> float:
    """The sum that docs/sql.md shows."""
    return float(
        store.catalog.read(
            "SELECT coalesce(sum(charged), 0) FROM"
            " (SELECT value AS charged FROM meter WHERE name = 'charged' AND tenant = ?1"
            " UNION ALL SELECT charged FROM bill WHERE tenant = ?1)",
            (tenant,),
        )[0][0]
    )


def work(folder: Path, session: str, count: int) -> None:
    eng = engine(folder)
    if session in eng.stored_sessions():
        eng.resume(session)
    else:
        eng.open(PROMPT[:count], session=session, tenant="acme")
    eng.generate(session, count)
    eng.shutdown()


def test_charges_add_up_over_processes_and_sessions(tmp_path: Path) -> None:
    """A new session in a new process must not begin the tenant's bill anew."""
    for session, count in (("a", 10), ("b", 7), ("a", 5)):
        before = 0.0
        if tmp_path.joinpath("catalog.db").exists():
            with Store(tmp_path, "shared") as store:
                before = charged(store)
        work(tmp_path, session, count)
        with Store(tmp_path, "shared") as store:
            assert charged(store) >= before + 2 * count
    eng = engine(tmp_path)  # the last session of a tenant ends, and another begins
    assert eng.store is not None
    sums = [charged(eng.store)]
    for turn in range(3):
        h = eng.open([turn, *PROMPT[:49]], tenant="acme")
        eng.close(h.id)
        sums.append(charged(eng.store))
    assert [b - a for a, b in pairwise(sums)] == [50.0] * 3
    eng.shutdown()


def test_a_bill_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    assert eng.store is not None
    h = eng.open(PROMPT[:20], tenant="acme")
    before = charged(eng.store)
    catalog = eng.store.catalog
    real = catalog._file
    catalog._file = None  # as if the database had been replaced
    eng.commit(h.id, h.tip, [1, 2, 3])
    assert eng.store.health()["failures"] == {"CatalogFault": 1}
    catalog._file = real
    assert charged(eng.store) == before
    eng.generate(h.id, 2)
    assert charged(eng.store) == eng._core.meter.charged("acme") > before
    eng.shutdown()


def test_bills_travel_and_are_never_counted_twice(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    work(one, "a", 10)
    work(one, "b", 20)
    first = bundle_of(one, tmp_path / "1")
    work(one, "b", 3)
    second = bundle_of(one, tmp_path / "2", sessions=("b",))
    work(two, "c", 30)
    with Store(one, "shared") as store:
        here = charged(store)
    with Store(two) as store:
        own = charged(store)
        for file in (second, first, second):  # the older one comes later
            import_bundle(store.vault, file)
        assert charged(store) == own + here
        third = tmp_path / "3"
        export_bundle(store.vault, third, sessions=["a", "c"])
    with Store(three) as store:  # what one store says of another travels on
        import_bundle(store.vault, third)
        assert charged(store) == own + here
    work(one, "a", 2)
    with Store(one) as store:
        now = charged(store)
        with pytest.raises(StoreError, match="another session 'a'"):
            import_bundle(store.vault, third)
        assert charged(store) == now > here
        with Store(three, "shared") as other:
            export_bundle(other.vault, tmp_path / "4", sessions=["c"])
        import_bundle(store.vault, tmp_path / "4")  # tells of this store's own charges as well
        assert charged(store) == now + own
    assert Catalog(one, "reader").setting("store") != Catalog(two, "reader").setting("store")


@pytest.mark.parametrize(
    "bill",
    [
        {"charged": -1.0},
        {"charged": float("nan")},
        {"charged": float("inf")},
        {"charged": "1"},
        {"tenant": "somebody else"},
        {"store": "here"},
        {"more": 1},
        "twice",
    ],
    ids=str,
)
def test_a_bill_that_makes_no_sense_is_refused(tmp_path: Path, bill: Any) -> None:
    work(tmp_path / "from", "a", 10)
    file = bundle_of(tmp_path / "from", tmp_path / "bundle")
    with tarfile.open(file) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    manifest = json.loads(json.loads(members[0][1])["manifest"])
    if bill == "twice":
        manifest["bills"] *= 2
    else:
        manifest["bills"][0].update(bill)
    with tarfile.open(file, "w") as tar:
        for name, data in [(members[0][0], _signed(manifest, None)), *members[1:]]:
            _add(tar, name, data)
    with Store(tmp_path / "to") as store:
        with pytest.raises(StoreError):
            import_bundle(store.vault, file)
        assert store.catalog.read("SELECT 1 FROM bill UNION SELECT 1 FROM session") == []


# -------------------------------------------------------------------- formats


def test_a_bundle_of_an_older_format_is_taken_in(tmp_path: Path) -> None:
    before = traveller(tmp_path / "from")
    file = bundle_of(tmp_path / "from", tmp_path / "bundle")
    with tarfile.open(file) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    manifest = json.loads(json.loads(members[0][1])["manifest"])
    del manifest["bills"], manifest["sessions"][0]["decision"]
    for form in (2, 4):
        manifest["format"] = form
        with tarfile.open(file, "w") as tar:
            for name, data in [(members[0][0], _signed(manifest, None)), *members[1:]]:
                _add(tar, name, data)
        with Store(tmp_path / f"to{form}") as store:
            if form == 4:
                with pytest.raises(StoreError, match="knows 1 to 3; use the one"):
                    import_bundle(store.vault, file)
                continue
            import_bundle(store.vault, file)
            eng = engine(store)
            eng.resume("a")
            assert snapshot(eng, "a") == before
            with pytest.raises(SessionError):
                eng.resume("b")
            eng.shutdown()


def test_the_latest_decisions_travel_whatever_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy may say that something is worth any price."""
    from forkserve.store import travel
    from forkserve.store.decisions import decisions

    monkeypatch.setattr(travel, "_DECISIONS", 3)
    traveller(tmp_path / "from")
    with Store(tmp_path / "from", "shared") as store, store.catalog.write() as db:
        for n in range(5):
            db.execute(
                "INSERT INTO decision (session, node, what, verdict, reason, worth, against, at)"
                " VALUES ('a', NULL, 'move', 'memory', 'idle', 9e999, ?, 1)",
                (n,),
            )
    file = bundle_of(tmp_path / "from", tmp_path / "bundle")
    with Store(tmp_path / "to") as store:
        import_bundle(store.vault, file)
        found = decisions(store.catalog, "a")
        assert [(row["worth"], row["against"], row["repeats"]) for row in found] == [
            (float("inf"), 4.0, True),
            (float("inf"), 3.0, True),
            (float("inf"), 2.0, True),
        ]
        assert rows(store, "binding")
