"""Pages of a fan-out: in flight, with decode, and after the losers abort; counted in the pool."""

from __future__ import annotations

import random

from benchmarks.measure import Options, Report, Target
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.engine import MockBackend
from forkserve.types import Batch

P = 16
# trunk, branches, tokens of each branch, pages in flight as the design says
SCENARIOS = {
    "aligned_fanout_4": (2048, 4, 64, 144),
    "aligned_fanout_8": (4096, 8, 128, 320),
    "unaligned": (2050, 4, 48, 141),
    "tot_wide": (8192, 8, 32, 528),
    "short_residual": (1024, 6, 4, 70),
    "planner_specialists": (16384, 4, 256, 1088),
}
# not of the design: one branch, and a trunk whose tail every branch copies (pages by formula)
EXTRA = {"linear (tie)": (2048, 1, 64, 132), "packed (loss)": (2054, 2, 20, 133)}
QUICK = {"packed (loss)": (70, 2, 20, 9)}


def run(options: Options) -> Report:
    report = Report("pages", "pages of 16 tokens, counted in the pool at every pass (mock backend)")
    decode = 8 if options.quick else 64
    scenarios = QUICK if options.quick else {**SCENARIOS, **EXTRA}
    flight = report.table(
        "in flight: all branches prefilled, nothing decoded",
        *("scenario", "L", "k", "l", "forkserve", "design", "clone", "clone/fs", "index (ours)"),
        *("vLLM warm [formula]", "warm/fs", "vLLM cold [formula]", "cold/fs"),
    )
    after = report.table(
        f"with decode: {decode} more tokens on every branch, then the losers go",
        *("scenario", "peak forkserve", "peak clone", "clone/fs", "peak vLLM warm [formula]"),
        *(
            "warm/fs",
            "mean forkserve",
            "mean clone",
            "kept forkserve",
            "trunk+winner",
            "kept clone",
        ),
    )
    wrong: list[str] = []
    missed: list[str] = []
    for name, (trunk, k, tail, wanted) in scenarios.items():
        texts = make_texts(trunk, k, tail)
        ours = forked(texts, decode)
        index = sessions(texts, decode, index=True)
        clone = sessions(texts, decode, index=False)
        rest = trunk % P
        warm = trunk // P + k * pages(rest + tail)
        cold = k * pages(trunk + tail)
        flight.add(
            *(name, trunk, k, tail, ours.flight, wanted, clone.flight),
            *(clone.flight / ours.flight, index.flight, warm, warm / ours.flight, cold),
            cold / ours.flight,
        )
        long_warm = trunk // P + k * pages(rest + tail + decode - 1)
        kept = pages(trunk + tail + decode - 1)
        after.add(
            *(name, ours.peak, clone.peak, clone.peak / ours.peak, long_warm),
            *(long_warm / ours.peak, ours.mean, clone.mean, ours.kept, kept, clone.kept),
        )
        wrong += [f"{name}: {ours.flight} not {wanted}"] if ours.flight != wanted else []
        missed += [f"{name}: {ours.kept} not {kept}"] if ours.kept > kept else []
    for what, found in (
        ("scenarios whose pages in flight are not the design's", wrong),
        ("scenarios that keep more than trunk + winner", missed),
    ):
        report.targets.append(Target(what, "0", len(found), not found, "; ".join(found)))
    report.notes += [
        "vLLM columns are formulas, not runs: warm = the trunk was published before (R3), whole "
        "blocks are shared and partial ones never; cold = all k look up before any is there (R1)",
        "forkserve is regime R4 (explicit fork); index (ours) = k sessions over a published trunk",
        "we lose a page where branches copy the trunk's tail: the trunk's own tail page stays",
        "we tie: on a warm aligned trunk prefix caching holds the same pages as a fork does, and "
        "after the losers are gone every system keeps the same",
    ]
    return report


def pages(rows: int) -> int:
    return -(-rows // P)


def make_texts(trunk: int, k: int, tail: int) -> tuple[list[int], list[list[int]]]:
    draw = random.Random(trunk + k)
    return draw.choices(range(256), k=trunk), [draw.choices(range(256), k=tail) for _ in range(k)]


class Counted:
    """An engine whose live pages are read at every pass."""

    def __init__(self, texts: tuple[list[int], list[list[int]]], **changes: object) -> None:
        trunk, tails = texts
        capacity = 2 * len(tails) * pages(len(trunk) + len(tails[0]) + 128)
        config = ForkServeConfig(capacity_pages=capacity, branch_cap=64, max_queue=4096, **changes)
        self.eng = Engine(MockBackend(config, on_batch=self._sample))
        self.samples: list[int] = []
        self.flight = self.kept = 0

    def _sample(self, batch: Batch) -> None:
        self.samples.append(self.eng._core.pool.live_pages if batch.works else 0)

    @property
    def live(self) -> int:
        return self.eng.stats().live_pages

    @property
    def peak(self) -> int:
        return max(self.samples)

    @property
    def mean(self) -> float:
        """Over the passes since the branches were in flight, decode included."""
        return sum(self.samples) / len(self.samples)

    def decode(self, targets: list[tuple[str, int]], count: int) -> None:
        self.samples.clear()
        self.eng.generate_many(targets, count, params=SamplingParams(ignore_eos=True))


def forked(texts: tuple[list[int], list[list[int]]], decode: int) -> Counted:
    run = Counted(texts)
    eng, (trunk, tails) = run.eng, texts
    handle = eng.open(trunk)
    nodes = [eng.fork(handle.id, handle.tip, f"b{i}", tail) for i, tail in enumerate(tails)]
    eng.speculate_set(handle.id, dict.fromkeys(nodes, 1.0))
    while eng.drain_slack():
        pass
    run.flight = run.live
    for node in nodes:
        eng.attempt(handle.id, node)
    run.decode([(handle.id, node) for node in nodes], decode)
    eng.promote(handle.id, nodes[-1])
    for node in nodes[:-1]:
        eng.abort(handle.id, node)
    run.kept = run.live
    eng.check()
    eng.shutdown()
    return run


def sessions(texts: tuple[list[int], list[list[int]]], decode: int, *, index: bool) -> Counted:
    """A session for every branch; with the index the trunk is published by one before."""
    run = Counted(texts, prefix_index=index)
    eng, (trunk, tails) = run.eng, texts
    if index:
        eng.close(eng.open(trunk).id)
    handles = [eng.open([*trunk, *tail]) for tail in tails]
    run.flight = run.live
    run.decode([(h.id, h.tip) for h in handles], decode)
    for handle in handles[:-1]:
        eng.close(handle.id)
    run.kept = run.live - eng.stats().index_pages
    eng.shutdown()
    return run
