"""Tables of batches that mix decodes with chunks: number by number those that `gather` makes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks import tiles
from forkserve.kernels.native.attention import gather
from forkserve.kernels.native.grown_tables import TablePlanner
from forkserve.kernels.native.joined_tables import join
from forkserve.types import SamplingParams, Span, Work
from tests.core.harness import engine, tick
from tests.instructions import instructions

from .tables import same

GO_ON = SamplingParams(ignore_eos=True)
PAGE = 4
Path = tuple[Span, ...]


class Woods:
    """A random tree of spans: branches that decode, and other works that change step by step."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.pages = list(range(4000))
        draw.shuffle(self.pages)
        self.keys = 0
        self.paths: list[Path] = [(self.span(0, 37),)]
        for _ in range(6):
            above = draw.choice(self.paths)
            self.paths.append((*above, self.span(end(above), draw.randrange(1, 20))))
        self.branches = [self.branch(self.cut()) for _ in range(draw.randrange(1, 7))]
        self.others = [self.branch(self.cut()) for _ in range(3)]
        self.done = [0, 0, 0]

    def span(self, start: int, length: int) -> Span:
        self.keys += 1
        offset = self.draw.randrange(PAGE)
        pages = [self.pages.pop() for _ in range((offset + length) // PAGE + 1)]
        return Span(self.keys, pages, start, length, offset)

    def cut(self) -> Path:
        """A path that may leave its last span early."""
        *above, last = self.draw.choice(self.paths)
        length = self.draw.choice([last.length, self.draw.randrange(1, last.length + 1)])
        return (*above, replace(last, length=length))

    def branch(self, above: Path) -> tuple[Path, Span]:
        return above, replace(self.span(end(above), 80), length=0)

    def work(self, branch: tuple[Path, Span], at: int, count: int = 1) -> Work:
        above, own = branch
        start = own.start + at
        context = (*above, replace(own, length=at)) if at else above
        write = Span(own.key, own.pages, start, count, own.offset + at)
        return Work("s", own.key, [0] * count, start, context, write)

    def step(self, at: int) -> list[Work]:
        """Every branch has decoded `at` rows; then come chunks, replays, forks and late decodes."""
        draw = self.draw
        works = [self.work(branch, at) for branch in self.branches]
        for i, other in enumerate(self.others):
            if draw.random() < 0.6:
                count = draw.choice([1, 2, 5])
                works.append(self.work(other, self.done[i], count))
                self.done[i] += count
        for kind in draw.sample(["replay", "prompt", "fork", "further", "decode"], 2):
            above, own = draw.choice(self.branches)
            if kind == "replay":
                works.append(replace(self.work((above, own), at), write=None))
            elif kind == "prompt":
                works.append(self.work(self.branch(()), 0, 3))
            elif kind == "fork":
                read = replace(own, length=draw.randrange(1, at + 1))
                works.append(self.work(self.branch((*above, read)), 0, 2))
            elif kind == "further":
                works.append(self.work(self.branch((*above, replace(own, length=at + 9))), 0, 2))
            else:
                works.append(self.work(self.branch(self.cut()), 1))
        return works


def end(path: Path) -> int:
    return path[-1].start + path[-1].length if path else 0


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("seed", range(24))
def test_random_forests_and_mixed_batches(seed: int, window: int) -> None:
    woods, planner = Woods(seed), TablePlanner(PAGE, window)
    for at in range(1, 25):
        works = woods.step(at)
        same(planner.tables(works), works, PAGE, window)
    assert planner.grown >= 4


@pytest.mark.parametrize("seed", range(10))
def test_joining_leaves_both_tables_as_they_are(seed: int) -> None:
    woods = Woods(seed)
    works = woods.step(3)
    count = len(woods.branches)
    front, back = gather(works[:count], PAGE), gather(works[count:], PAGE)
    numbers = {run.key: i for i, run in enumerate(front.runs[: len(front.runs) - count])}
    same(join(front, back, numbers, {}), works, PAGE)
    same(front, works[:count], PAGE)
    same(back, works[count:], PAGE)


def test_branches_decode_beside_a_prompt_that_comes_in_chunks(
    watched: list[TablePlanner],
) -> None:
    """Each batch of an engine, compared; the prompt shares the trunk's beginning."""
    eng = engine(capacity_pages=512, prefill_chunk=8, max_batch_tokens=16, c_spec=8)
    prompt = list(range(20, 60))
    s = eng.open(prompt).id
    kids = [eng.fork(s, 1, f"b{i}", [100 + i]) for i in range(4)]
    for kid in kids:
        eng.attempt(s, kid)
    running = [eng.start(s, 60, node=kid, params=GO_ON) for kid in kids]
    for _ in range(3):
        tick(eng)
    before = watched[0].grown, watched[0].made
    for other in ([70, *prompt], [*prompt, *range(60, 90)]):
        running.append(eng.start(eng.open(other, prefill=False).id, 3, params=GO_ON))
    guess = eng.fork(s, 1, "guess", [5] * 40)
    eng.speculate(s, guess)
    for _ in range(24):
        tick(eng)
    grown, made = watched[0].grown - before[0], watched[0].made - before[1]
    assert grown > 10 > made, (grown, made)
    for generation in running:
        generation.cancel()
    eng.check()


def test_a_step_of_256_works_and_a_chunk_costs_less_than_half_of_gathering() -> None:
    branches = tiles.tree(256, 1000)
    above, pages = branches[0][0], list(range(10**6, 10**6 + 100))
    planner = TablePlanner(tiles.PAGE)

    def step(at: int) -> list[Work]:
        start, done = end(above), 64 * at
        context = (*above, Span("chunk", pages, start, done))
        write = Span("chunk", pages, start + done, 64, done)
        return [*tiles.step(branches, at), Work("c", 0, [0] * 64, start + done, context, write)]

    planner.tables(step(1))
    for at in range(2, 20):
        works = step(at)
        same(planner.tables(works), works, tiles.PAGE)
    works = step(20)
    assert instructions(lambda: planner.tables(works)) < 230 * 256
    assert instructions(lambda: gather(works, tiles.PAGE)) > 460 * 256
    assert planner.grown == 19
