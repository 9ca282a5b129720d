"""A line taken back to an earlier place: `fork(at=)` and `commit(at=)`."""

from __future__ import annotations

import random

import pytest

from forkserve import aio
from forkserve.errors import ConfigError, NodeError, SessionError
from forkserve.types import HitClass

from .harness import assert_same_as_cold, cold, engine


def test_fork_leaves_the_path_at_any_place() -> None:
    eng = engine()
    h = eng.open(range(30))
    for at in range(1, 31):
        child = eng.fork(h.id, h.tip, f"at {at}", [7, 8, 9], at=at)
        assert eng.speculate(h.id, child, t_idle_ms=1e6)
        while eng.drain_slack():
            eng.check()
        assert eng.tokens(h.id, child) == [*range(at), 7, 8, 9]
        eng.attempt(h.id, child)
        assert eng.generate(h.id, 3, node=child) == cold([*range(at), 7, 8, 9], 3)
        eng.check()
        eng.abort(h.id, child)
    eng.check()
    assert_same_as_cold(eng, h.id)


def test_fork_reaches_into_earlier_nodes() -> None:
    eng = engine()
    h = eng.open(range(10))
    first = eng.commit(h.id, h.tip, range(10, 20)).winner
    eng.commit(h.id, h.tip, range(20, 30))
    inner = eng.fork(h.id, h.tip, "", [5], at=15)
    edge = eng.fork(h.id, h.tip, "", [5], at=10)
    tree = eng.tree(h.id)
    assert tree.get(inner).parent is tree.get(first)
    assert tree.get(edge).parent is tree.root
    eng.check()


def test_commit_takes_the_line_back_and_wins_what_was_speculated() -> None:
    eng = engine()
    h = eng.open(range(40))
    decoded = eng.generate(h.id, 12)
    at = 43
    new = [*decoded[3:4], 900, 901, 902, 903, 904]  # a first token that only seems to differ
    child = eng.fork(h.id, h.tip, "wrap", new, at=at)
    eng.speculate(h.id, child, t_idle_ms=1e6)
    while eng.drain_slack():
        pass
    eng.check()
    got = eng.commit(h.id, h.tip, [*new, 500, 501], at=at)
    eng.check()
    assert (got.winner, got.hit, got.skipped_prefill) == (child, HitClass.KNOWN_SUFFIX, len(new))
    assert eng.tokens(h.id) == [*range(40), *decoded[:3], *new, 500, 501]
    assert_same_as_cold(eng, h.id)
    root = eng.tree(h.id).root
    assert root.length == at
    assert root.kv_end <= at, "the dropped text kept its rows"


def test_commit_drops_later_nodes_and_keeps_earlier_branches() -> None:
    eng = engine()
    h = eng.open(range(20))
    middle = eng.commit(h.id, h.tip, range(20, 30)).winner
    doomed = eng.fork(h.id, h.tip, "doomed", [1], at=25)
    eng.commit(h.id, h.tip, range(30, 40))
    keep = eng.fork(h.id, h.tip, "keep", [3, 4, 5], at=12)
    got = eng.commit(h.id, h.tip, [3, 4, 9], at=12)
    assert got.winner == keep
    assert eng.tokens(h.id) == [*range(12), 3, 4, 9]
    for dead in (middle, doomed):
        with pytest.raises(NodeError, match="dead"):
            eng.tokens(h.id, dead)
    eng.check()
    assert_same_as_cold(eng, h.id)


def test_refusals_change_nothing() -> None:
    eng = engine()
    h = eng.open(range(20))
    attempt = eng.attempt(h.id, eng.fork(h.id, h.tip, "", [1, 2, 3]))
    with pytest.raises(NodeError, match="shares with line"):
        eng.commit(h.id, attempt, [5], at=20)
    below = eng.commit(h.id, attempt, [5], at=21).winner
    assert eng.tokens(h.id, below) == [*range(20), 1, 5]
    assert eng.tokens(h.id) == list(range(20))
    for at in (0, -1, 21):
        with pytest.raises(ConfigError, match="no place"):
            eng.fork(h.id, h.tip, "", [1], at=at)
        with pytest.raises(ConfigError, match="no place"):
            eng.commit(h.id, h.tip, [1], at=at)
    with pytest.raises(ConfigError, match="not both"):
        eng.commit(h.id, h.tip, [1], at=5, full=True)
    other = eng.attempt(h.id, eng.fork(h.id, h.tip, "", [1, 2, 3]))
    running = eng.start(h.id, 5, node=other)
    with pytest.raises(SessionError, match="running"):
        eng.commit(h.id, h.tip, [1], at=19)
    assert eng.tokens(h.id) == list(range(20))
    running.cancel()
    eng.commit(h.id, h.tip, [1], at=19)
    assert eng.tokens(h.id) == [*range(19), 1]
    eng.check()


@pytest.mark.parametrize("tail", ["auto", "pack", "freeze"])
@pytest.mark.parametrize("index", [False, True])
def test_any_order_of_revisions_equals_a_cold_engine(tail: str, index: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        eng = engine(tail=tail, prefix_index=index, lazy_abort=bool(seed % 2))
        texts = [draw.randrange(3) for _ in range(draw.randrange(2, 14))]
        h = eng.open(texts)
        want = list(texts)
        for _ in range(14):
            act = draw.randrange(6)
            some = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
            place = draw.randrange(1, len(want) + 1)
            if act == 0 and len(want) < 90:
                want += eng.generate(h.id, draw.randrange(1, 5))
            elif act in (1, 2):
                eng.fork(h.id, h.tip, "", some, at=place)
            elif act == 3:
                spec = [n.id for n in eng.tree(h.id) if n.mode.value == "spec"]
                if spec:
                    eng.speculate(h.id, draw.choice(spec), t_idle_ms=1e6)
                eng.drain_slack()
            elif act == 4:
                eng.commit(h.id, h.tip, some, at=place)
                want = want[:place] + some
            elif len(want) < 80:
                eng.commit(h.id, h.tip, some)
                want += some
            eng.check()
            assert eng.tokens(h.id) == want, (seed, act)
        assert_same_as_cold(eng, h.id)
        eng.close(h.id)
        eng.check()
        stats = eng.stats()
        assert stats.live_pages == stats.index_pages


@pytest.mark.parametrize("at", [12, 15])
def test_a_generation_on_an_earlier_branch_goes_on(at: int) -> None:
    """A branch that left at the cut, or before it, is none of what the commit drops."""
    eng, cold = engine(), engine()
    h = eng.open(range(20))
    branch = eng.fork(h.id, h.tip, "", [3, 4, 5], at=12)
    eng.attempt(h.id, branch)
    running = eng.start(h.id, 6, node=branch)
    aio.wait(running, lambda: len(running.tokens) >= 2)
    eng.commit(h.id, h.tip, [9, 9], at=at)
    eng.check()
    aio.wait(running, lambda: running.done)
    assert running.error is None
    prompt = [*range(12), 3, 4, 5]
    assert running.tokens == cold.generate(cold.open(prompt).id, 6)
    assert eng.tokens(h.id) == [*range(at), 9, 9]
    assert_same_as_cold(eng, h.id)
    eng.check()


def test_an_observation_that_would_extend_a_running_attempt_is_refused_whole() -> None:
    eng = engine()
    h = eng.open(range(20))
    branch = eng.fork(h.id, h.tip, "", [3, 4, 5], at=12)
    eng.attempt(h.id, branch)
    running = eng.start(h.id, 6, node=branch)
    with pytest.raises(SessionError, match="running"):
        eng.commit(h.id, h.tip, [3, 4, 9], at=12)
    assert eng.tokens(h.id) == list(range(20)), "the line was taken back all the same"
    running.cancel()
    assert eng.commit(h.id, h.tip, [3, 4, 9], at=12).winner == branch
    eng.check()


def test_taken_back_behind_a_packed_tail() -> None:
    """Rows that the tail only repeats are cut with it, in the segment before too."""
    eng = engine(tail="pack", prefix_index=False)
    h = eng.open(range(7))
    eng.fork(h.id, h.tip, "x", [9])  # seals the rows up to here
    eng.append(h.id, h.tip, [1, 2, 3])
    eng.generate(h.id, 1)
    root = eng.tree(h.id).root
    assert [(s.start, s.end) for s in root.segments] == [(0, 7), (4, 10)]
    eng.commit(h.id, h.tip, [5, 5], at=6)
    assert [(s.start, s.end) for s in root.segments] == [(0, 6)]
    eng.check()
    assert_same_as_cold(eng, h.id)
