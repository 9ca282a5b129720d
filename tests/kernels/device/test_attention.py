"""Tile attention and merging against float64, over random forests."""

from __future__ import annotations

import itertools

import pytest
import torch

from forkserve.kernels.merge import merge_parts
from forkserve.kernels.pieces import Tiling
from forkserve.kernels.quant import dequantize, quantize
from forkserve.kernels.tile_plans import Capacity, DevicePlan, TilePlanner
from forkserve.kernels.write_kv import write_kv
from forkserve.types import Span, Work
from tests.forests import KV_HEADS, Forest, error, expected, grow

from .rig import DEVICE, LEAST, attend, tile_plan

GRID = list(itertools.product((1, 4, 8), (16, 32), (64, 128)))  # group, page, head dim
LENGTHS, CHUNKS = (1, 5, 40, 100), (1, 1, 2, 7, 20)


def small(seed: int, group: int, page: int, dim: int, works: int = 3) -> Forest:
    return grow(seed, group, page, dim, works=works, lengths=LENGTHS, chunks=CHUNKS)


@pytest.mark.parametrize(("group", "page", "dim"), GRID)
def test_float32(group: int, page: int, dim: int) -> None:
    forest = small(group + page + dim, group, page, dim)
    want = expected(forest)
    got = attend(forest, split=64)
    assert torch.isfinite(got).all()
    assert error(got, want) < 1e-5


@pytest.mark.parametrize(("group", "page", "dim"), [GRID[2], GRID[5], GRID[11]])
def test_bfloat16(group: int, page: int, dim: int) -> None:
    forest = small(dim, group, page, dim)
    forest.kv, forest.q = forest.kv.bfloat16(), forest.q.bfloat16()
    forest.fresh = forest.fresh.bfloat16()
    assert error(attend(forest, split=64), expected(forest)) < 1e-2


@pytest.mark.long
@pytest.mark.parametrize(("group", "page", "dim"), GRID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_whole_grid(group: int, page: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    forest = grow(seed, group, page, dim)
    forest.kv, forest.q = forest.kv.to(dtype), forest.q.to(dtype)
    forest.fresh = forest.fresh.to(dtype)
    want = expected(forest)
    got = attend(forest, split=128 if seed % 2 else 512)
    assert error(got, want) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("group", [3, 20])
def test_odd_groups_and_dims(group: int) -> None:
    """Groups that fill no block, and one wider than a small block; a head dim of no power of 2."""
    forest = small(group, group, 16, 24)
    assert error(attend(forest, split=64), expected(forest)) < 1e-5


@pytest.mark.parametrize("page", [8, 24, 256])
def test_page_sizes(page: int) -> None:
    forest = small(page, 4, page, 16)
    assert error(attend(forest, split=64), expected(forest)) < 1e-5


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (17, 0.0), (40, 5.0), (0, 5.0)])
def test_windows_and_soft_caps(window: int, softcap: float) -> None:
    """Rows that no window reaches may be gone: they are nan here."""
    forest = small(window, 4, 16, 32)
    forest.window, forest.softcap, forest.scale = window, softcap, 0.3
    if window:
        forest.forget()
    want = expected(forest)
    got = attend(forest, split=64)
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_eight_bit_rows(format: str) -> None:
    """Against float64 over the rows that the codes stand for; free slots and their scales nan."""
    forest = small(5, 4, 16, 64)
    forest.fresh = dequantize(*quantize(forest.fresh, format), format)
    got = attend(forest, split=64, format=format)
    forest.kv = dequantize(*quantize(forest.kv, format), format)
    assert error(got, expected(forest)) < 2e-5


def test_a_trunk_is_read_once() -> None:
    """Eight decodes over 96 rows: one tile of all eight, and eight that go on from its state."""
    pages, dim = list(range(20)), 32
    kv = torch.randn(2 * KV_HEADS, 20 * 16, dim)
    trunk = Span("t", pages[:6], 0, 96)
    works = [Work("s", i, [0], 96, (trunk,), Span(i, [6 + i], 96, 1)) for i in range(8)]
    forest = Forest(
        kv, torch.randn(8, KV_HEADS * 4, dim), torch.randn(8, 2 * KV_HEADS, dim), works, 16, 320
    )
    plan = tile_plan(forest, block=32)
    assert plan.keys_read == 96 + 8
    assert (plan.carried >= 0).sum() == 8
    assert error(attend(forest, plan=plan), expected(forest)) < 1e-5


def test_plans_that_grow() -> None:
    """Two branches decode over page ends and cuts: the grown plan answers like a new one."""
    page, dim, split = 4, 16, 16
    planner = TilePlanner({0: Tiling(page, 2, split=split, block=LEAST, level_cost=0)}, 160)
    kv = torch.full((2 * KV_HEADS, 164, dim), float("nan"))
    kv[:, 121:131] = torch.randn(2 * KV_HEADS, 10, dim)
    trunk = Span("t", [30, 31, 32], 0, 10, 1)
    forest = Forest(kv, torch.empty(0), torch.empty(0), [], page, 160)
    tables: DevicePlan | None = None
    for step in range(19):
        forest.works = []
        for i, offset in enumerate((0, 3)):
            pages = [10 * i + 9 - j for j in range(6)]
            own = (Span(i, pages, 10, step, offset),) if step else ()
            write = Span(i, pages, 10 + step, 1, offset + step)
            forest.works.append(Work("s", i, [0], 10 + step, (trunk, *own), write))
        forest.q = torch.randn(2, 2 * KV_HEADS, dim)
        forest.fresh = torch.randn(2, 2 * KV_HEADS, dim)
        plan = planner.plan(forest.works)[0]
        write_kv(kv, torch.from_numpy(plan.slots), forest.fresh)
        if step in (0, 3, 6, 7, 10, 16, 17, 18):  # begun, over page ends, cuts, made anew
            want = expected(forest)
            assert error(attend(forest, plan=plan), want) < 1e-5, step
        if tables is None or not tables.capacity.holds(Capacity.of(plan)):
            tables = DevicePlan(Capacity.rounded(plan, 4), DEVICE, dump=163)
        tables.load(plan)
        assert tables.slots.tolist() == [*plan.slots.tolist(), 163, 163]
    assert (planner.made, planner.grown) == (2, 17)


def test_merging() -> None:
    torch.manual_seed(0)
    n, heads, dim, slots = 5, 3, 24, 60
    o, lse = torch.randn(slots, heads, dim), torch.randn(slots, heads) * 3
    for empty in (7, 9):
        o[empty], lse[empty] = 0.0, -torch.inf
    parts = torch.randperm(slots)[:40].int()
    parts[:2] = torch.tensor([7, 9])
    begins = torch.tensor([0, 2, 5, 5, 30, 40], dtype=torch.int32)
    leads = torch.tensor([0, 15, 3, 7, 0], dtype=torch.int32)
    out = torch.full((n, heads, dim), 3.0, device=DEVICE)
    merge_parts(out, *(x.to(DEVICE) for x in (o, lse, begins, parts, leads)))
    out = out.cpu()
    assert (out[0] == 0).all(), "empty parts merge to an empty part"
    assert (out[2] == 3).all(), "a row without parts is left alone"
    for i in (1, 3, 4):
        chosen = parts[begins[i] : begins[i + 1]].long()
        weights = lse[chosen].double().softmax(0)
        want = (weights[..., None] * o[chosen].double()).sum(0)
        torch.testing.assert_close(out[i].double(), want, atol=1e-6, rtol=1e-5)
