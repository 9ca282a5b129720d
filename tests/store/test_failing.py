"""A catalog that fails, breaks or is locked with a key; and what it has on record."""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import ForkServeError, StoreError
from forkserve.store import Store
from forkserve.store.catalog import Catalog, CatalogFault
from tests.instructions import instructions

from .engines import PROMPT, cold, crash, engine, prefilled
from .test_resume import stored_text


class Failing:
    """Makes every write of a catalog fail until told otherwise."""

    def __init__(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        real = Catalog.write

        def write(this: Catalog, **options: Any) -> Any:
            if self.on and this is catalog:
                raise CatalogFault("database or disk is full")
            return real(this, **options)

        monkeypatch.setattr(Catalog, "write", write)


def test_a_full_disk_stops_no_token_and_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    assert eng.store is not None
    failing = Failing(eng.store.catalog, monkeypatch)
    assert eng.generate("a", 4) == cold(PROMPT, 4)
    eng.commit("a", eng.tip("a"), [5, 6])
    assert eng.generate("a", 4) == cold([*PROMPT, *cold(PROMPT, 4), 5, 6], 4)
    assert eng.store.health()["failures"]["CatalogFault"] >= 3
    assert "full" in eng.store.health()["last_failure"]
    assert stored_text(tmp_path, "a") == PROMPT
    failing.on = False
    eng.generate("a", 1)
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    (count,) = eng.store.catalog.read("SELECT count(*) FROM binding")[0]
    assert count == 1, "the commit that could not be noted then is noted now"
    eng.shutdown()


def test_a_database_that_breaks_while_it_is_used_stops_no_token(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    assert eng.store is not None
    eng.publish("a")
    for path in tmp_path.glob("catalog.db*"):
        with path.open("r+b") as file:  # the very file that is open, and its log
            file.write(os.urandom(path.stat().st_size))
    assert eng.generate("a", 4) == cold(PROMPT, 4)
    h = eng.open(PROMPT[:300])
    assert eng.generate(h.id, 4) == cold(PROMPT[:300], 4)
    eng.commit("a", eng.tip("a"), [1, 2])
    eng.generate("a", 2)
    eng.warm("a")
    eng.check()
    assert sum(eng.store.health()["failures"].values()) > 0
    eng.shutdown()
    with pytest.raises(StoreError):
        engine(tmp_path)


def test_a_damaged_session_is_a_typed_error(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.shutdown()
    db = sqlite3.connect(tmp_path / "catalog.db")
    db.execute("UPDATE run SET ids = x'0102'")
    db.commit()
    db.close()
    eng = engine(tmp_path)
    with pytest.raises(StoreError, match="cut off"):
        eng.resume("a")
    assert eng.sessions() == []
    eng.shutdown()


def test_no_prompt_is_readable_in_an_encrypted_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("K", "11" * 32)
    secret = "the launch code is 0000 and the dog is called Bello " * 20
    with Store(tmp_path, encrypt="env:K") as store:
        eng = engine(store)
        h = eng.open(secret, session="a", salt="salt of the earth")
        eng.publish("a", name="secret-state")
        eng.commit("a", h.tip, secret)
        eng.generate("a", 3)
        text = eng.tokens("a")
        eng.observe("a", "tool", output=secret, schema_stable=True)
        eng.shutdown()
    needles = [bytes(range(0))]
    needles = [secret.encode()[:24], b"salt of the earth"]
    needles += [b"".join(t.to_bytes(w, "little") for t in text[5:13]) for w in (2, 4, 8)]
    for path in tmp_path.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(needle in data for needle in needles), path
    with Store(tmp_path, encrypt="env:K") as store:
        eng = engine(store)
        assert eng.resume("a").cached_tokens >= 1024
        assert eng.tokens("a") == text
        assert eng._core.experience["a"].output("tool")[0]
        assert len(eng.tokens(eng.restore("secret-state").id)) == len(secret)
        eng.shutdown()
    monkeypatch.setenv("K", "22" * 32)
    for options in ({"encrypt": "env:K"}, {}):
        with Store(tmp_path, **options) as store:  # type: ignore[arg-type]
            eng = engine(store)
            with pytest.raises(StoreError):
                eng.resume("a")
            h = eng.open(secret, session=f"b{len(options)}", salt="salt of the earth")
            assert h.cached_tokens == 0, "a wrong key is a miss"
            assert eng.generate(h.id, 3) == cold(list(secret.encode()), 3)
            eng.shutdown()


# -------------------------------------------------------------------- what is on record


def test_meters_times_commits_and_decisions_are_rows_to_join(tmp_path: Path) -> None:
    eng = engine(tmp_path, q_min=0.3)
    h = eng.open(PROMPT, session="a", tenant="acme")
    trunk = h.tip
    eng.observe("a", "bash", ms=30.0)
    child = eng.fork("a", trunk, "bash", [1, 2, 3])
    eng.speculate("a", child, t_idle_ms=1e6)
    eng.speculate("a", eng.fork("a", trunk, "x"), guess=[1], q=0.1)
    eng.drain_slack()
    eng.commit("a", trunk, [1, 2, 3, 4])
    eng.generate("a", 2)
    assert eng.store is not None
    read = eng.store.catalog.read
    assert read("SELECT role, branch, hit, lcp, tail FROM binding") == [
        ("root", "bash", "known_suffix", len(PROMPT) + 3, 1)
    ]
    assert read("SELECT tool, ms FROM tool_time") == [("bash", 30.0)]
    decisions = read("SELECT what, verdict, reason FROM decision ORDER BY id")
    assert ("speculate", "admitted", "") in decisions
    assert any(d[1] == "refused" and d[2] for d in decisions)
    meters = dict(read("SELECT name, value FROM meter WHERE tenant = 'acme'"))
    assert meters["charged"] == eng._core.meter.charged("acme") > len(PROMPT)
    eng.shutdown()
    eng = engine(tmp_path)
    eng.resume("a")
    assert eng._core.meter.charged("acme") == meters["charged"]
    eng.shutdown()


def test_what_was_learned_of_tools_comes_back(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    for turn in range(40):
        eng.observe("a", "json", ms=10.0 + turn, output=[1, 2, 3, 4, turn % 2], schema_stable=True)
    eng.observe("a", "free", output=[9, 9], schema_stable=True)
    eng.observe("a", "free", output=[9, 8])  # free-form after all: forgotten
    eng.commit("a", h.tip, [5])
    learned = eng._core.experience["a"]
    guess, pause = learned.output("json"), learned.pause_ms("json")
    assert guess[0][:4] == (1, 2, 3, 4)
    crash(eng)
    eng = engine(tmp_path)
    eng.resume("a")
    learned = eng._core.experience["a"]
    assert learned.output("json") == guess
    assert learned.pause_ms("json") == pause
    assert learned.output("free") == ((), 0.0)
    assert eng.store is not None
    kept = eng.store.catalog.read("SELECT tool, count(*) FROM tool_output GROUP BY tool")
    assert kept == [("json", 32)], "as many as the predictor looks at"
    child = eng.fork("a", eng.tip("a"), "json")
    assert eng.speculate("a", child, tool="json").tokens >= 4
    eng.shutdown()


def test_commits_cost_little(tmp_path: Path) -> None:
    """The issue asks for a median under 2 ms; what is counted here does not grow with the text."""
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    assert eng._journal is not None
    costs = []
    for _ in range(60):
        eng.append("a", h.tip, [1, 2])
        with eng._core.lock:
            eng.tree("a").tip.tokens.append(3)
            eng.tree("a").tip.known += 1
        costs.append(instructions(partial(eng._journal.sync, "a")))
    assert max(costs[30:]) < 1.2 * min(costs[1:30])
    eng.shutdown()
    assert issubclass(StoreError, ForkServeError)
    assert prefilled(eng) >= 0
