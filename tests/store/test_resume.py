"""The tree persisted: what a verb returned is there after a crash, and goes on the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forkserve.errors import ConfigError, NodeError, SessionError, StoreError
from forkserve.store import Store
from forkserve.store.catalog import Catalog
from forkserve.store.rebuild import verify
from forkserve.store.records import read_session
from forkserve.types import SamplingParams

from .engines import PROMPT, cold, crash, engine, snapshot


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


SPLITS = """
import os, signal, sys, traceback
from pathlib import Path
from store.engines import PROMPT, engine

def first(folder, count):
    eng = engine(folder)
    eng.open(PROMPT, session="a")
    print(eng.generate("a", count), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def second(folder, count):
    eng = engine(folder)
    eng.resume("a")
    print(eng.generate("a", count), flush=True)
    os._exit(0)

for k in range(11):  # this process has no thread and opens no store, so its children are fresh ones
    for job, count in ((first, k), (second, 10 - k)):
        pid = os.fork()
        if pid == 0:
            try:
                job(Path(sys.argv[1]) / str(k), count)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_after_k_tokens_a_fresh_process_says_the_same(tmp_path: Path) -> None:
    """At every split k of ten tokens."""
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-c", SPLITS, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4 * 11, done.stderr
    wanted = cold(PROMPT, 10)
    for k in range(11):
        begun, killed, rest, ended = said[4 * k : 4 * k + 4]
        assert (begun, killed) == (str(wanted[:k]), str(-signal.SIGKILL)), (k, done.stderr)
        assert (rest, ended) == (str(wanted[k:]), "0"), (k, done.stderr)


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
