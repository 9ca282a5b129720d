"""A window in a tree: each branch keeps the rows that its own end reads, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from forkserve import Engine
from forkserve.tree.invariants import check_all
from forkserve.tree.node import Node
from forkserve.tree.pool import PagePool
from forkserve.tree.rows import missing, reserve, settle
from forkserve.tree.tree import ContextTree
from forkserve.tree.window import give_back, in_reach
from forkserve.types import JoinPolicy, NodeMode, SamplingParams

from .harness import (
    assert_nothing_left,
    assert_rows_as_cold,
    assert_same_as_cold,
    cold,
    core,
    engine,
    node,
    tick,
)

P = 4
WINDOW = 9
KEPT = -(-WINDOW // P) + 2  # pages of one line
GO_ON = SamplingParams(ignore_eos=True)


def windowed(**config: Any) -> Engine:
    return engine({"window": WINDOW}, **{"prefix_index": False, "capacity_pages": 128, **config})


def grown(eng: Engine, count: int = 60) -> str:
    s = eng.open(range(20, 40)).id
    eng.generate(s, count, params=GO_ON)
    return s


def attempts(eng: Engine, s: str, count: int = 2) -> list[int]:
    kids = [eng.fork(s, eng.tree(s).tip.id, "try", [100 + i]) for i in range(count)]
    for kid in kids:
        eng.attempt(s, kid)
    return kids


def same(eng: Engine, s: str, kid: int, count: int) -> None:
    """Generate on a branch as a cold engine would."""
    before = eng.tokens(s, kid)
    assert eng.generate(s, count, node=kid, params=GO_ON) == cold(before, count, GO_ON, WINDOW)
    eng.check()


def live(eng: Engine) -> int:
    return core(eng).pool.live_pages


@pytest.mark.parametrize("tail", ["pack", "freeze"])
def test_attempts_give_back_their_own_pages_and_the_trunk_keeps_its_end(tail: str) -> None:
    eng = windowed(tail=tail)
    s = grown(eng)
    kids = attempts(eng, s)
    for _ in range(8):
        for kid in kids:
            same(eng, s, kid, 7)
        assert live(eng) <= 3 * KEPT + 1
    root = node(eng, s, 1)
    assert root.length - WINDOW - P <= root.floor <= root.length - WINDOW
    for kid in kids:
        assert node(eng, s, kid).floor > root.length
    assert eng.stats().evicted_nodes == 0
    assert_rows_as_cold(eng, s)
    same(eng, s, 1, 5)  # the trunk's own tip goes on from where it was
    assert eng.stats().evicted_nodes == 0
    assert_nothing_left(eng)


def test_the_trunk_goes_when_every_branch_has_left_it() -> None:
    eng = windowed()
    s = grown(eng)
    kids = attempts(eng, s)
    eng.promote(s, kids[0])  # the trunk has no tip of its own any more
    same(eng, s, kids[0], 20)
    assert node(eng, s, 1).segments  # the other one still reads its end
    same(eng, s, kids[1], 20)
    same(eng, s, kids[0], 8)
    assert not node(eng, s, 1).segments
    assert live(eng) <= 2 * KEPT
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_guess_keeps_a_window_before_the_place_where_it_left() -> None:
    """A commit may cut it anywhere: nothing has to be computed again for that."""
    eng = windowed()
    s = grown(eng)
    guess = eng.fork(s, 1, "guess", range(60, 90))
    eng.speculate(s, guess)
    while eng.drain_slack():
        eng.check()
    kids = attempts(eng, s)
    for kid in kids:
        same(eng, s, kid, 20)
    assert node(eng, s, guess).kv_end - node(eng, s, guess).kv_begin >= 30
    before = eng.tokens(s, 1)
    eng.commit(s, 1, [60, 61, 62, 9])
    assert_same_as_cold(eng, s, 20)
    assert eng.tokens(s)[: len(before) + 4] == [*before, 60, 61, 62, 9]
    assert eng.stats().evicted_nodes == 0
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("at", [81, 84, 100])
def test_a_fork_below_the_floor_of_a_branch_starts_over_at_the_trunk(at: int) -> None:
    """Only the path of that branch loses rows; the trunk's end is where it is computed from."""
    eng = windowed()
    s = grown(eng)
    kids = attempts(eng, s)
    for kid in kids:
        same(eng, s, kid, 40)
    other = list(node(eng, s, kids[1]).segments)
    trunk = list(node(eng, s, 1).segments)
    text = eng.tokens(s, kids[0])
    before = eng.stats().prefilled_tokens.committed
    late = eng.fork(s, kids[0], "late", [7, 8], at=at)
    eng.attempt(s, late)
    assert eng.generate(s, 4, node=late) == cold([*text[:at], 7, 8], 4, window=WINDOW)
    assert node(eng, s, kids[1]).segments == other
    assert node(eng, s, 1).segments == trunk
    assert eng.stats().prefilled_tokens.committed - before <= at - 79 + 2
    for kid in [*kids, late]:
        same(eng, s, kid, 12)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_fork_below_the_floor_of_the_trunk_starts_over_from_the_beginning() -> None:
    """The attempts stand on their own rows by then, and keep them."""
    eng = windowed()
    s = grown(eng)
    kids = attempts(eng, s)
    for kid in kids:
        same(eng, s, kid, 20)
    held = [list(node(eng, s, kid).segments) for kid in kids]
    text = eng.tokens(s, 1)
    late = eng.fork(s, 1, "late", [7, 8], at=30)
    eng.attempt(s, late)
    assert eng.generate(s, 4, node=late) == cold([*text[:30], 7, 8], 4, window=WINDOW)
    assert [node(eng, s, kid).segments for kid in kids] == held
    for kid in [*kids, late, 1]:
        same(eng, s, kid, 12)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_branches_that_stand_on_the_trunk_go_with_it() -> None:
    eng = windowed()
    s = grown(eng)
    short, long = attempts(eng, s)
    same(eng, s, short, 2)
    same(eng, s, long, 30)
    text = eng.tokens(s, 1)
    late = eng.fork(s, 1, "late", [7, 8], at=30)
    eng.attempt(s, late)
    assert eng.generate(s, 4, node=late) == cold([*text[:30], 7, 8], 4, window=WINDOW)
    assert not node(eng, s, short).segments
    assert node(eng, s, long).segments
    for kid in [short, long, late, 1]:
        same(eng, s, kid, 12)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_an_aborted_branch_holds_nothing() -> None:
    eng = windowed()
    s = grown(eng)
    early = eng.fork(s, 1, "early", [1, 2])
    same(eng, s, 1, 40)
    assert live(eng) > KEPT
    eng.abort(s, early)
    same(eng, s, 1, 2 * P)
    assert live(eng) <= KEPT
    assert_nothing_left(eng)


def test_a_branch_that_waits_gives_way_to_one_that_runs() -> None:
    """It would keep the whole trunk in a pool that is too small for it."""
    eng = windowed(capacity_pages=14)
    s = grown(eng, 12)
    early = eng.fork(s, 1, "early", [1, 2])
    same(eng, s, 1, 80)  # longer than the pool
    text = eng.tokens(s, early)
    eng.attempt(s, early)
    assert eng.generate(s, 4, node=early) == cold(text, 4, window=WINDOW)
    same(eng, s, 1, 10)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_the_best_of_many_long_attempts() -> None:
    eng = windowed(capacity_pages=48)
    s = grown(eng)
    kids = attempts(eng, s, 6)
    prompts = [eng.tokens(s, kid) for kid in kids]
    got = eng.generate_many([(s, kid) for kid in kids], 60, params=GO_ON)
    assert got == [cold(prompt, 60, GO_ON, WINDOW) for prompt in prompts]
    assert live(eng) <= 7 * KEPT
    assert eng.stats().evicted_nodes == 0  # 120 pages of rows in a pool of 48
    best = eng.tokens(s, kids[3])[80:]
    eng.commit(s, 1, best)
    assert not [n for n in eng.tree(s) if n.mode is NodeMode.SPEC]
    assert_same_as_cold(eng, s, 20)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_page_that_two_tables_list_stays_sealed() -> None:
    """Where the head of a table goes, what stands behind it may be seen by a branch."""
    eng = windowed(tail="pack")
    s = grown(eng, 14)  # 34 tokens
    kid = eng.fork(s, 1, "kid", [5])
    eng.attempt(s, kid)
    same(eng, s, kid, 30)
    same(eng, s, 1, 40)
    for _ in range(3):
        same(eng, s, kid, 5)
        same(eng, s, 1, 5)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_nothing_goes_while_an_end_reads_it() -> None:
    eng = windowed()
    s = grown(eng)
    kids = attempts(eng, s)
    running = [eng.start(s, 30, node=kid, params=GO_ON) for kid in kids]
    while not all(r.done for r in running):
        tick(eng)
        eng.check()
        tree = eng.tree(s)
        for kid in [1, *kids]:
            end = tree.get(kid).length - 1
            assert in_reach(tree, tree.get(kid), min(end, tree.get(kid).kv_end), WINDOW)
        assert give_back(tree, WINDOW) == 0  # all that could go has gone
    assert_nothing_left(eng)


def test_a_branch_goes_on_where_what_was_given_back_ends() -> None:
    """Its rows begin at its trunk's floor: the trunk's own may go, and nothing is missing there."""
    window = 3
    eng = engine({"window": window}, tail="pack", prefix_index=False)
    s = eng.open(range(20, 31)).id
    eng.generate(s, 24, params=GO_ON)  # 35 rows, of which [32, 35) stay
    kid = eng.fork(s, 1, "kid", [5])
    eng.attempt(s, kid)
    text = eng.tokens(s, kid)
    assert eng.generate(s, 1, node=kid) == cold(text, 1, window=window)
    root, branch = node(eng, s, 1), node(eng, s, kid)
    assert root.floor == root.kv_begin == branch.kv_begin == 32
    with core(eng).lock:
        core(eng).drop_rows(eng.tree(s), root)
    eng.check()
    assert not root.segments
    assert branch.segments
    for one in (kid, 1):
        text = eng.tokens(s, one)
        assert eng.generate(s, 5, node=one) == cold(text, 5, window=window)
        eng.check()
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("tail", ["auto", "pack", "freeze"])
def test_a_window_of_one_row(tail: str) -> None:
    """A row sees none but itself: whole nodes go while the next row is still to be computed."""
    eng = engine({"window": 1}, tail=tail, prefix_index=False, prefill_chunk=3, max_batch_tokens=2)
    s = eng.open(range(20, 30)).id
    for turn in range(4):
        eng.commit(s, eng.tree(s).tip.id, [turn])
        text = eng.tokens(s)
        assert eng.generate(s, 2 + turn, params=GO_ON) == cold(text, 2 + turn, GO_ON, 1)
        with core(eng).lock:
            core(eng).drop_rows(eng.tree(s), eng.tree(s).tip)
        eng.check()
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_branch_without_tokens_replays_a_row_of_its_trunk() -> None:
    """What the next row of a branch would read is there, but that row itself reads one more."""
    eng = windowed()
    s = grown(eng)
    at = node(eng, s, 1).floor + WINDOW - 1
    text = eng.tokens(s)
    kid = eng.fork(s, 1, "kid", at=at)
    eng.attempt(s, kid)
    assert eng.generate(s, 4, node=kid) == cold(text[:at], 4, window=WINDOW)
    for one in (kid, 1):
        same(eng, s, one, 12)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_node_goes_on_after_it_gave_back_what_it_took_over() -> None:
    """Its parent counts those rows as missing; to the node they are none that it needs."""
    pool = PagePool(16, P)
    tree = ContextTree("s", pool, tail="pack")

    def write(one: Node, begin: int, count: int) -> None:
        settle(tree, reserve(tree, one, begin, count))
        check_all(pool, [tree])

    def below(parent: Node, count: int) -> Node:
        child = tree.fork(parent, "commit", [1] * count, 0.0, mode=NodeMode.COMMIT)
        tree.move_tip(parent.line, child)
        return child

    root = tree.open_root([1] * 7, 0.0)
    write(root, 0, 6)
    give_back(tree, 1)
    write(root, 6, 1)
    middle = below(root, 3)
    write(middle, 7, 2)
    last = below(middle, 1)
    write(last, 9, 1)
    assert (last.kv_begin, middle.segments, root.segments) == (6, [], [])
    assert give_back(tree, 1) == 1  # the page is full, and a row sees none but itself
    assert missing(last, last.length) == [(last, 10, 11)]
    write(last, 10, 1)
    assert not missing(last, last.length)
    assert last.floor == last.kv_begin == 10


def test_a_joined_branch_stands_alone_where_its_input_does() -> None:
    eng = engine({"window": 3}, tail="pack", prefix_index=False)
    s = eng.open(range(20, 31)).id
    eng.generate(s, 24, params=GO_ON)
    kid = eng.fork(s, 1, "kid", [5] * 8)
    eng.speculate(s, kid)
    while eng.drain_slack():
        eng.check()
    assert node(eng, s, kid).kv_begin == node(eng, s, 1).floor == 32
    with core(eng).lock:
        core(eng).drop_rows(eng.tree(s), node(eng, s, 1))
    joined = eng.join(s, [kid], JoinPolicy.CONCAT)
    assert joined.tail == 0
    eng.check()
    text = eng.tokens(s)
    assert eng.generate(s, 4) == cold(text, 4, window=3)
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_nothing_goes_while_work_waits_above_other_work() -> None:
    """The lower may take over a page whose rows the upper then computes again."""
    eng = windowed(max_batch_tokens=P, prefill_chunk=P)
    s = grown(eng, 3)
    eng.commit(s, 1, range(60, 90))
    eng.commit(s, 2, [8, 9])
    root, before = node(eng, s, 1), node(eng, s, 1).floor
    shared = 0
    while core(eng).tasks:
        tick(eng)
        eng.check()
        if len(core(eng).tasks) > 1:
            shared += 1
            assert root.floor == before
    assert shared > 3
    same(eng, s, 3, 5)
    assert not root.segments
    assert eng.stats().evicted_nodes == 0
    assert_rows_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_branch_that_begins_again_takes_no_row_of_its_trunk() -> None:
    """The trunk went on past the place where the branch left: those rows are of other tokens."""
    pool = PagePool(16, P)
    tree = ContextTree("s", pool, tail="pack")
    root = tree.open_root([1] * 12, 0.0)
    kid = tree.fork(root, "kid", [2] * 4, 0.0, alias_len=6)
    tree.start_line(kid)
    for begin, count in ((0, 6), (6, 6)):
        settle(tree, reserve(tree, root, begin, count))
    settle(tree, reserve(tree, kid, 6, 3))
    kid.segments, gone, kid.floor = [], kid.segments, 9  # as `give_back` does with full pages
    for segment in gone:
        pool.decref(segment.pages)
    assert missing(kid, kid.length) == [(kid, 9, 10)]
    held = reserve(tree, kid, 9, 1)
    assert not held.copies
    settle(tree, held)
    assert kid.kv_begin == kid.floor == 9
    check_all(pool, [tree])
