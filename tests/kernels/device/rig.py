"""Where kernels run in these tests, and attention over a forest by kernels."""

from __future__ import annotations

import torch

from forkserve.kernels.jit import INTERPRETED
from forkserve.kernels.pieces import BLOCK, SPLIT, Tiling
from forkserve.kernels.quant import KVRows, quantize
from forkserve.kernels.tile_attention import Partials, attend_tiles
from forkserve.kernels.tile_plans import DevicePlan
from forkserve.kernels.tiles import TilePlan, plan_tiles
from forkserve.kernels.write_kv import write_kv
from tests.forests import Forest

DEVICE = "cpu" if INTERPRETED else "cuda"
# A step costs the interpreter the same however many keys it takes.
STEP = 64 if INTERPRETED else BLOCK
LEAST = 8 if INTERPRETED else 16  # keys of a step: a product on a GPU takes no fewer


def tile_plan(
    forest: Forest, split: int = SPLIT, block: int = STEP, level_cost: int = 0
) -> TilePlan:
    """level_cost: none, so that states are left and taken up wherever it saves reading.

    Small tiles have launches of their own, however few they are.
    """
    group = 2 * forest.q.shape[1] // forest.kv.shape[0]
    sizes = split, min(block, split)
    tiling = Tiling(forest.page, group, forest.window, *sizes, level_cost, wave=0)
    return plan_tiles(forest.works, tiling, forest.scratch)


def attend(
    forest: Forest,
    *,
    split: int = SPLIT,
    format: str = "none",
    plan: TilePlan | None = None,
    block: int = STEP,
) -> torch.Tensor:
    """[n, H*D] on the CPU; the forest's fresh rows are written first."""
    plan = plan or tile_plan(forest, split, block)
    heads, dim = forest.q.shape[1:]
    write_kv(forest.kv, torch.from_numpy(plan.slots), forest.fresh)
    kv = KVRows(forest.kv.to(DEVICE))
    if format != "none":
        rows, scales = quantize(forest.kv, format)
        kv = KVRows(rows.to(DEVICE), scales.to(DEVICE), format)
    out = attend_tiles(
        forest.q.to(DEVICE),
        kv,
        DevicePlan.exact(plan, DEVICE),
        Partials(plan.rows.size, heads, dim, DEVICE),
        scale=forest.scale or dim**-0.5,
        softcap=forest.softcap,
        window=forest.window,
    )
    return out.flatten(1).cpu()
