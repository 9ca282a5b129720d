"""Under pressure rows go page by page, from the end, where it costs least; what fits is served."""

from __future__ import annotations

import pytest

from forkserve import Engine
from forkserve.errors import OutOfPages
from forkserve.tree.eviction import droppable, resting, shed
from forkserve.types import JobClass, SamplingParams

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    node,
    tick,
    warm,
)

P = 4
GO_ON = SamplingParams(ignore_eos=True)


def small(pages: int, **config: object) -> Engine:
    return engine(capacity_pages=pages, prefix_index=False, **config)


def shed_pages(eng: Engine, session: str, node_id: int, pages: int, keep: int = 0) -> int:
    state = core(eng)
    with state.lock:
        before = node(eng, session, node_id).kv_end
        state.shed(eng.tree(session), node(eng, session, node_id), keep, pages)
        eng.check()
        return before - node(eng, session, node_id).kv_end


def prefilled(eng: Engine) -> int:
    return eng.stats().prefilled_tokens.committed


def test_a_long_idle_session_loses_its_last_pages_only() -> None:
    eng = small(16)
    long = eng.open(range(40)).id  # 10 pages of 16
    other = eng.open(range(100, 132)).id  # 8
    assert node(eng, long, 1).kv_end == 32  # two pages were wanted
    before = prefilled(eng)
    eng.close(other)
    assert_same_as_cold(eng, long, 1)
    assert prefilled(eng) - before == 8
    assert_nothing_left(eng)


def test_an_uneven_end_goes_as_one_page() -> None:
    eng = small(16)
    s = eng.open(range(38)).id
    assert shed_pages(eng, s, 1, 1) == 2
    assert shed_pages(eng, s, 1, 1) == 4
    assert node(eng, s, 1).kv_end == 32
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("tail", ["pack", "freeze"])
def test_rows_that_a_branch_rests_on_stay(tail: str) -> None:
    eng = small(40, tail=tail)
    s = eng.open(range(42)).id
    kid = eng.fork(s, 1, "kid", [7] * 6, at=22)
    warm(eng, s, kid)
    root = node(eng, s, 1)
    rests = 20 if tail == "pack" else 22
    assert resting(root) == rests
    shed_pages(eng, s, 1, 99, rests)
    assert root.kv_end == (20 if tail == "pack" else 24)
    assert node(eng, s, kid).segments
    eng.attempt(s, kid)
    assert eng.generate(s, 3, node=kid) == cold([*range(22), *[7] * 6], 3)
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_what_rests_on_rows_is_refused() -> None:
    eng = small(40)
    s = eng.open(range(20)).id
    warm(eng, s, eng.fork(s, 1, "kid", [7] * 6))
    with pytest.raises(AssertionError, match="carry others"):
        shed(eng.tree(s), node(eng, s, 1), 0, 1)


def test_a_branch_that_leaves_early_fits_alone() -> None:
    """The trunk is longer than the pool holds beside the branch; its end is nobody's then."""
    eng = small(12)
    s = eng.open(range(44)).id  # 11 pages
    kid = eng.fork(s, 1, "kid", [7] * 8, at=8)
    eng.attempt(s, kid)
    assert eng.generate(s, 12, node=kid, params=GO_ON) == cold([*range(8), *[7] * 8], 12, GO_ON)
    assert node(eng, s, 1).kv_end < 44
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_path_in_too_many_pages_is_put_together_again() -> None:
    """Branches that are gone left the trunk in half-filled pages: computed anew it fits."""
    eng = small(8, tail="freeze")
    s = eng.open([1]).id
    history = [1]
    for turn in range(7):  # a child at each place: the trunk goes on in a page of its own
        eng.fork(s, 1, "x", [50 + turn])
        eng.append(s, 1, [turn, turn + 1])
        history += [turn, turn + 1]
        eng.generate(s, 0)
        assert eng.choice_mass(s, 1, {"a": [3], "b": [4]})
    assert core(eng).pool.free_pages <= 1
    for kid in [n.id for n in eng.tree(s) if n.id != 1]:
        eng.abort(s, kid)
    assert eng.generate(s, 14, params=GO_ON) == cold(history, 14, GO_ON)
    assert_nothing_left(eng)


def test_the_order_speculative_then_idle_then_committed_then_the_cheapest() -> None:
    eng = small(24)
    short, long = eng.open(range(16)).id, eng.open(range(100, 124)).id
    spec = eng.fork(long, 1, "spec", [7] * 8)
    warm(eng, long, spec)
    idle = eng.open(range(200, 212)).id
    eng.mark_idle(idle, 1, 1.0)
    held = [node(eng, long, spec), node(eng, idle, 1), node(eng, short, 1), node(eng, long, 1)]
    assert core(eng).pool.free_pages == 24 - 15
    order = []
    for wanted in range(10, 25):
        before = [n.kv_end - n.kv_begin for n in held]
        with core(eng).lock:
            assert core(eng).make_room(wanted)
        eng.check()
        gone = [b - (n.kv_end - n.kv_begin) for b, n in zip(before, held, strict=True)]
        assert sum(g > 0 for g in gone) == 1
        assert sum(gone) <= P
        order.append(next(i for i, g in enumerate(gone) if g))
    assert order == [0] * 2 + [1] * 3 + [2] * 4 + [3] * 6


def test_pages_that_others_hold_too_go_last() -> None:
    """Dropping a reference that frees nothing helps nobody."""
    eng = engine(capacity_pages=12)
    a = eng.open(range(16), session="a").id
    b = eng.open([*range(12), 90, 91, 92, 93], session="b").id  # shares three pages with it
    assert eng.tree(b).cached == 12
    c = eng.open(range(100, 116)).id
    free = core(eng).pool.free_pages
    with core(eng).lock:
        assert core(eng).make_room(free + 4)
    eng.check()
    assert [node(eng, s, 1).kv_end for s in (a, b)] == [12, 12]  # their own last pages
    assert node(eng, c, 1).kv_end == 8
    for s in (a, b, c):
        assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_page_that_is_pinned_frees_nothing() -> None:
    eng = small(8)
    a, b = eng.open(range(12)).id, eng.open(range(100, 116)).id
    state = core(eng)
    with state.lock:
        pages = list(node(eng, a, 1).segments[0].pages)
        state.pool.pin(pages)
        assert state.make_room(3)
        assert node(eng, a, 1).kv_end == 12
        assert node(eng, b, 1).kv_end == 8
        state.pool.unpin(pages)
    assert_same_as_cold(eng, a, 1)
    assert_same_as_cold(eng, b, 1)
    assert_nothing_left(eng)


def test_published_pages_that_went_are_counted_again() -> None:
    eng = engine(capacity_pages=32)
    s = eng.open(range(30)).id
    root = node(eng, s, 1)
    assert root.published == 7
    digest = root.digest
    shed_pages(eng, s, 1, 3)
    assert (root.kv_end, root.published) == (20, 5)
    before = prefilled(eng)
    assert_same_as_cold(eng, s, 1)  # the index still has them
    assert prefilled(eng) - before <= 2
    assert (root.published, root.digest) == (7, digest)
    shed_pages(eng, s, 1, 3)
    core(eng).index.reclaim(99)
    assert_same_as_cold(eng, s, 1)
    assert (root.published, root.digest) == (7, digest)
    assert eng.open(range(30)).cached_tokens == 28
    assert_nothing_left(eng)


def test_speculation_behind_rows_that_went_ends() -> None:
    eng = small(12)
    s = eng.open(range(24)).id
    kid = eng.fork(s, 1, "kid", [7] * 8)
    eng.speculate(s, kid)
    other = eng.open(range(100, 128)).id
    assert not core(eng).scheduler.jobs()
    assert eng.stats().refusals["pages"] == 1
    assert core(eng).planner.ledger.total == 0
    assert_same_as_cold(eng, s)
    assert_same_as_cold(eng, other)
    assert_nothing_left(eng)


def test_the_youngest_waits_and_loses_no_more_than_is_wanted() -> None:
    eng = small(10)
    old, young = eng.open(range(12)).id, eng.open(range(100, 116)).id
    running = [eng.start(old, 16, params=GO_ON), eng.start(young, 8, params=GO_ON)]
    before = prefilled(eng)
    kept = []
    while not running[0].done:
        tick(eng)
        eng.check()
        kept.append(node(eng, young, 1).kv_end)
    assert kept[-1] >= 8
    assert [r.result() for r in running] == [
        cold(range(12), 16, GO_ON),
        cold(range(100, 116), 8, GO_ON),
    ]
    assert prefilled(eng) - before < 16
    assert eng.stats().preemptions == 1
    assert_nothing_left(eng)


def test_who_is_aboard_is_not_stopped() -> None:
    """The batch reads its rows: a page of them may not be written by another work of it."""
    eng = small(7)
    s = eng.open(range(16), tenant="new").id
    old = eng.open(range(100, 112), tenant="served").id
    kid = eng.fork(s, 1, "kid")  # has nothing of its own: it reads its trunk, and writes no row
    eng.attempt(s, kid)
    first = eng.start(old, 5, params=GO_ON)
    tick(eng)
    second = eng.start(s, 5, node=kid, params=GO_ON)
    core(eng).meter.serve("served", JobClass.ROOT, 1000)  # so the younger one goes aboard first
    while not (first.done and second.done):
        tick(eng)
        eng.check()
    assert first.result() == cold(range(100, 112), 5, GO_ON)
    assert second.result() == cold(range(16), 5, GO_ON)
    assert eng.stats().failed_passes == 0
    assert_nothing_left(eng)


def test_what_can_not_fit_says_so_and_leaves_the_rest_right() -> None:
    eng = small(6)
    s = eng.open(range(16)).id
    other = eng.open(range(100, 104)).id
    with pytest.raises(OutOfPages):
        eng.generate(s, 12, params=GO_ON)
    text = eng.tokens(s)
    assert text == [*range(16), *cold(range(16), len(text) - 16, GO_ON)]
    assert len(text) >= 6 * P  # it was given all there is
    assert_same_as_cold(eng, other)
    assert_nothing_left(eng)


def test_droppable_pages_hold_no_row_that_stays() -> None:
    eng = small(16)
    s = eng.open(range(18)).id
    tree, root = eng.tree(s), node(eng, s, 1)
    pages = root.segments[0].pages
    for keep in range(19):
        assert droppable(tree, root, keep) == pages[-(-keep // P) :]
