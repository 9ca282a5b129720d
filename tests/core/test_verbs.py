"""What each verb does to tokens, modes, rows and pages."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from forkserve.tree.invariants import check_all, standing_rows
from forkserve.types import HitClass, NodeMode, SamplingParams
from tests.instructions import instructions

from . import scenarios
from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    mock,
    modes,
    node,
    refs,
    warm,
)
from .scenarios import OTHER, PROMPT, WRAP

P = 4
LONG = [100 + i for i in range(3 * P)]


# ---------------------------------------------------------------- fork


@pytest.mark.parametrize("length", [1, 40, 400])
def test_fork_touches_no_page(length: int) -> None:
    eng = engine(capacity_pages=128)
    s = eng.open(range(length)).id
    before, free = refs(eng), eng.stats().free_pages
    kids = [eng.fork(s, 1, "x", WRAP) for _ in range(8)]
    assert refs(eng) == before
    assert eng.stats().free_pages == free
    assert [eng.tokens(s, kid) for kid in kids] == [[*range(length), *WRAP]] * 8
    assert all(node(eng, s, kid).segments == [] for kid in kids)
    assert [eng.abort(s, kid) for kid in kids] == [0] * 8
    assert refs(eng) == before


def test_a_fork_is_few_instructions_in_few_functions() -> None:
    """After a pass the caches are cold: what counts then is how much a fork touches."""
    eng, called = engine(), []
    h = eng.open(PROMPT)
    eng.generate(h.id, 1)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        eng.fork(h.id, 1, "b")
    finally:
        sys.setprofile(None)
    rest = ["VirtualClock.now_ms", "ContextTree.fork", "Node.__init__"]
    assert called == ["Engine.fork", *rest]
    assert instructions(lambda: eng.fork(h.id, 1, "b")) < 230


def test_a_fork_at_the_end_of_a_branch_hangs_under_it() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "b")
    for at in (None, len(PROMPT)):
        assert node(eng, s, eng.fork(s, kid, "c", at=at)).parent is node(eng, s, kid)


def test_parent_may_grow_under_its_children() -> None:
    scenarios.parent_grows()


def test_rows_of_a_child_stay_while_the_parent_writes() -> None:
    eng = engine(tail="freeze")
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", WRAP)
    warm(eng, s, kid)
    pages = {p for n in (1, kid) for g in node(eng, s, n).segments for p in g.pages}
    rows = mock(eng)._rows
    standing = standing_rows(core(eng).pool, core(eng).trees.values())
    valid = {p: standing[p] for p in pages}
    before = {p: rows[p, : valid[p]].copy() for p in pages}
    eng.generate(s, 9)
    assert all((rows[p, : valid[p]] == before[p]).all() for p in pages)
    assert eng.tokens(s, kid) == PROMPT + WRAP


def test_node_ids_are_never_used_twice() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    first = eng.fork(s, 1, "a")
    eng.abort(s, first)
    assert eng.fork(s, 1, "b") == first + 1


# ---------------------------------------------------------------- commit


@pytest.mark.parametrize("tail", ["auto", "pack", "freeze"])
@pytest.mark.parametrize("length", [2 * P - 1, 2 * P, 2 * P + 1])
@pytest.mark.parametrize("hit", [0, 1, P - 1, P, P + 1, 3 * P])
@pytest.mark.parametrize("rest", [1, P])
def test_commit_keeps_what_agrees(tail: str, length: int, hit: int, rest: int) -> None:
    eng = engine(tail=tail)
    prompt = [*range(length)]
    s = eng.open(prompt).id
    kid, loser = eng.fork(s, 1, "k", LONG), eng.fork(s, 1, "l", OTHER)
    warm(eng, s, kid, loser)
    observed = LONG[:hit] + [900] * rest
    result = eng.commit(s, 1, observed)
    assert (result.lcp, result.tail) == (length + hit, rest)
    assert result.skipped_prefill == hit
    assert result.hit is (HitClass.KNOWN_SUFFIX if hit else HitClass.MISS)
    assert result.winner == (kid if hit else 4)
    assert set(result.aborted) == ({loser} if hit else {kid, loser})
    assert eng.tip(s) == result.winner
    assert eng.tokens(s) == prompt + observed
    eng.check()
    assert_same_as_cold(eng, s, 5)
    assert_nothing_left(eng)


@pytest.mark.parametrize("tail", ["auto", "pack", "freeze"])
@pytest.mark.parametrize("hit", range(1, 3 * P + 1))
def test_commit_cuts_a_guess_anywhere(tail: str, hit: int) -> None:
    """Nothing after the match: the last token's logits come from a row that exists."""
    eng = engine(tail=tail)
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", LONG)
    warm(eng, s, kid)
    result = eng.commit(s, 1, LONG[:hit])
    assert (result.winner, result.tail, result.skipped_prefill) == (kid, 0, hit)
    assert_same_as_cold(eng, s, 5)
    assert eng.stats().prefilled_tokens.wasted == 3 * P - hit
    assert_nothing_left(eng)


def test_commit_ties_go_to_the_named_branch_then_the_lowest_id() -> None:
    for branch, winner in ((None, 2), ("b", 3), ("zzz", 2)):
        eng = engine()
        s = eng.open(PROMPT).id
        kids = [eng.fork(s, 1, name, [50, 51, 52]) for name in "abc"]
        result = eng.commit(s, 1, [50, 51, 99], branch=branch)
        assert result.winner == winner
        assert set(result.aborted) == set(kids) - {winner}


def test_a_longer_match_beats_the_named_branch() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    eng.fork(s, 1, "named", [50, 60])
    longer = eng.fork(s, 1, "other", [50, 51])
    assert eng.commit(s, 1, [50, 51, 52], branch="named").winner == longer


def test_zero_match_makes_a_new_node() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "named", [50])
    result = eng.commit(s, 1, [51], branch="named")
    assert (result.winner, result.aborted, result.hit) == (3, (kid,), HitClass.MISS)


@pytest.mark.parametrize(
    ("observed", "hit"),
    [
        ([60, 61], HitClass.KNOWN_SUFFIX),
        ([60, 61, 70, 90], HitClass.RESIDUAL_PARTIAL),
        ([60, 61, 70, 71], HitClass.RESIDUAL_FULL),
        ([60, 61, 70, 71, 90], HitClass.RESIDUAL_PARTIAL),
        ([90], HitClass.MISS),
    ],
)
def test_hit_classes(observed: list[int], hit: HitClass) -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", [60, 61])
    eng.speculate(s, kid, guess=[70, 71], q=0.9)
    while eng.drain_slack():
        pass
    result = eng.commit(s, 1, observed)
    assert result.hit is hit
    assert eng.stats().hits[hit.value] == 1
    assert_same_as_cold(eng, s)


def test_nested_guess_descends() -> None:
    scenarios.grandchildren()


def test_skipped_prefill_counts_rows_not_tokens() -> None:
    """A guess that was right but never computed saves nothing."""
    eng = engine()
    s = eng.open(PROMPT).id
    eng.fork(s, 1, "k", WRAP)
    result = eng.commit(s, 1, WRAP)
    assert (result.lcp, result.tail, result.skipped_prefill) == (len(PROMPT) + len(WRAP), 0, 0)
    assert_same_as_cold(eng, s)


def test_commit_of_an_attempts_text_adopts_it() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kids = [eng.fork(s, 1, name, [70 + i]) for i, name in enumerate("ab")]
    for kid in kids:
        eng.attempt(s, kid)
    answers = [eng.generate(s, 4, node=kid) for kid in kids]
    result = eng.commit(s, 1, [70, *answers[0], 5])
    assert (result.winner, result.aborted) == (kids[0], (kids[1],))
    assert eng.tree(s).tips == {0: node(eng, s, kids[0])}
    assert_same_as_cold(eng, s, 5)


def test_commit_of_another_text_leaves_attempts_alone() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid, guess = eng.fork(s, 1, "a", [70]), eng.fork(s, 1, "g", [80])
    eng.attempt(s, kid)
    result = eng.commit(s, 1, [90])
    assert result.aborted == (guess,)
    assert eng.generate(s, 3, node=kid) == cold([*PROMPT, 70], 3)
    assert_same_as_cold(eng, s)


def test_full_means_the_whole_sequence() -> None:
    """An observation that begins like the trunk is taken as told, never guessed."""
    for full in (False, True):
        eng = engine()
        s = eng.open(PROMPT).id
        eng.commit(s, 1, [*PROMPT, 7], full=full)
        assert eng.tokens(s) == ([*PROMPT, 7] if full else [*PROMPT, *PROMPT, 7])
        assert_same_as_cold(eng, s)


def test_generation_goes_up_and_drops_stale_work_here_only() -> None:
    scenarios.stale_work()


def test_full_hit_still_has_logits() -> None:
    scenarios.full_hit()


def test_commit_at_an_idle_tip_resumes_it() -> None:
    scenarios.idled_out()


# ---------------------------------------------------------------- promote, pins, TTL, seeds


def test_promote_splits_the_line_and_can_go_back() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    old = eng.commit(s, 1, [60, 61]).winner
    kid = eng.fork(s, 1, "k", [70])
    eng.promote(s, kid)
    assert (eng.tip(s), modes(eng, s)[old]) == (kid, NodeMode.IDLE)
    assert_same_as_cold(eng, s)
    eng.promote(s, old)
    assert (eng.tip(s), modes(eng, s)[kid]) == (old, NodeMode.IDLE)
    assert_same_as_cold(eng, s)
    eng.promote(s, 1)
    assert eng.tip(s) == 1
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_pinned_page_is_not_written() -> None:
    scenarios.pinned()


def test_pins_outlive_a_session() -> None:
    eng = engine(prefix_index=False)
    s = eng.open(PROMPT).id
    pages = node(eng, s, 1).segments[0].pages
    pool = core(eng).pool
    pool.pin(pages)
    eng.close(s)
    assert pool.live_pages == len(pages)
    assert pool.unpin(pages) == len(pages)
    assert_nothing_left(eng)


def test_a_speculative_leaf_expires_and_keeps_its_tokens() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", LONG)
    eng.speculate(s, kid, t_idle_ms=100)
    while eng.drain_slack():
        pass
    mock(eng).clock.advance(60_000)
    eng.generate(s, 1)
    assert node(eng, s, kid).segments == []
    assert eng.tokens(s, kid) == PROMPT + LONG
    assert eng.stats().expired_nodes == 1
    eng.check()


def test_eviction_takes_speculation_before_committed_leaves() -> None:
    eng = engine(capacity_pages=10, prefix_index=False)
    keep = eng.open([1] * 9).id
    kid = eng.fork(keep, 1, "k", [2] * 8)
    warm(eng, keep, kid)
    assert node(eng, keep, kid).kv_end == 17
    eng.open([3] * 20)
    assert node(eng, keep, kid).kv_end < 17
    assert node(eng, keep, 1).kv_end == 9
    eng.check()


def test_speculation_evicts_nobody() -> None:
    eng = engine(capacity_pages=8, prefix_index=False)
    names = [eng.open([i] * 12).id for i in range(2)]
    kid = eng.fork(names[0], 1, "k", [7] * 12)
    eng.speculate(names[0], kid)
    while eng.drain_slack():
        eng.check()
    assert eng.stats().evicted_nodes == 0
    assert all(node(eng, s, 1).segments for s in names)


def test_sampled_siblings_differ_and_repeat() -> None:
    params = SamplingParams(temperature=1.5, seed=3)
    runs = []
    for _ in range(2):
        eng = engine()
        s = eng.open(PROMPT).id
        kids = [eng.fork(s, 1, "x") for _ in range(4)]
        for kid in kids:
            eng.attempt(s, kid)
        runs.append(eng.generate_many([(s, kid) for kid in kids], 6, params=params))
    assert runs[0] == runs[1]
    assert len({tuple(out) for out in runs[0]}) == 4


def test_ten_thousand_sessions_leave_nothing() -> None:
    eng = engine(capacity_pages=64)

    def hundred(first: int) -> None:
        for i in range(first, first + 100):
            s = eng.open([i % 1000, i // 1000, 5], tenant=f"t{i % 7}").id
            if i % 100 == 0:
                eng.fork(s, 1, "x", WRAP)
            eng.close(s)

    early = instructions(lambda: hundred(0))
    for first in range(100, 9_900, 100):
        hundred(first)
    assert instructions(lambda: hundred(9_900)) < 1.2 * early
    assert_nothing_left(eng)
    state = core(eng)
    assert not eng._seeds
    assert not state.scheduler._decoded_ms
    assert len(state.meter) <= 7
    check_all(state.pool, [], state.index)
