"""The planner for tiles: every row sees every key once, trunks are read once, plans grow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from forkserve.kernels.plan import span_rows
from forkserve.kernels.tile_plans import TilePlanner
from forkserve.kernels.tiles import SPARE, TilePlan, Tiling, cheaper_folded, plan_tiles
from forkserve.types import Span, Work
from tests.forests import grow

SCRATCH = 160 * 16


def seen(plan: TilePlan, page: int, window: int = 0) -> list[list[tuple[int, int]]]:
    """For each query row, the (position, KV row) of the keys that its tiles let it see."""
    rows: list[list[tuple[int, int]]] = [[] for _ in plan.positions]
    parts: list[int] = [0] * len(plan.positions)
    for begin, end, first, count, direct in plan.tiles.tolist():
        keys = []
        for entry in range(begin, end):
            low, high = plan.bounds[entry] & 0xFFFF, plan.bounds[entry] >> 16
            keys += [
                (int(plan.firsts[entry]) + slot, int(plan.pages[entry]) * page + slot)
                for slot in range(low, high)
            ]
        for row in plan.rows[first : first + count].tolist():
            at = plan.positions[row]
            rows[row] += [k for k in keys if k[0] <= at and (not window or k[0] > at - window)]
            parts[row] += not direct
    for row, (a, b) in enumerate(itertools.pairwise(plan.begins.tolist())):
        assert b - a == parts[row]
        assert (plan.rows[plan.parts[a:b]] == row).all()
    return rows


def wanted(
    works: Sequence[Work], page: int, window: int = 0, scratch: int = SCRATCH
) -> list[list[tuple[int, int]]]:
    """The same from the works themselves."""
    rows = []
    for work in works:
        n = len(work.tokens)
        if work.write is None:
            fresh, scratch = np.arange(scratch, scratch + n), scratch + n
        else:
            fresh = span_rows(work.write, page)
        context = [span_rows(span, page) for span in work.context]
        every = np.concatenate([np.empty(0, np.int64), *context, fresh]).tolist()
        for i in range(n):
            end = work.start + i + 1
            begin = max(end - window, 0) if window else 0
            rows.append(list(enumerate(every))[begin:end])
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_every_row_sees_its_keys_once(seed: int) -> None:
    draw = random.Random(seed)
    page, group = draw.choice([4, 16, 32]), draw.choice([1, 3, 8, 32])
    window = draw.choice([0, 0, 1, 30, 300])
    forest = grow(seed, 1, page, 2, works=draw.choice([1, 7, 12]), lengths=(1, 5, 40, 130))
    tiling = Tiling(page, group, window, draw.choice([64, 512]))
    plan = plan_tiles(forest.works, tiling, forest.scratch)
    for got, want in zip(
        seen(plan, page, window), wanted(forest.works, page, window, forest.scratch), strict=True
    ):
        assert sorted(got) == want
    lengths = plan.tiles[:, 1] - plan.tiles[:, 0]
    for kind in (slice(plan.small), slice(plan.small, None)):
        assert (np.diff(lengths[kind]) <= 0).all(), "the longest tiles go first"
    assert (plan.tiles[: plan.small, 3] <= tiling.small_rows).all()
    assert (plan.tiles[plan.small :, 3] <= tiling.large_rows).all()


def fan(k: int, trunk: int, tail: int = 4, n: int = 1, trunk_start: int = 0) -> list[Work]:
    """k works of n rows over one trunk."""
    pages = list(range(-(-trunk // 16)))
    shared = Span("trunk", pages, trunk_start, trunk)
    works = []
    for i in range(k):
        own = [len(pages) + 10 * i + j for j in range(10)]
        start = trunk_start + trunk
        context = (shared, Span(i, own, start, tail))
        write = Span(i, own, start + tail, n, tail)
        works.append(Work("s", i, [0] * n, start + tail, context, write))
    return works


def test_a_trunk_is_read_once_per_tile_of_rows() -> None:
    for k, tiles in ((8, 1), (9, 2), (16, 2), (17, 3)):  # 8 rows of 8 heads in a large tile
        plan = plan_tiles(fan(k, 400), Tiling(16, 8), SCRATCH)
        assert plan.keys_read == 400 * tiles + k * 5
        assert len(plan.tiles) == tiles + k


def test_long_nodes_are_cut_at_absolute_positions() -> None:
    """Wherever a span begins, and also where a page straddles the cut."""
    works = fan(8, 1500, trunk_start=0)
    plan = plan_tiles(works, Tiling(16, 8, split=512), SCRATCH)
    shared = plan.tiles[plan.small :]
    assert sorted((e - b) for b, e, *_ in shared.tolist()) == [30, 32, 32]
    late = [
        Work("s", w.node, w.tokens, w.start, (Span("head", [900], 0, 7), *w.context), w.write)
        for w in fan(8, 1500, trunk_start=7)
    ]
    plan = plan_tiles(late, Tiling(16, 8, split=512), SCRATCH)
    ends = set()
    for begin, end, *_ in plan.tiles[plan.small :].tolist():
        ends.add(int(plan.firsts[end - 1] + (plan.bounds[end - 1] >> 16)))
        assert plan.firsts[begin] + (plan.bounds[begin] & 0xFFFF) in (0, 512, 1024)
    assert ends == {512, 1024, 1507}


def test_a_chunk_sees_no_tile_behind_its_rows() -> None:
    """A prefill of 200 rows reads each triangle about half: entries behind a tile are left out."""
    work = Work("s", 0, [0] * 200, 0, (), Span(0, list(range(13)), 0, 200))
    plan = plan_tiles([work], Tiling(16, 8, split=512), SCRATCH)
    assert 200 * 200 / 8 / 2 < plan.keys_read < 200 * 200 / 8 / 2 * 1.3
    assert (plan.tiles[:, 4] == 1).all(), "one tile a row: nothing to merge"
    assert plan.parts.size == 0


def test_folding_follows_the_cost() -> None:
    tiling = Tiling(16, 8)
    # Eight rows in one tile: 7 more reads against a tile's start and 16 keys a row for its parts.
    assert cheaper_folded(22, 8, [1] * 8, tiling)
    assert not cheaper_folded(23, 8, [1] * 8, tiling)
    # Two children of many rows: the reads are the same, the parts are saved.
    assert cheaper_folded(10_000, 128, [64, 64], tiling)
    # With one head a line, 64 rows share a tile: folding means 63 more reads.
    assert not cheaper_folded(8, 64, [1] * 64, Tiling(16, 1))
    for keys in (1, 10, 100, 1000):
        costs = [cheaper_folded(keys, k, [1] * k, tiling) for k in (2, 8)]
        assert costs == sorted(costs, reverse=True), "more branches never make folding cheaper"


def test_a_short_node_goes_into_the_next_node_not_into_every_leaf() -> None:
    """A root of 8 rows over two nodes of 256 over 4 leaves each."""
    root = Span("root", [0], 0, 8)
    works = []
    for i in range(8):
        mid = Span(("mid", i // 4), [1 + 20 * (i // 4) + j for j in range(16)], 8, 256)
        works.append(Work("s", i, [0], 264, (root, mid), Span(i, [100 + i], 264, 1)))
    plan = plan_tiles(works, Tiling(16, 8), SCRATCH)
    assert plan.keys_read == 2 * (8 + 256) + 8
    assert len(plan.tiles) == 2 + 8
    for got, want in zip(seen(plan, 16), wanted(works, 16), strict=True):
        assert sorted(got) == want


def step(k: int, at: int, page: int = 4) -> list[Work]:
    """k branches that have decoded `at` rows over a trunk of 10."""
    trunk = Span("t", [60, 61, 62], 0, 10, 1)
    works = []
    for i in range(k):
        pages = [15 * i + j for j in range(15)]
        own = (Span(i, pages, 10, at, i % page),) if at else ()
        write = Span(i, pages, 10 + at, 1, i % page + at)
        works.append(Work("s", i, [0], 10 + at, (trunk, *own), write))
    return works


@pytest.mark.parametrize("window", [0, 9])
def test_grown_plans_equal_new_ones_in_what_they_see(window: int) -> None:
    tiling = Tiling(4, 2, window, 16)
    planner = TilePlanner({window: tiling}, SCRATCH)
    for at in range(50):
        works = step(4, at)
        plan = planner.plan(works)[window]
        for got, want in zip(seen(plan, 4, window), wanted(works, 4, window), strict=True):
            assert sorted(got) == want
        assert plan.slots.tolist() == [int(span_rows(w.write, 4)[0]) for w in works if w.write]
    assert planner.made == 1 + 49 // (SPARE * 4 + 1)
    assert planner.made + planner.grown == 50


def test_a_plan_is_made_anew_when_the_tree_changes() -> None:
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    planner.plan(step(4, 3))
    planner.plan(step(4, 4))
    assert planner.grown == 1
    trunk = Span("t", [60, 61, 62], 0, 10, 1)
    moved = [60, 63, 62]
    changes = [
        lambda: step(3, 5),  # a branch has ended
        lambda: step(4, 4),  # the same step again
        lambda: step(4, 6),  # a step left out
        lambda: [Work(w.session, w.node, [0, 0], w.start, w.context, w.write) for w in step(4, 5)],
        lambda: [Work(w.session, w.node, w.tokens, w.start, w.context, None) for w in step(4, 5)],
        lambda: [  # other pages under the same key
            Work(w.session, w.node, w.tokens, w.start, (Span("t", moved, 0, 10, 1), w.context[1]),
                 w.write)
            for w in step(4, 5)
        ],
        lambda: [  # another branch
            Work(w.session, w.node, w.tokens, w.start, w.context,
                 Span("other", w.write.pages, w.start, 1, w.write.offset))
            for w in step(4, 5) if w.write
        ],
    ]  # fmt: skip
    assert trunk == step(4, 5)[0].context[0]
    for change in changes:
        planner.plan(step(4, 4))
        made, works = planner.made, change()
        plan = planner.plan(works)[0]
        assert planner.made == made + 1
        for got, want in zip(seen(plan, 4), wanted(works, 4), strict=True):
            assert sorted(got) == want


def test_a_trunk_whose_pages_moved_in_place_is_noticed() -> None:
    """The engine's spans hold the segment's own list, which may change between batches."""
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    pages = [60, 61, 62]
    trunk = Span("t", pages, 0, 10, 1)

    def works(at: int) -> list[Work]:
        return [
            Work(w.session, w.node, w.tokens, w.start, (trunk, *w.context[1:]), w.write)
            for w in step(2, at)
        ]

    planner.plan(works(2))
    pages[1] = 64
    planner.plan(works(3))
    assert (planner.made, planner.grown) == (2, 0)


def test_mixed_batches_never_grow() -> None:
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    for at in (3, 4):
        prefill = Work("s", 9, [0, 0, 0], 0, (), Span("p", [70], 0, 3))
        planner.plan([*step(2, at), prefill])
    assert (planner.made, planner.grown) == (2, 0)
