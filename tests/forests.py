"""Random forests of spans for tests of attention, and the answer in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forkserve.kernels.plan import Plan, plan_attention, span_rows
from forkserve.kernels.segment_attention import segment_attention
from forkserve.kernels.write_kv import write_kv
from forkserve.types import Span, Work

__all__ = ["KV_HEADS", "Forest", "error", "expected", "grow"]

KV_HEADS = 2
PAGES = 160


@dataclass
class Forest:
    """Works over a KV tensor in which every row that no span names is NaN."""

    kv: torch.Tensor  # [2*Hk, rows, D]
    q: torch.Tensor  # [n, H, D]
    fresh: torch.Tensor  # [n, 2*Hk, D]
    works: list[Work]
    page: int
    scratch: int
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0

    def plan(self, works: list[Work] | None = None) -> Plan:
        return plan_attention(works or self.works, self.page, self.scratch, (self.window,))

    def run(self) -> torch.Tensor:
        plan = self.plan()
        write_kv(self.kv, plan.slots, self.fresh)
        return self.attend(self.q, plan)

    def attend(self, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        return segment_attention(
            q, self.kv, plan, self.window, scale=self.scale, softcap=self.softcap
        )

    def forget(self) -> None:
        """NaN in every context row that no query row sees through the window."""
        seen = torch.zeros(self.kv.shape[1], dtype=torch.bool)
        for work in self.works:
            for span in work.context:
                hidden = max(work.start - self.window + 1 - span.start, 0)
                seen[torch.from_numpy(span_rows(span, self.page)[hidden:])] = True
        self.kv[:, ~seen] = float("nan")


def grow(
    seed: int,
    group: int,
    page: int,
    dim: int,
    *,
    works: int = 7,
    lengths: Sequence[int] = (1, 5, 40, 130, 300, 420),
    chunks: Sequence[int] = (1, 1, 1, 2, 7, 33),
) -> Forest:
    """A random forest of spans with ragged offsets, and works at its nodes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows = PAGES * page
    kv = torch.full((2 * KV_HEADS, rows + 64, dim), float("nan"))
    free = list(range(PAGES))
    draw.shuffle(free)
    if draw.random() < 0.3:
        free.sort(reverse=True)  # consecutive pages: views instead of gathers
    keys = itertools.count()

    def new_span(start: int, length: int, extra: int = 0) -> Span:
        offset = draw.randrange(page)
        pages = [free.pop() for _ in range(-(-(offset + length + extra) // page))]
        span = Span(next(keys), pages, start, length, offset)
        if length:
            where = torch.from_numpy(span_rows(span, page))
            kv[:, where] = torch.randn(2 * KV_HEADS, length, dim)
        return span

    nodes: list[tuple[Span, ...]] = [()]
    for _ in range(draw.randrange(1, 5)):
        parent = draw.choice(nodes)
        start = parent[-1].start + parent[-1].length if parent else 0
        nodes.append((*parent, new_span(start, draw.choice(lengths))))
    made = []
    for i in range(works):
        context = draw.choice(nodes)
        if context and draw.random() < 0.3:  # forked in mid-segment
            last = context[-1]
            keep = draw.randrange(0, last.length + 1)
            context = (*context[:-1], Span(last.key, last.pages, last.start, keep, last.offset))
        start = sum(span.length for span in context)
        n = draw.choice(chunks)
        if draw.random() < 0.2:
            made.append(Work("s", i, [0] * min(n, 7), start, context, None))
            continue
        own = new_span(start, draw.choice([0, 0, 3, 20]), extra=n)
        at = own.offset + own.length
        write = Span(own.key, own.pages[at // page :], start + own.length, n, at % page)
        made.append(Work("s", i, [0] * n, start + own.length, (*context, own), write))
    total = sum(len(work.tokens) for work in made)
    q = torch.randn(total, KV_HEADS * group, dim)
    return Forest(kv, q, torch.randn(total, 2 * KV_HEADS, dim), made, page, rows)


def expected(forest: Forest) -> torch.Tensor:
    """Softmax attention of every row in float64, one row at a time."""
    out, first = [], 0
    dim = forest.q.shape[-1]
    for work in forest.works:
        n = len(work.tokens)
        context = [span_rows(span, forest.page) for span in work.context]
        rows = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *context]))
        fresh = forest.fresh[first : first + n].transpose(0, 1)
        both = torch.cat([forest.kv[:, rows], fresh], 1).double()
        for i in range(n):
            end = work.start + i + 1
            begin = max(end - forest.window, 0) if forest.window else 0
            k, v = both[:KV_HEADS, begin:end], both[KV_HEADS:, begin:end]
            q = forest.q[first + i].double().view(KV_HEADS, -1, dim)
            scores = q @ k.transpose(-1, -2) * (forest.scale or dim**-0.5)
            if forest.softcap:
                scores = forest.softcap * torch.tanh(scores / forest.softcap)
            out.append((scores.softmax(-1) @ v).reshape(-1))
        first += n
    return torch.stack(out)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
