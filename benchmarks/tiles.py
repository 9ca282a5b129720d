"""Planning for the GPU kernels: 256 works over 1,000 nodes that decode side by side.

The tree stays, every branch grows by a row a step: what `TilePlanner` makes of that, beside making
each step's plan anew.
"""

from __future__ import annotations

import random
import time

from benchmarks.measure import Options, Report, Target, median, repeat, share
from forkserve.kernels.pieces import Tiling
from forkserve.kernels.tile_plans import TilePlanner
from forkserve.kernels.tiles import TilePlan
from forkserve.types import Span, Work

PAGE, GROUP = 16, 8
SCRATCH = 10**7
Branch = tuple[tuple[Span, ...], Span]  # what is above it; its own pages


def run(options: Options) -> Report:
    report = Report("tiles", "plans for the GPU kernels: time on the CPU")
    works, nodes, steps = (16, 60, 8) if options.quick else (256, 1000, 192)
    branches = tree(works, nodes)
    batches = [step(branches, at) for at in range(steps)]
    spans = sum(len(work.context) for work in batches[0])

    def once(_: int) -> tuple[list[float], list[float], TilePlanner, TilePlan]:
        planner = TilePlanner({0: Tiling(PAGE, GROUP)}, SCRATCH)
        times, plan = [], None
        for batch in batches:
            begin = time.perf_counter()
            plan = planner.plan(batch)[0]
            times.append((time.perf_counter() - begin) * 1e3)
        anew = []
        for batch in batches[:5]:
            begin = time.perf_counter()
            TilePlanner({0: Tiling(PAGE, GROUP)}, SCRATCH).plan(batch)
            anew.append((time.perf_counter() - begin) * 1e3)
        assert plan is not None
        return times, anew, planner, plan

    rounds = repeat(once, 1 if options.quick else 7, 0.0 if options.quick else 40.0)
    table = report.table(
        f"{works} works over {nodes} nodes, {spans} spans; ms a step",
        *("plans", "made", "grown", "mean", "median", "largest", "tiles", "keys read", "copied"),
    )
    _, _, planner, plan = rounds.values[0]
    copied = sum(work.start + 1 for work in batches[-1])
    mean = median([sum(times) / len(times) for times, *_ in rounds.values])
    middle = median([median(times) for times, *_ in rounds.values])
    largest = median([max(times) for times, *_ in rounds.values])
    anew = median([median(times) for _, times, *_ in rounds.values])
    last = (len(plan.tiles), plan.keys_read, copied)
    table.add("grown while they last", planner.made, planner.grown, mean, middle, largest, *last)
    table.add("anew every step", steps, 0, anew, anew, None, *last)
    what = "ms to plan 256 works over 1,000 nodes, amortised"
    met = None if options.quick else mean < 1
    report.targets.append(Target(what, "< 1", mean, met))
    report.notes += [
        f"rounds that count: {rounds.quiet}; others took {share(rounds.others)} of the CPU",
        "keys read: KV rows that tiles read per head; copied: rows if every work read all its path",
    ]
    return report


def tree(works: int, nodes: int) -> list[Branch]:
    """Branches at random nodes of a random tree over a trunk of 2,048 rows; pages shuffled."""
    draw = random.Random(0)
    pages = list(range(nodes * 10 + works * 30 + 200))
    draw.shuffle(pages)

    def span(key: int, start: int, length: int) -> Span:
        offset = draw.randrange(PAGE)
        need = -(-(offset + length) // PAGE)
        return Span(key, [pages.pop() for _ in range(need)], start, length, offset)

    paths: list[tuple[Span, ...]] = [(span(0, 0, 2048),)]
    for i in range(1, nodes - works):
        parent = draw.choice(paths)
        start = parent[-1].start + parent[-1].length
        paths.append((*parent, span(i, start, draw.randrange(4, 64))))
    branches = []
    for i in range(works):
        path = draw.choice(paths)
        start = path[-1].start + path[-1].length
        branches.append((path, span(-1 - i, start, 300)))
    return branches


def step(branches: list[Branch], at: int) -> list[Work]:
    """The batch in which every branch has decoded `at` rows and runs one more."""
    works = []
    for i, (above, own) in enumerate(branches):
        end = own.start + at
        grown = (Span(own.key, own.pages, own.start, at, own.offset),) if at else ()
        write = Span(own.key, own.pages, end, 1, own.offset + at)
        works.append(Work("", i, [0], end, (*above, *grown), write))
    return works
