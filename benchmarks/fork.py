"""What `fork` and `abort` cost: against the trunk's length, the tree's size, and a busy engine."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from array import array
from itertools import pairwise

from benchmarks.measure import Options, Report, Span, Target, median, profile, quantile, share
from benchmarks.tick import IdleBackend
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.clock import SystemClock
from forkserve.engine import MockBackend

WRAP = tuple(range(16))  # a tool wrapper, as text known for certain
FLUSH = 64 << 20  # bytes: many times the caches of a core


def run(options: Options) -> Report:
    report = Report("fork", "time and memory of a fork (mock backend, no model)")
    trunk_length(report, options)
    tree_size(report, options)
    cold(report, options)
    busy(report, options)
    memory(report, options)
    return report


def engine(capacity: int = 1024, **changes: object) -> Engine:
    settings = {"capacity_pages": capacity, "max_queue": 200_000, **changes}
    return Engine(MockBackend(ForkServeConfig(**settings)))


def timed(eng: Engine, session: str, parents: list[int], tokens: tuple[int, ...]) -> list[float]:
    """us of each fork, then of each abort: two lists of equal length, concatenated."""
    clock, fork, abort = time.perf_counter_ns, eng.fork, eng.abort
    forked, aborted, children = [], [], []
    for parent in parents:
        begin = clock()
        child = fork(session, parent, "b", tokens)
        forked.append((clock() - begin) / 1e3)
        children.append(child)
    for child in children:
        begin = clock()
        abort(session, child, cascade=False)
        aborted.append((clock() - begin) / 1e3)
    return forked + aborted


def trunk_length(report: Report, options: Options) -> None:
    """L from 1k to 1M.  The peer copies the page table and takes a reference on every page."""
    lengths = [1_000, 4_000] if options.quick else [1_000, 10_000, 100_000, 1_000_000]
    rounds, count = (3, 50) if options.quick else (31, 300)
    eng = engine(sum(-(-n // 16) + 2 for n in lengths), prefix_index=False)
    handles = {n: eng.open([i % 251 for i in range(n)], session=f"L{n}") for n in lengths}
    pool = eng._core.pool
    tables = {n: list(eng.tree(h.id).root.segments[0].pages) for n, h in handles.items()}
    found: dict[int, list[tuple[float, float, float, float]]] = {n: [] for n in lengths}
    with Span() as span:
        for number in range(rounds):
            for n in random.Random(number).sample(lengths, len(lengths)):
                handle = handles[n]
                us = timed(eng, handle.id, [handle.tip] * count, WRAP)
                begin = time.perf_counter_ns()
                copied = list(tables[n])
                pool.incref(copied)
                pool.decref(copied)
                peer = (time.perf_counter_ns() - begin) / 1e3
                both = [a + b for a, b in zip(us[:count], us[count:], strict=True)]
                forks = us[:count]
                found[n].append((median(forks), quantile(forks, 0.99), median(both), peer))
    table = report.table(
        f"fork + abort of a 16-token branch, {rounds} interleaved rounds of {count}",
        *("trunk", "fork us", "fork p99 us", "fork+abort us", "page-table copy us", "copy/fork"),
    )
    for n in lengths:
        fork, p99, both, peer = (median(x) for x in zip(*found[n], strict=True))
        table.add(n, fork, p99, both, peer, median([p / b for _, _, b, p in found[n]]))
    spread = median(
        [max(r[2] for r in rs) / min(r[2] for r in rs) for rs in zip(*found.values(), strict=True)]
    )
    why = f"others took {share(span.others)} of the CPU"
    report.targets.append(
        Target("fork+abort, slowest trunk / fastest", "< 1.5", spread, spread < 1.5, why)
    )
    eng.shutdown()


def tree_size(report: Report, options: Options) -> None:
    """Trees of 1k, 10k and 100k nodes in three shapes."""
    sizes = [100, 1_000] if options.quick else [1_000, 10_000, 100_000]
    rounds, count = (2, 50) if options.quick else (9, 1_000)
    table = report.table(
        f"per fork at tree size (16 tokens; {rounds} rounds of {count}; gc on)",
        *("nodes", "shape", "fork us", "fork p99 us", "abort us", "abort p99 us", "no tokens us"),
        *("others",),
    )
    worst = 0.0
    for size in sizes:
        for shape in ("star", "random", "chain"):
            eng = engine()
            handle = eng.open(range(200), session="s")
            nodes, draw = grow(eng, handle.id, handle.tip, size, shape), random.Random(1)
            us: list[float] = []
            aborts: list[float] = []
            bare: list[float] = []
            with Span() as span:
                for _ in range(rounds):
                    parents = draw.choices(nodes, k=count)
                    both = timed(eng, handle.id, parents, WRAP)
                    us += both[:count]
                    aborts += both[count:]
                    bare += timed(eng, handle.id, parents, ())[:count]
            table.add(
                *(size, shape, median(us), quantile(us, 0.99), median(aborts)),
                *(quantile(aborts, 0.99), median(bare), span.others),
            )
            worst = max(worst, median(us))
            if options.profile and size == sizes[-1] and shape == "random":
                profiled(report, eng, handle.id, draw.choices(nodes, k=count))
            eng.shutdown()
            gc.collect()
    report.targets.append(Target("us per fork, worst median", "< 10", worst, worst < 10))


def grow(eng: Engine, session: str, tip: int, size: int, shape: str) -> list[int]:
    """A tree of `size` nodes; returns the nodes that forks may start from."""
    draw, nodes = random.Random(0), [tip]
    while len(nodes) < size:
        parent = {"star": tip, "chain": nodes[-1], "random": draw.choice(nodes)}[shape]
        nodes.append(eng.fork(session, parent, "n", WRAP))
    return [tip] if shape == "star" else nodes


def cold(report: Report, options: Options) -> None:
    """Forks after a pass: its weights have pushed everything out of the caches of a core."""
    rounds, k, length = (5, 8, 500) if options.quick else (301, 8, 4_096)
    config = ForkServeConfig(capacity_pages=1024, prefix_index=False)
    eng = Engine(MockBackend(config, clock=SystemClock()))
    handle = eng.open([i % 251 for i in range(length)], session="s")
    eng.generate(handle.id, 1)
    weights, clock, fork = array("q", bytes(FLUSH)), time.perf_counter_ns, eng.fork
    table = report.table(
        f"{k} forks in a row over {length:,} tokens, {rounds} rounds",
        *("caches", "the first, us", "the last, us", "one of them, us", "others"),
    )
    for emptied in (False, True):
        us: list[list[float]] = []
        with Span() as span:
            for _ in range(rounds):
                if emptied:
                    weights.byteswap()  # touches all of it
                tip, nodes, times = eng.tip(handle.id), [], [clock()]
                for _ in range(k):
                    nodes.append(fork(handle.id, tip, "b"))
                    times.append(clock())
                us.append([(b - a) / 1e3 for a, b in pairwise(times)])
                for node in nodes:
                    eng.abort(handle.id, node)
        first, *_, last = (median(column) for column in zip(*us, strict=True))
        one = median([sum(row) / k for row in us])
        name = f"emptied by {FLUSH >> 20} MB" if emptied else "warm"
        table.add(name, first, last, one, span.others)
    why = f"others took {share(span.others)} of the CPU"
    report.targets.append(
        Target("us per fork, one of 8 with cold caches", "< 10", one, one < 10, why)
    )
    eng.shutdown()


def busy(report: Report, options: Options) -> None:
    """Forks that arrive at random while a background loop decodes: they share a lock and the GIL.

    Latency counts from the moment the fork was due, or waiting for the GIL would not show.
    """
    works, count = (8, 100) if options.quick else (64, 4_000)
    table = report.table(
        "from due to done, forks at random moments beside a loop whose passes sleep 20 ms",
        *("running works", "fork median us", "p90 us", "p99 us", "max us", "others"),
    )
    for running in (0, works):
        config = ForkServeConfig(background=True, capacity_pages=16_384)
        backend = IdleBackend(config, clock=SystemClock(), pass_s=0.02)
        eng = Engine(backend)
        handles = [eng.open([1] * 64, session=f"s{i}") for i in range(max(running, 1))]
        params = SamplingParams(ignore_eos=True)
        alive = [eng.start(h.id, 100_000, params=params) for h in handles[:running]]
        own, draw, us = eng.open([2] * 64, session="own"), random.Random(2), []
        due = time.perf_counter()
        with Span() as span:
            for _ in range(count):
                due = max(due, time.perf_counter()) + draw.expovariate(1 / 0.001)
                time.sleep(max(0.0, due - time.perf_counter()))
                child = eng.fork(own.id, own.tip, "b", WRAP)
                us.append((time.perf_counter() - due) * 1e6)
                eng.abort(own.id, child)
        for generation in alive:
            generation.cancel()
        eng.shutdown()
        p90, p99 = quantile(us, 0.9), quantile(us, 0.99)
        table.add(running, median(us), p90, p99, max(us), span.others)
    report.notes.append(
        "we lose: a fork that is due while a tick is put together waits for it (lock and GIL); "
        "with 0 works the same column shows what the timer of the operating system adds"
    )


def memory(report: Report, options: Options) -> None:
    """Host bytes of a tree by tracemalloc; KV pages from the pool."""
    branches = [10, 100] if options.quick else [10, 100, 1_000, 10_000]
    trunks = [1_000, 4_000] if options.quick else [1_000, 100_000]
    table = report.table(
        "memory of a tree of 64-token branches",
        *("trunk", "branches", "residual tokens", "host bytes", "bytes/token", "floor: ids alone"),
        *("x floor", "KV rows held/written"),
    )
    per_token = []
    for trunk in trunks:
        for number in branches:
            pages = 2 * (-(-trunk // 16) + 8 * number)  # plenty: a full pool puts a price on pages
            eng = engine(pages, branch_cap=number, prefix_index=False, c_spec=64)
            handle = eng.open([i % 251 for i in range(trunk)], session="s")
            text = [tuple((i * 7 + j) % 251 for j in range(64)) for i in range(number)]
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            nodes = [eng.fork(handle.id, handle.tip, "b", ids) for ids in text]
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            rows = None
            if number <= 100:
                start = eng.stats().live_pages
                for node in nodes:
                    eng.speculate(handle.id, node)
                while eng.drain_slack():
                    pass
                rows = (eng.stats().live_pages - start) * 16 / (64 * number)
            tokens = 64 * number
            table.add(trunk, number, tokens, held, held / tokens, 4, held / tokens / 4, rows)
            per_token.append((number, held / tokens))
            eng.shutdown()
    large = [b for n, b in per_token if n >= 100]
    spread = max(large) / min(large)
    report.targets.append(
        Target(
            "bytes/token, most / least (100 branches and more)",
            "linear: < 1.2",
            spread,
            spread < 1.2,
        )
    )


def profiled(report: Report, eng: Engine, session: str, parents: list[int]) -> None:
    table = report.table("where a fork+abort goes (under cProfile)", "function", "own us", "cum us")
    count = len(parents)
    for entry in profile(lambda: timed(eng, session, parents, WRAP), count, 14):
        table.add(*entry)
