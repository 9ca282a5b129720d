"""What the control plane costs: one engine tick with 64 works over a model that takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import Options, Report, Target, median, profile, quantile, repeat, share
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.clock import SystemClock
from forkserve.engine import MockBackend
from forkserve.types import Batch, BatchResult, SampleSpec, Work, WorkResult
from forkserve.types import Span as Rows

FREE = SamplingParams(ignore_eos=True)
LETTER = 97
Build = Callable[[int, int, int], Engine]  # (works, context, ticks it must last)


class IdleBackend(MockBackend):
    """The mock without its model: samples are letters, a pass takes `pass_s` and is counted."""

    def __init__(self, *args: Any, pass_s: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pass_s = pass_s
        self.sizes: list[tuple[int, int]] = []  # (works, of them speculative) of each pass

    def execute(self, batch: Batch) -> BatchResult:
        if self.pass_s:
            time.sleep(self.pass_s)
        self.sizes.append((len(batch.works), sum(w.speculative for w in batch.works)))
        results = [WorkResult(LETTER if w.sample is not None else None) for w in batch.works]
        return BatchResult(results, 0.0)


def run(options: Options) -> Report:
    report = Report("tick", "control-plane cost of one engine tick (the model takes no time)")
    works, ticks, rounds, budget = (8, 20, 1, 0) if options.quick else (64, 200, 7, 25)
    length = 300 if options.quick else 2_000
    floor = record_floor(works, 50 if options.quick else 500)
    table = report.table(
        f"one tick, {works} works, {ticks} ticks a round, a new engine each round",
        *("works", "median ms", "p99 ms", "max ms", "us/work", "floor ms", "x floor"),
        *("quiet rounds", "others"),
    )
    kinds: dict[str, Build] = {
        "decode, one per session": decoding,
        "half decode, half chunks": mixed,
        "decode, branches of one trunk": branches,
    }
    for kind, build in kinds.items():
        found = repeat(partial(time_ticks, build, works, length, ticks), rounds, budget)
        ms = [one for values in found.values for one in values]
        mid, p99 = median(ms), median([quantile(values, 0.99) for values in found.values])
        table.add(
            *(kind, mid, p99, max(ms), mid / works * 1e3, floor, mid / floor),
            *(found.quiet, found.others),
        )
        why = f"p99 {p99:.2f} ms; others took {share(found.others)} of the CPU"
        report.targets.append(Target(f"ms a tick, {kind}", "< 2", mid, mid < 2, why))
        if options.profile:
            profiled(report, kind, build(works, length, ticks), max(ticks // 2, 5))
    report.notes.append("floor: building the batch's records (Work, Span, SampleSpec) and no more")
    return report


def time_ticks(build: Build, works: int, length: int, ticks: int, number: int) -> list[float]:
    """ms of each tick, every one of which must hold all the works."""
    eng = build(works, length, ticks)
    backend, tick = eng.backend, eng._loop.tick
    assert isinstance(backend, IdleBackend)
    for _ in range(ticks // 10):
        tick(wake=True)
    backend.sizes.clear()
    ms = []
    for _ in range(ticks):
        begin = time.perf_counter_ns()
        tick(wake=True)
        ms.append((time.perf_counter_ns() - begin) / 1e6)
    seen = {size for size, _ in backend.sizes}
    assert seen == {works}, f"batches of {seen} works"
    eng.shutdown()
    return ms


def engine(**changes: Any) -> Engine:
    config = ForkServeConfig(capacity_pages=65_536, tbt_slo_ms=1_000, **changes)
    return Engine(IdleBackend(config, clock=SystemClock()))


def decoding(works: int, length: int, ticks: int) -> Engine:
    """Contexts of different lengths, so that they do not all reach a page's end in one tick."""
    eng = engine()
    for i in range(works):
        handle = eng.open([i % 251, *[1] * (length + 7 * i)], session=f"s{i}")
        eng.start(handle.id, 100_000, params=FREE)
    return eng


def mixed(works: int, length: int, ticks: int) -> Engine:
    """Chunks of one page each, so that half of the works are chunks in every tick."""
    eng = engine(c_spec=16)
    for i in range(works):
        handle = eng.open([i % 251, *[1] * (length + 7 * i)], session=f"s{i}")
        if i % 2:
            eng.start(handle.id, 100_000, params=FREE)
            continue
        child = eng.fork(handle.id, handle.tip, "tool", [2] * 16 * (2 * ticks))
        got = eng.speculate(handle.id, child, t_idle_ms=1e9)
        assert got.tokens == 32 * ticks, got
    return eng


def branches(works: int, length: int, ticks: int) -> Engine:
    eng = engine()
    handle = eng.open([1] * length, session="s")
    for i in range(works):
        child = eng.fork(handle.id, handle.tip, "b", [i % 251, *[2] * (7 * i % 64)])
        eng.attempt(handle.id, child)
        eng.start(handle.id, 100_000, node=child, params=FREE)
    return eng


def record_floor(works: int, rounds: int) -> float:
    """ms to make the records of a batch: below this no Python control plane of this shape gets."""
    pages = list(range(128))
    ms = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        batch = Batch()
        for i in range(works):
            spec = SampleSpec(FREE, 0, 2_000, i, 0)
            context = (Rows(i, pages, 0, 2_000),)
            work = Work("s", i, [1], 2_000, context, Rows(i, pages, 2_000, 1, 2_000), spec)
            batch.works.append(work)
        results = [WorkResult(LETTER) for _ in batch.works]
        BatchResult(results, 0.0)
        ms.append((time.perf_counter_ns() - begin) / 1e6)
    return median(ms)


def profiled(report: Report, kind: str, eng: Engine, ticks: int) -> None:
    table = report.table(f"where a tick goes: {kind} (cProfile)", "function", "own us", "cum us")

    def many() -> None:
        for _ in range(ticks):
            eng._loop.tick(wake=True)

    for entry in profile(many, ticks, 24):
        table.add(*entry)
    eng.shutdown()
