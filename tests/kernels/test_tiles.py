"""The planner for tiles: every row sees every key once, trunks are read once, plans grow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forkserve.kernels.merge import BLOCK as MERGED
from forkserve.kernels.pieces import LEVELS, SPARE, Tiling, cheaper_folded
from forkserve.kernels.plan import span_rows
from forkserve.kernels.tile_plans import TilePlanner
from forkserve.kernels.tiles import DIRECT, STATE, TilePlan, plan_tiles
from forkserve.types import Span, Work
from tests.forests import grow
from tests.instructions import instructions

SCRATCH = 160 * 16


def seen(plan: TilePlan, tiling: Tiling) -> list[list[tuple[int, int]]]:
    """For each query row, the (position, KV row) of the keys that it folds, in that order."""
    rows: list[list[tuple[int, int]]] = [[] for _ in plan.positions]
    results: dict[int, list[tuple[int, int]]] = {}
    written = [0] * len(plan.positions)
    taken: set[int] = set()
    assert plan.counts.sum() == len(plan.tiles)
    for key, low, end, first, count, kind in plan.tiles.tolist():
        keys = list(zip(range(low, end), plan.keys[key : key + end - low].tolist(), strict=True))
        assert kind != STATE or end % tiling.block == 0, "a state is left behind a whole block"
        for slot in range(first, first + count):
            row, state = int(plan.rows[slot]), int(plan.carried[slot])
            at, window = plan.positions[row], tiling.window
            see = [k for k in keys if k[0] <= at and (not window or k[0] > at - window)]
            if state >= 0:
                assert low % tiling.block == 0, "and taken up there"
                assert state not in taken
                taken.add(state)
            results[slot] = results.get(state, []) + see
            if kind == DIRECT:
                rows[row] += results[slot]
                written[row] += 1
    for row, (a, b) in enumerate(itertools.pairwise(plan.begins.tolist())):
        parts = plan.parts[a:b].tolist()
        assert (plan.rows[parts] == row).all()
        assert (written[row] == 1) == (not parts), "written directly, or merged"
        for number, part in enumerate(parts):
            cells = {key[0] // tiling.split for key in results[part]}
            assert len(cells) <= 1, "a part is of one cell"
            if cells:
                assert cells == {at_cell(plan, tiling, row) + number}, "cell after cell"
            rows[row] += results[part]
    return rows


def at_cell(plan: TilePlan, tiling: Tiling, row: int) -> int:
    """The first cell that a row sees any of; where its parts begin must fit."""
    at = int(plan.positions[row])
    first = max(at - tiling.window + 1, 0) // tiling.split if tiling.window else 0
    if plan.begins[row + 1] > plan.begins[row]:
        first -= (first - plan.leads[row]) % MERGED  # a grown plan may begin with hidden cells
    return first


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
    cost = draw.choice([0, 0, 2048])
    tiling = Tiling(page, group, window, draw.choice([64, 512]), draw.choice([4, 16, 32]), cost)
    plan = plan_tiles(forest.works, tiling, forest.scratch)
    for got, want in zip(
        seen(plan, tiling), wanted(forest.works, page, window, forest.scratch), strict=True
    ):
        assert got == want, "each key once, in ascending position"
    first = 0
    for level in plan.counts.tolist():
        for count, rows in zip(level, (tiling.small_rows, tiling.large_rows), strict=True):
            tiles = plan.tiles[first : first + count]
            assert (np.diff(tiles[:, 2] - tiles[:, 1]) <= 0).all(), "the longest tiles go first"
            assert (tiles[:, 4] <= rows).all()
            first += count


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
    for k, tiles in ((4, 1), (5, 2), (8, 2), (9, 3)):  # 4 rows of 8 heads in a large tile
        plan = plan_tiles(fan(k, 400), Tiling(16, 8, level_cost=0), SCRATCH)
        # The open block of 16 rows is read by every branch, which goes on from the trunk's state.
        assert plan.keys_read == 384 * tiles + k * (16 + 5)
        assert plan.counts.sum(1).tolist() == [tiles, k, 0]
        assert (plan.carried >= 0).sum() == k


def test_whole_cells_are_shared_wherever_a_span_begins() -> None:
    works = fan(8, 1300, trunk_start=7)
    late = [
        Work("s", w.node, w.tokens, w.start, (Span("head", [900], 0, 7), *w.context), w.write)
        for w in works
    ]
    tiling = Tiling(16, 4, split=512)
    plan = plan_tiles(late, tiling, SCRATCH)
    shared = sorted((low, end) for _, low, end, _, rows, _ in plan.tiles.tolist() if rows == 8)
    assert shared == [(0, 512), (512, 1024)], "what is left of the trunk is not worth a launch"
    assert plan.keys_read == 1024 + 8 * (1307 - 1024 + 5)
    assert seen(plan, tiling) == wanted(late, 16)
    plan = plan_tiles(late, Tiling(16, 4, split=512, level_cost=0), SCRATCH)
    assert plan.keys_read == 1280 + 8 * (1307 - 1280 + 5)


def test_a_level_has_to_be_worth_its_launch() -> None:
    """256 branches over 256 rows save 57,344 reads of a key in a level, 5 branches some hundred."""
    many = plan_tiles(fan(256, 256), Tiling(16, 4), SCRATCH)
    assert many.counts.tolist() == [[0, 32], [256, 0], [0, 0]]
    assert many.keys_read == 32 * 256 + 256 * 5
    few = plan_tiles(fan(5, 256), Tiling(16, 4), SCRATCH)
    assert few.counts.sum(1).tolist() == [5, 0, 0]
    assert few.keys_read == 5 * (256 + 5)


def test_a_level_is_worth_more_where_more_heads_read() -> None:
    """20 branches save 4,352 keys of a head: with 8 heads more than a launch costs, with 1 not."""
    for kv_heads, tiles in ((8, [3, 20, 0]), (1, [20, 0, 0])):
        plan = plan_tiles(fan(20, 256), Tiling(16, 4, kv_heads=kv_heads), SCRATCH)
        assert plan.counts.sum(1).tolist() == tiles


def test_a_few_small_tiles_run_beside_the_large_ones() -> None:
    """Two tiles of 8 branches over 1,024 rows, and one of each; 64 of these would fill a GPU."""
    plan = plan_tiles(fan(8, 1024), Tiling(16, 4), SCRATCH)
    assert plan.counts.tolist() == [[0, 10], [0, 0], [0, 0]]
    many = fan(64, 1024)
    plan = plan_tiles(many, Tiling(16, 4), SCRATCH)
    assert plan.counts.tolist() == [[64, 16], [0, 0], [0, 0]]
    plan = plan_tiles(many, Tiling(16, 4, kv_heads=7), SCRATCH)
    assert plan.counts.tolist() == [[0, 80], [0, 0], [0, 0]]
    assert seen(plan, Tiling(16, 4)) == wanted(many, 16)


def test_levels_are_few() -> None:
    """A binary tree of 7 nodes of 64 rows on every path, all within one cell."""
    tiling = Tiling(16, 1, level_cost=0)
    works = []
    for leaf in range(64):
        path = [
            Span(
                (depth, leaf >> (6 - depth)),
                [100 * depth + (leaf >> (6 - depth)) + 10 * i for i in range(4)],
                64 * depth,
                64,
            )
            for depth in range(7)
        ]
        works.append(Work("s", leaf, [0], 448, tuple(path), Span(leaf, [1000 + leaf], 448, 1)))
    plan = plan_tiles(works, tiling, 20000 * 16)
    assert (plan.counts.sum(1) > 0).sum() == LEVELS
    least = 448 * 64 + 64
    assert plan.keys_read < least / 2
    assert seen(plan, tiling) == wanted(works, 16)


def test_equal_suffixes_of_different_prefixes_are_not_mixed() -> None:
    """Two works see the same rows behind rows of their own: each has a state of its own there."""
    tiling = Tiling(4, 1, block=4, level_cost=0)
    suffix = Span("suffix", [40, 41, 42, 43, 44, 45, 46, 47], 8, 32)
    works = [
        Work("s", i, [0], 40, (Span(("head", i // 2), [i // 2, 20 + i // 2], 0, 8), suffix),
             Span(i, [60 + i], 40, 1))
        for i in range(4)
    ]  # fmt: skip
    plan = plan_tiles(works, tiling, SCRATCH)
    assert seen(plan, tiling) == wanted(works, 4)


def test_a_chunk_sees_no_tile_behind_its_rows() -> None:
    """A prefill of 200 rows reads each triangle about half: entries behind a tile are left out."""
    work = Work("s", 0, [0] * 200, 0, (), Span(0, list(range(13)), 0, 200))
    plan = plan_tiles([work], Tiling(16, 8, split=512), SCRATCH)
    assert 200 * 200 / 4 / 2 < plan.keys_read < 200 * 200 / 4 / 2 * 1.3
    assert (plan.tiles[:, 5] == DIRECT).all(), "one tile a row: nothing to merge"
    assert plan.parts.size == 0


def test_folding_follows_the_cost() -> None:
    tiling = Tiling(16, 8)
    # Eight rows in two tiles: 6 more reads against their start and 16 keys a row for its parts.
    assert cheaper_folded(32, 8, [1] * 8, tiling)
    assert not cheaper_folded(33, 8, [1] * 8, tiling)
    # Two children of many rows: the reads are the same, the parts are saved.
    assert cheaper_folded(10_000, 128, [64, 64], tiling)
    # With one head a line, 64 rows share two tiles: folding means 62 more reads.
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
    tiling = Tiling(16, 8, level_cost=0)
    plan = plan_tiles(works, tiling, SCRATCH)
    assert plan.keys_read == 2 * 256 + 8 * (8 + 1)  # the open block again
    assert len(plan.tiles) == 2 + 8
    assert seen(plan, tiling) == wanted(works, 16)


TRUNK = Span("t", [60, 61, 62], 0, 10, 1)


def step(k: int, at: int, page: int = 4, trunk: Span = TRUNK) -> list[Work]:
    """k branches that have decoded `at` rows over a trunk of 10."""
    works = []
    for i in range(k):
        pages = [15 * i + j for j in range(15)]
        own = (Span(i, pages, 10, at, i % page),) if at else ()
        write = Span(i, pages, 10 + at, 1, i % page + at)
        works.append(Work("s", i, [0], 10 + at, (trunk, *own), write))
    return works


@pytest.mark.parametrize("window", [0, 9])
def test_grown_plans_equal_new_ones_in_what_they_see(window: int) -> None:
    tiling = Tiling(4, 2, window, 16, 4, 0)
    planner = TilePlanner({window: tiling}, SCRATCH)
    for at in range(50):
        works = step(4, at)
        plan = planner.plan(works)[window]
        assert seen(plan, tiling) == wanted(works, 4, window)
        assert plan.slots.tolist() == [int(span_rows(w.write, 4)[0]) for w in works if w.write]
    assert planner.made == 1 + 49 // (SPARE * 4 + 1)
    assert planner.made + planner.grown == 50


def test_a_plan_is_made_anew_when_the_tree_changes() -> None:
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    planner.plan(step(4, 3))
    planner.plan(step(4, 4))
    assert planner.grown == 1
    moved = [60, 63, 62]
    changes = [
        lambda: step(3, 5),  # a branch has ended
        lambda: step(4, 4),  # the same step again
        lambda: step(4, 6),  # a step left out
        lambda: [Work(w.session, w.node, [0, 0], w.start, w.context, w.write) for w in step(4, 5)],
        lambda: [Work(w.session, w.node, w.tokens, w.start, w.context, None) for w in step(4, 5)],
        lambda: step(4, 5, trunk=replace(TRUNK, pages=moved)),  # other pages under the same key
        lambda: step(4, 5, trunk=replace(TRUNK, pages=[60, 61, 62])),  # in a list of its own
        lambda: step(4, 5, trunk=replace(TRUNK, offset=0)),
        lambda: [  # another branch
            Work(w.session, w.node, w.tokens, w.start, w.context,
                 Span("other", w.write.pages, w.start, 1, w.write.offset))
            for w in step(4, 5) if w.write
        ],
    ]  # fmt: skip
    for change in changes:
        planner.plan(step(4, 4))
        made, works = planner.made, change()
        plan = planner.plan(works)[0]
        assert planner.made == made + 1
        assert seen(plan, Tiling(4, 2)) == wanted(works, 4)


def test_a_trunk_whose_pages_moved_in_place_is_noticed() -> None:
    """The engine's spans hold the segment's own list, which may change between batches."""
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    pages = [60, 61, 62]
    trunk = Span("t", pages, 0, 10, 1)

    planner.plan(step(2, 2, trunk=trunk))
    pages[1] = 64
    planner.plan(step(2, 3, trunk=trunk))
    assert (planner.made, planner.grown) == (2, 0)


def test_spans_made_anew_over_the_same_list_grow() -> None:
    """As all are when rows of another node of the tree have moved."""
    planner, pages = TilePlanner({0: Tiling(4, 2)}, SCRATCH), TRUNK.pages
    for at in (2, 3, 4):
        works = step(2, at, trunk=replace(TRUNK))
        plan = planner.plan(works)[0]
        assert seen(plan, Tiling(4, 2)) == wanted(works, 4)
    assert planner.grown == 2
    assert isinstance(pages, list)
    planner.plan(step(2, 5, trunk=replace(TRUNK, pages=pages[:])))
    assert planner.grown == 2


def test_mixed_batches_never_grow() -> None:
    planner = TilePlanner({0: Tiling(4, 2)}, SCRATCH)
    for at in (3, 4):
        prefill = Work("s", 9, [0, 0, 0], 0, (), Span("p", [70], 0, 3))
        planner.plan([*step(2, at), prefill])
    assert (planner.made, planner.grown) == (2, 0)


# -- cost ------------------------------------------------------------------------------------


def test_growing_costs_some_hundred_instructions_a_branch_at_any_depth() -> None:
    """But for the step after all spans were made anew, which compares each of them."""

    def costs(depth: int) -> list[int]:
        pages = list(range(2000))
        lists = [pages[8 * i : 8 * i + 8] for i in range(depth)]
        planner, found = TilePlanner({0: Tiling(4, 2)}, SCRATCH), []
        above: tuple[Span, ...] = ()
        for at in range(1, 8):
            if at in (1, 4):
                above = tuple(Span(("t", i), one, 32 * i, 32) for i, one in enumerate(lists))
            works = []
            for i in range(40):
                mine = Span(i, pages[20 * i :], 32 * depth, at)
                write = Span(i, mine.pages, 32 * depth + at, 1, at)
                works.append(Work("s", i, [0], 32 * depth + at, (*above, mine), write))
            found.append(instructions(lambda works=works: planner.plan(works)))
        assert (planner.made, planner.grown) == (1, 6)
        return found[1:]

    few, many = costs(1), costs(40)
    assert max(few) < 40 * 260, few
    assert max(many[:2] + many[3:]) < 1.02 * max(few)
    assert many[2] < 40 * 40 * 100


def test_tiles_cost_no_step_each() -> None:
    few, many = (fan(2, 2048, n=n) for n in (4, 128))
    tiling = Tiling(16, 4)
    assert len(plan_tiles(many, tiling, SCRATCH).tiles) > 8 * len(
        plan_tiles(few, tiling, SCRATCH).tiles
    )
    cost = instructions(lambda: plan_tiles(few, tiling, SCRATCH))
    assert instructions(lambda: plan_tiles(many, tiling, SCRATCH)) < 1.2 * cost
