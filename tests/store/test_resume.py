"""The tree persisted: what a verb returned is there after a crash, and goes on the same."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import ConfigError, ForkServeError, NodeError, SessionError, StoreError
from forkserve.store import Store
from forkserve.store.catalog import Catalog, CatalogFault
from forkserve.store.rebuild import verify
from forkserve.store.records import read_session
from forkserve.types import SamplingParams
from tests.instructions import instructions

from .engines import PROMPT, cold, crash, engine, prefilled, snapshot


def stored_text(folder: Path, session: str) -> list[int]:
    """Text of the main line as another process would read it now."""
    catalog = Catalog(folder, "reader")
    record = read_session(catalog, session, None)
    catalog.close()
    assert record is not None
    nodes = {node.id: node for node in record.nodes}
    out: list[int] = []
    at: int | None = record.tips[0]
    need = None
    while at is not None:
        node = nodes[at]
        out = node.tokens.tolist()[: None if need is None else need - node.start] + out
        need, at = node.start, node.parent
    return out


def test_each_verb_is_durable_when_it_returns(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    assert stored_text(tmp_path, "a") == PROMPT
    eng.generate("a", 5)
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    child = eng.fork("a", h.tip, "guess", [1, 2, 3])
    eng.speculate("a", child)
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    eng.commit("a", h.tip, [1, 2, 9])
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    assert eng.tokens("a")[-3:] == [1, 2, 9]
    eng.append("a", h.tip, [4, 4])
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    for _ in eng.start("a", 4):
        pass
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    generation = eng.start("a", 3)
    assert list(generation.pieces()) is not None
    assert stored_text(tmp_path, "a") == eng.tokens("a")
    eng.shutdown()


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a", tenant="acme", salt="s", seed=5)
    eng.generate("a", 3)
    eng.observe("a", "bash", ms=120.0)
    trunk = h.tip
    one, two = (eng.fork("a", trunk, name, [7, n]) for n, name in enumerate("xy"))
    eng.attempt("a", one)
    eng.generate("a", 4, node=one)
    eng.commit("a", trunk, [7, 1, 3], branch="y")
    assert two in {n.id for n in eng.tree("a")}
    spec = eng.fork("a", h.tip, "later", [1])
    before, text = snapshot(eng, "a"), eng.tokens("a")
    other = eng.tokens("a", one)
    crash(eng)

    eng = engine(tmp_path)
    assert eng.stored_sessions() == ["a"]
    h = eng.resume("a")
    assert snapshot(eng, "a") == before
    assert h.tenant == "acme"
    eng.check()
    assert eng.tokens("a", one) == other
    with pytest.raises(NodeError):
        eng.tree("a").get(spec)  # speculation is not kept
    assert eng.fork("a", h.tip, "new") not in before["nodes"]
    assert eng._core.experience["a"].pause_ms("bash") == 120.0
    assert eng.generate("a", 6) == cold(text, 6)
    assert eng.generate("a", 3, node=one) == cold(other, 3)
    eng.check()
    eng.shutdown()


def test_draws_go_on_from_the_same_seeds(tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0)
    whole = engine(None)
    whole.open(PROMPT, session="a", seed=11)
    wanted = whole.generate("a", 12, params=params)
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a", seed=11)
    got = eng.generate("a", 5, params=params)
    crash(eng)
    eng = engine(tmp_path)
    eng.resume("a")
    assert got + eng.generate("a", 7, params=params) == wanted
    eng.shutdown()


CHILD = """
import os, signal, sys
from pathlib import Path
from store.engines import PROMPT, engine
eng = engine(Path(sys.argv[1]))
eng.open(PROMPT, session="a")
print(eng.generate("a", int(sys.argv[2])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

RESUMED = """
import sys
from pathlib import Path
from store.engines import engine
eng = engine(Path(sys.argv[1]))
eng.resume("a")
print(eng.generate("a", int(sys.argv[2])), flush=True)
"""


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("k", range(11))
def test_killed_after_k_tokens_a_fresh_process_says_the_same(tmp_path: Path, k: int) -> None:
    wanted = cold(PROMPT, 10)
    done = run(CHILD, tmp_path, k)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == str(wanted[:k])
    done = run(RESUMED, tmp_path, 10 - k)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(wanted[k:])


@pytest.mark.parametrize("seed", range(25))
def test_any_schedule_of_verbs_survives_crashes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    eng = engine(tmp_path, page_size=4, capacity_pages=400)
    text = PROMPT[: rng.choice([20, 300, 600])]
    eng.open(text, session="a")
    for _ in range(18):
        tree = eng.tree("a")
        nodes = list(tree.nodes)
        node, some = rng.choice(nodes), [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        tips = [n.id for n in tree.tips.values()]
        try:
            match rng.randrange(11):
                case 0 | 1:
                    eng.fork("a", node, rng.choice("xyz"), some)
                case 2:
                    eng.speculate("a", node)
                    eng.drain_slack()
                case 3 | 4:
                    eng.commit("a", rng.choice(tips), some)
                case 5:
                    eng.attempt("a", node)
                case 6:
                    eng.promote("a", node)
                case 7:
                    eng.generate("a", rng.randrange(5), node=rng.choice(tips))
                case 8:
                    eng.abort("a", node)
                case 9:
                    eng.append("a", rng.choice(tips), some)
                case _:
                    eng.publish("a", rng.choice(tips))
        except (NodeError, SessionError, ConfigError):
            continue
        if rng.random() < 0.35:
            before = snapshot(eng, "a")
            crash(eng)
            eng = engine(tmp_path, page_size=rng.choice([4, 8, 16]), capacity_pages=400)
            eng.resume("a")
            assert snapshot(eng, "a") == before
            eng.check()
    for line, tip in sorted(eng.tree("a").tips.items()):
        if tip.mode.value == "commit":
            history = eng.tokens("a", tip.id)
            assert eng.generate("a", 3, node=tip.id) == cold(history, 3), f"line {line}"
    eng.check()
    assert verify(eng.store.vault).clean  # type: ignore[union-attr]
    eng.shutdown()


# -------------------------------------------------------------------- ids, ends, owners


def test_ids_of_stored_sessions_are_taken(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    first, second = eng.open([1, 2]), eng.open([1, 3])
    crash(eng)
    eng = engine(tmp_path)
    third = eng.open([1, 4])
    assert len({first.id, second.id, third.id}) == 3
    with pytest.raises(SessionError, match="resume it, or choose another"):
        eng.open([1], session=first.id)
    eng.resume(first.id)
    with pytest.raises(SessionError, match="open already"):
        eng.resume(first.id)
    with pytest.raises(SessionError, match="no session 'nobody'"):
        eng.resume("nobody")
    eng.shutdown()


def test_a_shut_down_session_stays_and_a_closed_one_may_be_collected(tmp_path: Path) -> None:
    from forkserve.store.collect import collect

    eng = engine(tmp_path)
    eng.open(PROMPT, session="kept")
    eng.open(PROMPT, session="over")
    eng.close("over")
    eng.shutdown()
    eng = engine(tmp_path)
    assert sorted(eng.stored_sessions()) == ["kept", "over"]
    eng.resume("over")  # not collected yet: it lives again
    assert eng.store is not None
    assert collect(eng.store.vault, grace_s=-5).sessions == 0
    eng.close("over")
    assert collect(eng.store.vault, grace_s=3600).sessions == 0
    assert collect(eng.store.vault, grace_s=-5).sessions == 1
    assert eng.stored_sessions() == ["kept"]
    assert eng.resume("kept").tip == 1
    eng.shutdown()


def test_a_second_engine_is_refused_and_others_may_look_and_publish(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    with pytest.raises(StoreError, match="in use by process"):
        engine(tmp_path)
    eng.publish("a", name="here")
    with Store(tmp_path, "shared") as shared:
        other = engine(shared)
        h = other.restore("here")
        assert other.tokens(h.id) == PROMPT
        other.generate(h.id, 300)
        other.publish(h.id, name="further")
        with pytest.raises(StoreError, match="only the owner"):
            other.resume("a")
        other.shutdown()
    assert eng.tokens(eng.restore("further").id)[: len(PROMPT)] == PROMPT
    with Store(tmp_path, "reader") as looking:
        third = engine(looking)
        assert third.tokens(third.restore("here").id) == PROMPT
        with pytest.raises(StoreError):
            third.publish(third.sessions()[0], name="no")
        third.shutdown()
    eng.shutdown()


def test_an_engine_without_a_store_says_so() -> None:
    eng = engine(None)
    h = eng.open([1, 2])
    for call in (lambda: eng.publish(h.id), lambda: eng.resume("x"), lambda: eng.restore("x")):
        with pytest.raises(StoreError, match="has no store"):
            call()
    eng.shutdown()


# -------------------------------------------------------------------- a store that fails


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
