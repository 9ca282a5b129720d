"""Where kernels run in these tests, and attention over a forest by kernels."""

from __future__ import annotations

import torch

from forkserve.kernels.jit import INTERPRETED
from forkserve.kernels.quant import KVRows, quantize
from forkserve.kernels.tile_attention import Partials, TileShape, attend_tiles
from forkserve.kernels.tile_plans import DevicePlan
from forkserve.kernels.tiles import SPLIT, TilePlan, Tiling, plan_tiles
from forkserve.kernels.write_kv import write_kv
from tests.forests import Forest

DEVICE = "cpu" if INTERPRETED else "cuda"
# A step costs the interpreter the same however many keys it takes.
SHAPES = (TileShape(128, 4, 1),) * 2 if INTERPRETED else None


def tile_plan(forest: Forest, split: int = SPLIT) -> TilePlan:
    group = 2 * forest.q.shape[1] // forest.kv.shape[0]
    tiling = Tiling(forest.page, group, forest.window, split)
    return plan_tiles(forest.works, tiling, forest.scratch)


def attend(
    forest: Forest,
    *,
    split: int = SPLIT,
    format: str = "none",
    plan: TilePlan | None = None,
) -> torch.Tensor:
    """[n, H*D] on the CPU; the forest's fresh rows are written first."""
    plan = plan or tile_plan(forest, split)
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
        page_size=forest.page,
        scale=forest.scale or dim**-0.5,
        softcap=forest.softcap,
        window=forest.window,
        shapes=SHAPES,
    )
    return out.flatten(1).cpu()
