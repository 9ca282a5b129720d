"""Products: against float64, and the same bits in every shape of a tile."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from forkserve.kernels.jit import INTERPRETED
from forkserve.kernels.linear import CODED_BLOCK, LinearShape, Weight, code_weight, linear

from .rig import DEVICE

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
KINDS = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3, "int8": 1e-2}
SHAPES = [
    LinearShape(16, 16, 2, 5),
    LinearShape(16, 32, 4, 5),
    LinearShape(32, 64, 4, 4),
    LinearShape(64, 128, 2, 3),
]


def problem(kind: str, m: int, n: int, k: int) -> tuple[torch.Tensor, Weight, torch.Tensor]:
    """x [m, k] on the device, weights, and what the product is in float64 (on the CPU)."""
    torch.manual_seed(m + n + k)
    dtype = torch.bfloat16 if kind == "int8" else getattr(torch, kind)
    x, full = torch.randn(m, k).to(dtype), torch.randn(n, k)
    if kind == "int8":
        weight = code_weight(full)
        assert weight.scales is not None
        steps = weight.scales.double().repeat_interleave(CODED_BLOCK, 1)[:, :k]
        values = weight.values.double() * steps
        weight = Weight(weight.values.to(DEVICE), weight.scales.to(DEVICE))
    else:
        weight = Weight(full.to(dtype).to(DEVICE))
        values = full.to(dtype).double()
    return x.to(DEVICE), weight, x.double() @ values.T


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 40, 200), (40, 130, 256)])
def test_products(kind: str, m: int, n: int, k: int) -> None:
    x, weight, want = problem(kind, m, n, k)
    assert distance(linear(x, weight), want) < KINDS[kind]
    whole = linear(x, weight, dtype=torch.float32)
    assert whole.dtype == torch.float32
    # Tensor cores cut off what float32 does not hold, and do not round it.
    assert distance(whole, want) < (1e-6 if kind == "float32" else 4e-6)


def test_bias_and_strides() -> None:
    x, weight, want = problem("float32", 4, 33, 40)
    bias = torch.randn(33)
    wide = torch.cat([x, x + 1], 1)[:, :40]
    got = linear(wide, weight, bias.to(DEVICE))
    assert distance(got, want + bias.double()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_and_every_row_count_gives_the_same_bits(kind: str) -> None:
    """70 rows at once in each shape, and rows of them alone and in other places of a tile."""
    x, weight, _ = problem(kind, 70, 70, 300)
    want = linear(x, weight, dtype=torch.float32, shape=SHAPES[0])
    for shape in SHAPES[1:]:
        assert torch.equal(linear(x, weight, dtype=torch.float32, shape=shape), want)
    for low, high in ((0, 1), (3, 4), (9, 41), (69, 70)):
        got = linear(x[low:high].clone(), weight, dtype=torch.float32)
        assert torch.equal(got, want[low:high])


def test_rows_further_apart_than_32_bits_count() -> None:
    """x of 2^31 elements and more, of which hardly a page is touched."""
    rows, apart, k = 3, 1 << 30, 64
    if INTERPRETED:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        area = mmap.mmap(-1, 2 * ((rows - 1) * apart + k), flags=flags)
        wide = torch.frombuffer(area, dtype=torch.bfloat16)
    else:
        wide = torch.empty((rows - 1) * apart + k, dtype=torch.bfloat16, device=DEVICE)
    x, weight, want = problem("bfloat16", rows, 16, k)
    far = wide.as_strided((rows, k), (apart, 1))
    far.copy_(x)
    assert distance(linear(far, weight), want) < KINDS["bfloat16"]


def test_codes() -> None:
    """As on the CPU but for the block: integers to nearest, a bfloat16 scale, zero blocks kept."""
    torch.manual_seed(0)
    full = torch.randn(3, 300)
    full[1, :CODED_BLOCK] = 0.0
    codes, scales = code_weight(full)
    assert scales is not None
    assert codes.shape == (3, 300)
    assert scales.shape == (3, 3)
    assert scales[1, 0] == 0
    back = codes.float() * scales.float().repeat_interleave(CODED_BLOCK, 1)[:, :300]
    steps = scales.float().repeat_interleave(CODED_BLOCK, 1)[:, :300]
    assert ((back - full).abs() <= steps * 0.5 + full.abs() / 250).all()
    assert int(codes.abs().max()) == 127
