"""Random forests of KV, laid out on pages in any way, and their attention in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forkserve.kernels.native.attention import AttentionPlan, Pool, gather
from forkserve.kernels.native.library import load
from forkserve.types import Span, Work

Floats = npt.NDArray[np.float32]
KV_HEADS = 2
SCRATCH = 8  # pages


@dataclass(eq=False)
class Node:
    """Rows k, v [n, Hk, D] at positions from `start` on."""

    start: int
    k: Floats
    v: Floats


@dataclass(eq=False)
class Job:
    """A work before it has pages: rows of nodes, then fresh rows.  written: by a write span."""

    path: list[tuple[Node, int]]
    q: Floats  # [n, H, D]
    k: Floats  # [n, Hk, D]
    v: Floats
    written: bool = True

    @property
    def start(self) -> int:
        return sum(rows for _, rows in self.path)

    def context(self) -> tuple[Floats, Floats]:
        """K and V [start, Hk, D]."""
        empty = self.k[:0]
        k = [node.k[:rows] for node, rows in self.path]
        v = [node.v[:rows] for node, rows in self.path]
        return np.concatenate([empty, *k]), np.concatenate([empty, *v])

    def chunks(self, size: int) -> list[Job]:
        """The job as a chain of jobs of at most `size` rows."""
        jobs = []
        for at in range(0, len(self.q), size):
            cut = slice(at, at + size)
            done = [(Node(self.start, self.k[:at], self.v[:at]), at)] if at else []
            jobs.append(Job([*self.path, *done], self.q[cut], self.k[cut], self.v[cut]))
        return jobs

    def flat(self) -> Job:
        """The same with one private node for the context."""
        k, v = self.context()
        return Job([(Node(0, k, v), len(k))] if len(k) else [], self.q, self.k, self.v)


@dataclass
class Shape:
    group: int = 3
    dim: int = 64


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def grow(seed: int, shape: Shape, *, works: int = 7, scale: int = 1) -> list[Job]:
    """Works at the nodes of a random forest; some leave a node in the middle."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)

    def node(start: int, length: int) -> Node:
        return Node(start, *(normal(rng, length, KV_HEADS, shape.dim) for _ in "kv"))

    paths: list[list[tuple[Node, int]]] = [[]]
    for _ in range(draw.randrange(1, 5)):
        parent = draw.choice(paths)
        start = sum(rows for _, rows in parent)
        length = scale * draw.choice([1, 5, 40, 130, 300, 420])
        paths.append([*parent, (node(start, length), length)])
    jobs = []
    for _ in range(works):
        path = list(draw.choice(paths))
        if path and draw.random() < 0.3:
            path[-1] = (path[-1][0], draw.randrange(path[-1][1] + 1))
        start = sum(rows for _, rows in path)
        if draw.random() < 0.5:
            length = draw.choice([0, 1, 3, 20])
            path.append((node(start, length), length))
        n = draw.choice([1, 1, 1, 2, 7, 33])
        q = normal(rng, n, KV_HEADS * shape.group, shape.dim)
        fresh = [normal(rng, n, KV_HEADS, shape.dim) for _ in "kv"]
        jobs.append(Job(path, q, *fresh, written=draw.random() < 0.8))
    return jobs


def fan(k: int, trunk: int, shape: Shape, *, tail: int = 4, n: int = 1, seed: int = 0) -> list[Job]:
    """k works of n rows over one trunk, each with a tail of its own."""
    rng = np.random.default_rng(seed)

    def node(start: int, length: int) -> Node:
        return Node(start, *(normal(rng, length, KV_HEADS, shape.dim) for _ in "kv"))

    root = node(0, trunk)
    jobs = []
    for _ in range(k):
        q = normal(rng, n, KV_HEADS * shape.group, shape.dim)
        fresh = [normal(rng, n, KV_HEADS, shape.dim) for _ in "kv"]
        jobs.append(Job([(root, trunk), (node(trunk, tail), tail)], q, *fresh))
    return jobs


@dataclass
class Layout:
    """Pages for jobs.  Every row that no span names is NaN.

    aligned: spans begin on page boundaries, and pages are in order.
    paired: attention rounds its other operands to bfloat16 too.
    """

    page: int = 16
    seed: int = 0
    aligned: bool = False
    bf16: bool = False
    paired: bool = False
    spans: dict[Node, Span] = field(default_factory=dict)

    def place(self, jobs: Sequence[Job]) -> list[Work]:
        """The works, and `pool` filled with their contexts."""
        draw, page = random.Random(self.seed), self.page
        self.dim, self.group = jobs[0].q.shape[2], jobs[0].q.shape[1] // KV_HEADS
        need = sum(len(node.k) + 2 * page for job in jobs for node, _ in job.path)
        need += sum(len(job.q) + 2 * page for job in jobs)
        self.pages = need // page + 1
        free = list(range(self.pages))[::-1]
        if not self.aligned:
            draw.shuffle(free)
        rows = (self.pages + SCRATCH) * page
        self.k = np.full((KV_HEADS, rows, self.dim), np.nan, dtype=np.float32)
        self.v = self.k.copy()
        keys = itertools.count()

        def span(start: int, length: int, extra: int = 0) -> Span:
            offset = 0 if self.aligned else draw.randrange(page)
            pages = [free.pop() for _ in range(-(-(offset + length + extra) // page))]
            return Span(next(keys), pages, start, length, offset)

        works = []
        for i, job in enumerate(jobs):
            context = []
            for node, rows in job.path:
                if node not in self.spans:
                    self.spans[node] = span(node.start, len(node.k))
                    where = self.rows(self.spans[node])
                    self.k[:, where] = node.k.transpose(1, 0, 2)
                    self.v[:, where] = node.v.transpose(1, 0, 2)
                known = self.spans[node]
                context.append(Span(known.key, known.pages, known.start, rows, known.offset))
            n = len(job.q)
            write = span(job.start, n) if job.written else None
            works.append(Work("s", i, [0] * n, job.start, tuple(context), write))
        self.pack()
        return works

    def rows(self, span: Span) -> npt.NDArray[np.int64]:
        """Rows of the pool that a span names."""
        at = np.arange(span.offset, span.offset + span.length)
        pages = np.asarray(span.pages, dtype=np.int64)
        return pages[at // self.page] * self.page + at % self.page

    def pack(self) -> None:
        """The pool in memory, as kv.h says."""
        heads, rows, dim = self.k.shape
        k = self.k.reshape(heads, -1, self.page, dim).transpose(0, 1, 3, 2)
        both = np.concatenate([k.reshape(heads, -1), self.v.reshape(heads, -1)])
        self.memory = to_bf16(both) if self.bf16 else both
        at = self.memory.ctypes.data
        self.pool = Pool(at, 1, heads, dim, self.page, rows, int(self.bf16), int(self.paired))

    def plan(self, threads: int = 2, window: int = 0, isa: str | None = None) -> AttentionPlan:
        return AttentionPlan(
            load(isa),
            kv_heads=KV_HEADS,
            group=self.group,
            head_dim=self.dim,
            page_size=self.page,
            pages=self.pages + SCRATCH,
            scratch_page=self.pages,
            threads=threads,
            window=window,
        )


def run(
    jobs: Sequence[Job],
    layout: Layout | None = None,
    *,
    threads: int = 2,
    window: int = 0,
    isa: str | None = None,
    softcap: float = 0.0,
) -> list[Floats]:
    """Attention of all jobs in one batch: [n, H, D] each."""
    layout = layout or Layout()
    works = layout.place(jobs)
    plan = layout.plan(threads, window, isa)
    plan.build(gather(works, layout.page))
    q, k, v = (np.concatenate([getattr(job, name) for job in jobs]) for name in "qkv")
    out = plan.attend(layout.pool, q, (k, v), softcap=softcap)
    ends = np.cumsum([len(job.q) for job in jobs])
    return np.split(out, ends[:-1])


def expected(job: Job, *, window: int = 0, softcap: float = 0.0) -> npt.NDArray[np.float64]:
    """Softmax attention of every row in float64, one row at a time."""
    before = job.context()
    k, v = (
        np.concatenate(pair).astype(np.float64) for pair in zip(before, (job.k, job.v), strict=True)
    )
    out = np.empty(job.q.shape)
    group = job.q.shape[1] // KV_HEADS
    for i, q in enumerate(job.q.astype(np.float64)):
        end = job.start + i + 1
        low = max(0, end - window) if window else 0
        for h in range(q.shape[0]):
            scores = k[low:end, h // group] @ q[h] * q.shape[1] ** -0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[low:end, h // group] / weights.sum()
    return out


def error(got: npt.NDArray[np.floating], want: npt.NDArray[np.floating]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def same(got: Sequence[Floats], want: Sequence[Floats]) -> bool:
    """Whether all results are equal, bit by bit."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True))


def to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even; NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(x: npt.NDArray[np.uint16]) -> Floats:
    return (x.astype(np.uint32) << 16).view(np.float32)
