"""Decode attention on a GPU: paged without sharing, and over trees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.products import Products, Row, Rows
from benchmarks.gpu.shapes import AGENTS, FASTTREE, HEADS, Batch, Tree, batch, flat, works_of
from benchmarks.gpu.timing import Ceiling, agree, milliseconds, replayed
from forkserve.kernels.pieces import LEVEL_COST, SPLIT, Tiling
from forkserve.kernels.plan import span_rows
from forkserve.kernels.quant import KVRows
from forkserve.kernels.tile_attention import Partials, TileShape, attend_tiles
from forkserve.kernels.tile_plans import DevicePlan
from forkserve.kernels.tiles import plan_tiles
from forkserve.types import Work

__all__ = ["PAGED", "Sizes", "levels", "paged", "trees", "tuning"]

PAGE = 16
# Sequences x context; GQA 8:1 over heads of 128, as the goal states it.
PAGED = tuple(itertools.product((1, 8, 32), (1024, 8192, 32768)))
PAGED_HEADS = (64, 8)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run: the whole, or a trial of it."""

    paged: Sequence[tuple[int, int]] = PAGED
    trees: Sequence[Tree] = (*FASTTREE, *AGENTS)
    heads: Sequence[tuple[int, int]] = HEADS
    dim: int = 128
    splits: Sequence[int] = (256, 512, 1024)
    tuned: tuple[int, int] = (8, 8192)
    shapes: Sequence[TileShape] = (
        TileShape(2, 4),
        TileShape(2, 6),
        TileShape(4, 3),
        TileShape(4, 5),
        TileShape(8, 4),
    )
    costs: Sequence[int] = (0, LEVEL_COST // 4, LEVEL_COST, 4 * LEVEL_COST)
    products: Products = field(default_factory=Products)
    budget_s: float = 0.25


class Problem:
    """Tensors of one batch on the device; rows of K and V random, in bfloat16."""

    def __init__(self, made: Batch, heads: tuple[int, int], dim: int, device: torch.device) -> None:
        self.made, self.heads, self.dim, self.device = made, heads, dim, device
        query, kv = heads
        torch.manual_seed(0)
        kind = {"dtype": torch.bfloat16, "device": device}
        self.kv = KVRows(torch.randn(2 * kv, made.pages * PAGE, dim, **kind))
        self.q = torch.randn(len(made.works), query, dim, **kind)

    def kernel(
        self,
        works: list[Work],
        split: int = SPLIT,
        shape: TileShape | None = None,
        cost: int = LEVEL_COST,
    ) -> Callable[[], torch.Tensor]:
        """The tile kernel and the merge over a plan of `works`."""
        query, kv = self.heads
        tiling = Tiling(PAGE, query // kv, split=split, level_cost=cost, kv_heads=kv)
        plan = plan_tiles(works, tiling, self.made.pages * PAGE)
        sent = DevicePlan.exact(plan, self.device)
        partials = Partials(plan.rows.size, self.heads[0], self.dim, self.device)
        shapes = None if shape is None else (shape, shape)

        def run() -> torch.Tensor:
            return attend_tiles(
                self.q, self.kv, sent, partials, scale=self.dim**-0.5, shapes=shapes
            )

        return replayed(run, self.device)

    def sdpa(self) -> Callable[[], torch.Tensor] | None:
        """torch's attention, a call per sequence over a contiguous copy of its rows.

        None if the copies would take more than half of the memory that is free.
        """
        kv_heads = self.heads[1]
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            if self.bytes(self.made.copied) > free // 2:
                return None
        parts = []
        for work in self.made.works:
            assert work.write is not None
            rows = [span_rows(span, PAGE) for span in (*work.context, work.write)]
            at = torch.cat([torch.from_numpy(r) for r in rows]).to(self.device)
            both = self.kv.rows[:, at]
            parts.append((both[None, :kv_heads], both[None, kv_heads:]))
        q = self.q[:, None, :, None].unbind(0)  # n of [1, H, 1, D]

        def run() -> torch.Tensor:
            return torch.cat(
                [
                    F.scaled_dot_product_attention(x, k, v, enable_gqa=True)
                    for x, (k, v) in zip(q, parts, strict=True)
                ]
            )

        return replayed(run, self.device)

    def bytes(self, rows: int) -> int:
        """Of K and V of so many rows, of queries and of results."""
        return 2 * rows * self.heads[1] * self.dim * 2 + 2 * self.q.numel() * 2

    @property
    def flops(self) -> int:
        """Multiplications and additions, all heads."""
        return 4 * self.made.copied * self.heads[0] * self.dim

    def least(self, top: Ceiling) -> tuple[float, str]:
        """(ms, what bounds it): every node read once, or what takes longer than that.

        "memory", "products", or "launches" where the kernels start for longer than they work.
        """
        bounds = {
            "memory": self.bytes(self.made.shared) / top.copy_gbs / 1e6,
            "products": self.flops / top.gemm_tflops / 1e9,
            "launches": top.launch_ms,
        }
        bound = max(bounds, key=lambda name: bounds[name])
        return bounds[bound], bound


def paged(sizes: Sizes, device: torch.device, top: Ceiling) -> Rows:
    """Decode over sequences that share nothing, as a share of copy bandwidth."""
    for sequences, context in sizes.paged:
        yield partial(_paged, sizes, device, top, sequences, context)


def _paged(sizes: Sizes, device: torch.device, top: Ceiling, sequences: int, context: int) -> Row:
    problem = Problem(batch(sequences, context, PAGE), PAGED_HEADS, sizes.dim, device)
    ms = milliseconds(problem.kernel(problem.made.works), device, sizes.budget_s)
    gbs = problem.bytes(problem.made.copied) / ms / 1e6
    counted = sequences >= 8 and context >= 8192
    return {
        "batch": sequences,
        "context": context,
        "ms": ms,
        "gb_s": gbs,
        "copy_gb_s": top.copy_gbs,
        "share": gbs / top.copy_gbs,
        "goal": 0.8 if counted else None,
    }


def trees(sizes: Sizes, device: torch.device, top: Ceiling) -> Rows:
    """Decode over trees, beside the same kernel without sharing and torch per sequence.

    share: of the least time in which every node is read once at copy bandwidth, or, where products
    or empty launches take longer than that, of their measured time (bound).
    """
    for tree, heads in itertools.product(sizes.trees, sizes.heads):
        yield partial(_tree, sizes, device, top, tree, heads)


def _tree(
    sizes: Sizes, device: torch.device, top: Ceiling, tree: Tree, heads: tuple[int, int]
) -> Row:
    problem = Problem(works_of(tree, PAGE), heads, sizes.dim, device)
    made = problem.made
    ours = problem.kernel(made.works)
    alone = problem.kernel(flat(made))
    agree(ours(), alone())
    ms = milliseconds(ours, device, sizes.budget_s)
    flat_ms = milliseconds(alone, device, sizes.budget_s)
    sdpa_ms = None
    each = problem.sdpa()
    if each is not None:
        agree(ours(), each())
        sdpa_ms = milliseconds(each, device, sizes.budget_s)
    ideal_ms, bound = problem.least(top)
    return {
        "tree": tree.name,
        "heads": f"{heads[0]}/{heads[1]}",
        "k": len(made.works),
        "ms": ms,
        "ideal_ms": ideal_ms,
        "bound": bound,
        "share": ideal_ms / ms,
        "goal": 0.7 if bound == "memory" else None,
        "flat_ms": flat_ms,
        "sdpa_ms": sdpa_ms,
        "over_flat": flat_ms / ms,
        "over_sdpa": None if sdpa_ms is None else sdpa_ms / ms,
    }


def tuning(sizes: Sizes, device: torch.device, top: Ceiling) -> Rows:
    """Split sizes and shapes of small tiles, on one paged batch: which defaults would be best."""
    problem = Problem(batch(*sizes.tuned, PAGE), PAGED_HEADS, sizes.dim, device)
    for split, shape in itertools.product(sizes.splits, (None, *sizes.shapes)):
        yield partial(_tuned, sizes, device, top, problem, split, shape)


def _tuned(
    sizes: Sizes,
    device: torch.device,
    top: Ceiling,
    problem: Problem,
    split: int,
    shape: TileShape | None,
) -> Row:
    run = problem.kernel(problem.made.works, split, shape)
    ms = milliseconds(run, device, sizes.budget_s)
    gbs = problem.bytes(problem.made.copied) / ms / 1e6
    name = "default" if shape is None else f"{shape.warps}w{shape.stages}s"
    return {"split": split, "shape": name, "ms": ms, "share": gbs / top.copy_gbs}


def levels(sizes: Sizes, device: torch.device, top: Ceiling) -> Rows:
    """What a launch that waits for the one before may cost, over trees: the planner's rule."""
    for tree, heads, cost in itertools.product(sizes.trees, sizes.heads, sizes.costs):
        yield partial(_level, sizes, device, top, tree, heads, cost)


def _level(
    sizes: Sizes,
    device: torch.device,
    top: Ceiling,
    tree: Tree,
    heads: tuple[int, int],
    cost: int,
) -> Row:
    problem = Problem(works_of(tree, PAGE), heads, sizes.dim, device)
    run = problem.kernel(problem.made.works, cost=cost)
    ms = milliseconds(run, device, sizes.budget_s / 4)
    return {
        "tree": tree.name,
        "heads": f"{heads[0]}/{heads[1]}",
        "level_cost": cost,
        "ms": ms,
        "share": problem.least(top)[0] / ms,
    }
