"""Native attention over one trunk: k rows at once against k passes, and against torch's flash."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure import Options, Report, Rounds, Target, median, repeat, share
from benchmarks.models import bandwidth
from benchmarks.plot import Chart
from benchmarks.tiles import Branch, step
from forkserve.kernels.native.attention import AttentionPlan, Pool, gather
from forkserve.kernels.native.grown_tables import TablePlanner
from forkserve.kernels.native.library import load
from forkserve.types import Span, Work

# The shape of SmolLM2-135M.  Layers are memory of their own, so that no cache holds the trunk.
LAYERS, KV_HEADS, GROUP, DIM, PAGE = 30, 3, 3, 64, 16
SCRATCH = 64  # pages
WARM_S = 0.03
PRODUCT = 1024  # rows and columns of a matrix product, the ceiling of arithmetic
# Of KV and operands: those of the variants float32, int8, and bfloat16 and w8a16.
KINDS = {
    "float32": (torch.float32, False),
    "bfloat16 KV": (torch.bfloat16, False),
    "bfloat16": (torch.bfloat16, True),
}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def run(options: Options) -> Report:
    report = Report("attention", "attention of 30 layers of SmolLM2's shape, without the rest")
    torch.set_grad_enabled(False)
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    torch.set_num_threads(threads)
    read, _ = bandwidth(16 if options.quick else 256)
    trunk(report, options, threads, read)
    prefill(report, options, threads)
    planning(report, options, threads)
    report.notes += [
        f"{threads} threads; kernels for {load().isa}; memory reads {read:.1f} GB/s",
        "flash is torch's CPU kernel on K and V without pages, the rows of all branches stacked",
        "the trunk's pages are shuffled; K and V of one layer are read once in each pass",
    ]
    return report


@dataclass
class Paged:
    """A pool of random rows, and plans over it.  kind: see `KINDS`."""

    pages: int
    layers: int
    kind: str
    threads: int

    def __post_init__(self) -> None:
        rows = (self.pages + SCRATCH) * PAGE
        shape = (self.layers, 2 * KV_HEADS, rows * DIM)
        dtype, paired = KINDS[self.kind]
        self.memory = torch.randn(shape).to(dtype)
        at, bf16 = self.memory.data_ptr(), dtype is torch.bfloat16
        self.pool = Pool(at, self.layers, KV_HEADS, DIM, PAGE, rows, bf16, paired)

    def plan(self, works: Sequence[Work]) -> AttentionPlan:
        plan = AttentionPlan(
            load(),
            kv_heads=KV_HEADS,
            group=GROUP,
            head_dim=DIM,
            page_size=PAGE,
            pages=self.pages + SCRATCH,
            scratch_page=self.pages,
            threads=self.threads,
        )
        plan.build(gather(works, PAGE))
        return plan

    def passes(self, plan: AttentionPlan, q: npt.NDArray[np.float32]) -> Callable[[], None]:
        """A function that attends in every layer."""

        def once() -> None:
            for layer in range(self.layers):
                plan.attend(self.pool, q, layer=layer)

        return once


def trunk(report: Report, options: Options, threads: int, read: float) -> None:
    """k decodes over 4,096 rows; a pass of its own for each; torch on contiguous rows."""
    length, layers = (256, 2) if options.quick else (4096, LAYERS)
    ks = [1, 8] if options.quick else [1, 2, 4, 8, 16]
    pages = length // PAGE
    span = Span("trunk", random.Random(0).sample(range(pages), pages), 0, length)
    works = [
        Work("", i, [0], length, (span,), Span(i, [pages + i], length, 1)) for i in range(max(ks))
    ]
    table = report.table(
        f"ms a step of k branches over one trunk of {length:,}, all layers",
        *("KV", "k", "native", "k passes", "passes/native", "flash", "flash/native"),
        *("native GB/s", "of memory", "native GFLOP/s", "quiet rounds", "others"),
    )
    for kind, (dtype, _) in KINDS.items():
        paged = Paged(pages + max(ks), layers, kind, threads)
        contiguous = torch.randn(layers, 2, 1, KV_HEADS, length, DIM).to(dtype)
        for k in ks:
            found = branches(options, paged, works[:k], contiguous)
            native, passes, peer = (median(x) for x in zip(*found.values, strict=True))
            ratio = median([b / a for a, b, _ in found.values])
            against = median([c / a for a, _, c in found.values])
            rate = contiguous.nbytes / native / 1e6
            work = layers * KV_HEADS * GROUP * k * 4 * length * DIM / native / 1e6
            table.add(
                *(kind, k, native, passes, ratio, peer, against),
                *(rate, rate / read, work, found.quiet, share(found.others)),
            )
            what = f"{kind}: "
            if k == 8:
                what += "8 branches at once over 8 passes"
                report.targets.append(Target(what, ">= 3.3", ratio, ratio >= 3.3))
            if k == 1:
                what += "one branch over torch's flash"
                report.targets.append(Target(what, ">= 1", against, against >= 1))


def branches(
    options: Options, paged: Paged, works: list[Work], contiguous: torch.Tensor
) -> Rounds[tuple[float, float, float]]:
    """ms of all works at once, of one pass for each, of torch's flash with stacked rows."""
    k = len(works)
    q = np.random.default_rng(k).standard_normal((k, KV_HEADS * GROUP, DIM), np.float32)
    together = paged.passes(paged.plan(works), q)
    one = paged.passes(paged.plan(works[:1]), q[:1])
    stacked = torch.from_numpy(q).view(k, KV_HEADS, GROUP, DIM).transpose(0, 1)
    stacked = stacked.reshape(1, KV_HEADS, k * GROUP, DIM).to(contiguous.dtype)

    def passes() -> None:
        for _ in works:
            one()

    def torchs() -> None:
        for keys, values in contiguous:
            flash(stacked, keys, values)

    rounds, budget = (2, 0.0) if options.quick else (9, 60.0)
    return repeat(lambda _: (warm(together), warm(passes), warm(torchs)), rounds, budget)


def prefill(report: Report, options: Options, threads: int) -> None:
    """A causal prompt in one pass, beside torch's flash and the rate of its matrix products."""
    layers = 1 if options.quick else 4
    table = report.table(
        f"ms of a prompt, {layers} layers",
        *("rows", "native", "flash", "flash/native", "native GFLOP/s", "sgemm GFLOP/s"),
        *("quiet rounds", "others"),
    )
    for n in [64] if options.quick else [512, 2048]:
        found = prompt(options, n, layers, threads)
        ours, peer, product = (median(x) for x in zip(*found.values, strict=True))
        work = layers * KV_HEADS * GROUP * 4 * DIM * n * (n + 1) / 2
        table.add(
            *(n, ours, peer, median([b / a for a, b, _ in found.values]), work / ours / 1e6),
            *(2 * PRODUCT**3 / product / 1e6, found.quiet, share(found.others)),
        )


def prompt(
    options: Options, n: int, layers: int, threads: int
) -> Rounds[tuple[float, float, float]]:
    """ms of n causal rows here, in torch, and of a product of two large matrices."""
    paged = Paged(n // PAGE, layers, "float32", threads)
    span = Span(0, list(range(n // PAGE)), 0, n)
    q = np.random.default_rng(n).standard_normal((n, KV_HEADS * GROUP, DIM), np.float32)
    native = paged.passes(paged.plan([Work("", 0, [0] * n, 0, (), span)]), q)
    heads = torch.from_numpy(q).view(1, n, KV_HEADS * GROUP, DIM).transpose(1, 2)
    both = torch.randn(2, 1, KV_HEADS, 1, n, DIM).expand(-1, -1, -1, GROUP, -1, -1)
    k, v = both.flatten(2, 3)
    a = torch.randn(PRODUCT, PRODUCT)

    def torchs() -> None:
        for _ in range(layers):
            flash(heads, k, v, 0.0, True)

    def product() -> None:
        torch.mm(a, a)

    rounds, budget = (2, 0.0) if options.quick else (7, 40.0)
    return repeat(lambda _: (warm(native), warm(torchs), warm(product)), rounds, budget)


def planning(report: Report, options: Options, threads: int) -> None:
    """From works to units: what every pass pays before its first layer, while branches decode."""
    table = report.table(
        "us to plan a batch, mean of a stretch of decoding",
        *("batch", "spans", "units", "tables anew", "tables", "plan", "total", "largest"),
        *("gathered", "grown", "quiet rounds", "others"),
    )
    steps = 8 if options.quick else 192
    for name, (branches, pages) in (
        ("1 decode over 2,048", forest(1, None, steps)),
        ("8 decodes over 2,048", forest(8, None, steps)),
        ("256 works over 1,000 nodes", forest(256, 100 if options.quick else 1000, steps)),
    ):
        batches = [step(branches, at) for at in range(steps)]
        plan = Paged(pages, 1, "float32", threads).plan(batches[0])

        def once(
            _: int, batches: list[list[Work]] = batches, plan: AttentionPlan = plan
        ) -> tuple[list[float], list[float], list[float], TablePlanner]:
            planner = TablePlanner(PAGE)
            tables, plans, anew = [], [], []
            for at, works in enumerate(batches):
                begin = time.perf_counter()
                found = planner.tables(works)
                middle = time.perf_counter()
                plan.build(found)
                plans.append((time.perf_counter() - middle) * 1e6)
                tables.append((middle - begin) * 1e6)
                if at % 8 == 0:
                    anew.append(ms(lambda works=works: gather(works, PAGE)) * 1e3)
            return tables, plans, anew, planner

        rounds = repeat(once, 1 if options.quick else 9, 0.0 if options.quick else 20.0)
        spent = [
            (median(c), sum(a) / steps, sum(b) / steps, sum(a + b) / steps, max(map(add, a, b)))
            for a, b, c, _ in rounds.values
        ]
        parts = [median(x) for x in zip(*spent, strict=True)]
        planner = rounds.values[0][3]
        table.add(
            *(name, sum(len(work.context) for work in batches[-1]), plan.counts["units"], *parts),
            *(planner.made, planner.grown, rounds.quiet, share(rounds.others)),
        )
    total = parts[3] / 1000
    what = "ms to plan 256 works over 1,000 nodes, amortised"
    report.targets.append(Target(what, "< 1", total, None if options.quick else total < 1))


def forest(count: int, nodes: int | None, steps: int) -> tuple[list[Branch], int]:
    """Branches that decode `steps` rows, and pages: over one trunk, or in a random tree."""
    draw = random.Random(0)
    pages = 0

    def span(key: int, start: int, length: int) -> Span:
        nonlocal pages
        offset = draw.randrange(PAGE)
        need = -(-(offset + length) // PAGE)
        pages += need
        return Span(key, list(range(pages - need, pages)), start, length, offset)

    paths: list[tuple[Span, ...]] = [(span(0, 0, 2048),)]
    for i in range(1, nodes or 0):
        parent = draw.choice(paths)
        start = parent[-1].start + parent[-1].length
        paths.append((*parent, span(i, start, draw.randrange(4, 64))))
    branches = []
    for i in range(count):
        path = draw.choice(paths)
        start = path[-1].start + path[-1].length
        branches.append((path, span(-1 - i, start, steps)))
    return branches, pages


def warm(call: Callable[[], object]) -> float:
    """ms of a call right after some like it: threads of the kernel before spin on for a while."""
    end = time.perf_counter() + WARM_S
    call()
    while time.perf_counter() < end:
        call()
    return ms(call)


def ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


CHARTS = (Chart("ms a step", ("KV", "k"), ("native", "k passes", "flash")),)
