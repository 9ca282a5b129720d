"""Tables that grow: number by number those that `gather` makes, whatever becomes of the tree."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import tiles
from forkserve.errors import OutOfPages
from forkserve.kernels.native.attention import gather
from forkserve.kernels.native.grown_tables import TablePlanner
from forkserve.types import SamplingParams, Span, Work
from tests.core.driver import play, schedule
from tests.core.harness import engine, tick
from tests.instructions import instructions

from .tables import same

GO_ON = SamplingParams(ignore_eos=True)


@pytest.mark.parametrize(
    "setting",
    [
        {"tail": "auto"},
        {"tail": "pack"},
        {"tail": "freeze"},
        {"tail": "auto", "page_size": 3},
        {"tail": "auto", "window": 1},
        {"tail": "pack", "window": 9},
    ],
    ids=str,
)
def test_every_verb_in_any_order(setting: dict[str, Any], watched: list[TablePlanner]) -> None:
    """The identity test's schedules on tiny pools."""
    for seed in range(20):
        play(setting, *schedule(seed, 60))
    assert sum(p.grown for p in watched) > (0 if setting.get("window") == 1 else 40)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [0, 9])
def test_branches_that_decode_side_by_side(
    seed: int, window: int, watched: list[TablePlanner]
) -> None:
    """Forks, aborts, commits and sessions that push rows out, between stretches of decoding."""
    draw = random.Random(seed)
    tail = draw.choice(["auto", "pack", "freeze"])
    eng = engine({"window": window}, tail=tail, capacity_pages=96, prefix_index=not window)
    s = eng.open(draw.choices(range(20, 90), k=30)).id
    for _ in range(12):
        tip = eng.tree(s).tip.id
        kids = [eng.fork(s, tip, f"b{i}", [100 + i] * 3) for i in range(draw.randrange(1, 6))]
        for kid in kids:
            eng.attempt(s, kid)
        running = [eng.start(s, draw.randrange(2, 14), node=kid, params=GO_ON) for kid in kids]
        for _ in range(draw.randrange(4, 20)):
            tick(eng)
            event = draw.random()
            if event < 0.1 and kids:
                at = draw.randrange(len(kids))
                running.pop(at).cancel()
                eng.abort(s, kids.pop(at))
            elif event < 0.2:
                with contextlib.suppress(OutOfPages):
                    eng.generate(eng.open(draw.choices(range(20, 90), k=60)).id, 2, params=GO_ON)
        for generation in running:
            generation.cancel()
        eng.commit(s, tip, draw.choices([100, 101, 30], k=draw.randrange(1, 9)))
        eng.check()
    assert sum(p.grown for p in watched) > 20


# --- what ends the growing ------------------------------------------------------------------------

TRUNK = Span("t", [60, 61, 62], 0, 10, 1)
PAGES = [[15 * i + j for j in range(15)] for i in range(4)]


def step(at: int, above: Sequence[Span] = (TRUNK,), k: int = 3) -> list[Work]:
    """k branches that have decoded `at` rows over the spans above them, which are 10 rows."""
    works = []
    for i in range(k):
        own = (Span(i, PAGES[i], 10, at, i),) if at else ()
        write = Span(i, PAGES[i], 10 + at, 1, i + at)
        works.append(Work("s", i, [0], 10 + at, (*above, *own), write))
    return works


def changed(works: list[Work], **fields: Any) -> list[Work]:
    """The last work with other fields."""
    return [*works[:-1], replace(works[-1], **fields)]


def rewritten(works: list[Work], **fields: Any) -> list[Work]:
    write = works[-1].write
    assert write is not None
    return changed(works, write=replace(write, **fields))


def own(works: list[Work], **fields: Any) -> list[Work]:
    *above, last = works[-1].context
    return changed(works, context=(*above, replace(last, **fields)))


def test_tables_grow_over_page_ends() -> None:
    planner = TablePlanner(4)
    for at in range(50):
        works = step(at)
        same(planner.tables(works), works, 4)
    assert (planner.made, planner.grown) == (2, 48), "a branch has no row of its own at first"


MOVED = [*PAGES[2][:1], 63, *PAGES[2][2:]]
CHANGES: dict[str, Callable[[], list[Work]]] = {
    "a branch has ended": lambda: step(5, k=2),
    "a branch came": lambda: step(5, k=4),
    "another order": lambda: step(5)[::-1],
    "the same step again": lambda: step(4),
    "a step left out": lambda: step(6),
    "two tokens": lambda: rewritten(changed(step(5), tokens=[0, 0]), length=2),
    "no write span": lambda: changed(step(5), write=None),
    "an equal trunk in a list of its own": lambda: step(5, (replace(TRUNK, pages=[60, 61, 62]),)),
    "a trunk on other pages": lambda: step(5, (replace(TRUNK, pages=[60, 63, 62]),)),
    "a trunk from another slot on": lambda: step(5, (replace(TRUNK, offset=0),)),
    "a trunk by another key": lambda: step(5, (replace(TRUNK, key="u"),)),
    "a trunk in two": lambda: step(5, (Span("t", TRUNK.pages, 0, 7, 1), Span("v", [64], 7, 3))),
    "its own run by another key": lambda: own(step(5), key="u"),
    "its own run by the key of another": lambda: own(step(5), key="t"),
    "its own run from another slot on": lambda: rewritten(own(step(5), offset=1), offset=6),
    "its own run on other pages": lambda: rewritten(own(step(5), pages=MOVED), pages=MOVED),
    "its own rows on other pages": lambda: own(step(5), pages=MOVED),
    "fresh rows on another page": lambda: rewritten(step(5), pages=MOVED),
    "its own run from another position on": lambda: own(step(5), start=11),
    "its own run in other slots": lambda: own(step(5), offset=1),
    "a work from another position on": lambda: rewritten(changed(step(5), start=16), start=16),
    "fresh rows at another position": lambda: rewritten(step(5), start=16),
    "two tokens for one row": lambda: changed(step(5), tokens=[0, 0]),
    "a write span of two rows": lambda: rewritten(step(5), length=2),
    "fresh rows elsewhere": lambda: rewritten(step(5), offset=11),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tables_are_gathered_anew_when(change: str) -> None:
    planner = TablePlanner(4)
    for at in (3, 4):
        planner.tables(step(at))
    assert planner.grown == 1
    works = CHANGES[change]()
    same(planner.tables(works), works, 4)
    assert planner.grown == 1


def test_pages_that_moved_within_a_list_are_noticed() -> None:
    pages = [60, 61, 62]
    trunk = (Span("t", pages, 0, 10, 1),)
    planner = TablePlanner(4)
    planner.tables(step(3, trunk))
    pages[1] = 64
    same(planner.tables(step(4, trunk)), step(4, trunk), 4)
    assert planner.grown == 0


def test_spans_made_anew_over_the_same_list_grow() -> None:
    """As a node has that holds several segments: the first is cut out anew for every batch."""
    planner = TablePlanner(4)
    for at in (3, 4, 5):
        works = step(at, (replace(TRUNK),))
        same(planner.tables(works), works, 4)
    assert planner.grown == 2


def test_a_run_that_another_work_reads_as_far() -> None:
    """A branch of a branch, forked at its end, before and after that goes on."""
    planner, fork = TablePlanner(4), (TRUNK, Span(0, PAGES[0], 10, 3, 0))
    for at in range(3, 9):
        mine = Span("f", PAGES[3], 13, at, 0)
        write = Span("f", PAGES[3], 13 + at, 1, at)
        works = [Work("s", 9, [0], 13 + at, (*fork, mine), write), *step(at, k=2)]
        same(planner.tables(works), works, 4)
    assert planner.grown == 5


def test_a_run_that_another_work_reads_further_never_grows() -> None:
    planner, further = TablePlanner(4), Span(0, PAGES[0], 10, 6, 0)
    for at in (3, 4):
        mine = Span("f", PAGES[3], 16, at, 0)
        fork = Work(
            "s", 9, [0], 16 + at, (TRUNK, further, mine), Span("f", PAGES[3], 16 + at, 1, at)
        )
        works = [*step(at, k=2), fork]
        same(planner.tables(works), works, 4)
    assert planner.grown == 0


@pytest.mark.parametrize(
    "odd",
    [
        lambda: rewritten(step(3), length=2),
        lambda: rewritten(step(3), start=15),
        lambda: rewritten(step(3), offset=6),
        lambda: [*step(3), step(3)[0]],
    ],
)
def test_nothing_grows_out_of_works_that_do_not_fit(odd: Callable[[], list[Work]]) -> None:
    planner, works = TablePlanner(4), odd()
    planner.tables(works)
    after = [*step(4), *step(4)[: len(works) - 3]]
    same(planner.tables(after), after, 4)
    assert planner.grown == 0


@pytest.mark.parametrize("at", [6, 7])
def test_lists_that_lack_the_page_of_the_fresh_row(at: int) -> None:
    """C++ refuses these; no page of before may stand in for it."""
    planner = TablePlanner(4)
    for before in (4, 5):
        planner.tables(step(before))
    for works in (step(at), step(at + 1)):
        short = rewritten(own(works, pages=PAGES[2][:2]), pages=PAGES[2][:2])
        same(planner.tables(short), short, 4)
    assert planner.grown == 1


@pytest.mark.parametrize("late", [20, 3])
def test_contexts_that_begin_late(late: int) -> None:
    """A window drops what is before `late`; until the rows reach that far nothing may be grown."""
    planner = TablePlanner(4, 9)
    for at in range(1, 20):
        write = Span(0, PAGES[0], late + at, 1, at)
        works = [Work("s", 0, [0], late + at, (Span(0, PAGES[0], late, at, 0),), write)]
        same(planner.tables(works), works, 4, 9)
    assert planner.grown == 11, "from the eighth row on"


def test_nothing_grows_out_of_tables_that_grew_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = TablePlanner(4)
    planner.tables(step(3))

    def none(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "cumsum", none)
        with pytest.raises(MemoryError):
            planner.tables(step(4))
    for works in (step(5), step(6), step(5)):
        same(planner.tables(works), works, 4)
    assert (planner.made, planner.grown) == (3, 1)


# --- cost -----------------------------------------------------------------------------------------


def test_growing_costs_some_hundred_instructions_a_branch_at_any_depth() -> None:
    def cost(depth: int) -> int:
        """Instructions of the dearest of some steps of 40 branches."""
        pages = list(range(1000))
        above = tuple(Span(("t", i), pages[i : i + 1], 4 * i, 4) for i in range(depth))
        planner, costs = TablePlanner(4), []
        for at in range(1, 10):
            works = []
            for i in range(40):
                mine = Span(i, pages[20 * i :], 4 * depth, at)
                write = Span(i, mine.pages, 4 * depth + at, 1, at)
                works.append(Work("s", i, [0], 4 * depth + at, (*above, mine), write))
            costs.append(instructions(lambda works=works: planner.tables(works)))
        assert planner.grown == 8
        return max(costs[1:])

    assert cost(1) < 40 * 250
    assert cost(40) < 1.01 * cost(1)


def test_a_step_of_256_works_over_1000_nodes_costs_200_instructions_a_work() -> None:
    """Gathering costs 520: each span on every path is looked at."""
    branches = tiles.tree(256, 1000)
    planner = TablePlanner(tiles.PAGE)
    planner.tables(tiles.step(branches, 1))
    for at in range(2, 20):
        works = tiles.step(branches, at)
        assert instructions(lambda works=works: planner.tables(works)) < 200 * 256
        assert instructions(lambda works=works: gather(works, tiles.PAGE)) < 600 * 256
    assert planner.grown == 18
