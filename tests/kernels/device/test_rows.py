"""Copying and writing KV rows: against torch, with free slots untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forkserve.kernels import write_kv as module
from forkserve.kernels.copy_rows import copy_rows, waves
from forkserve.kernels.quant import KVRows, dequantize
from forkserve.kernels.rope import rope_table
from forkserve.kernels.write_kv import Guard, rotate_write_kv
from forkserve.types import RowCopy

from .rig import DEVICE

STORED = {"none": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}
SLOTS = [9, 1, 30, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [64, 23, 1])
def test_copies_run_in_order(dtype: torch.dtype, dim: int) -> None:
    kv = torch.randint(-100, 100, (2, 4, 16 * 8, dim)).to(dtype)
    copies = [
        RowCopy(2, 0, 7, 3, 2),
        RowCopy(2, 2, 7, 5, 1),
        RowCopy(7, 3, 1, 0, 3),
        RowCopy(3, 1, 4, 1, 15),
    ]
    want = kv.clone()
    for c in copies:
        src, dst = c.src_page * 16 + c.src_row, c.dst_page * 16 + c.dst_row
        want[:, :, dst : dst + c.rows] = want[:, :, src : src + c.rows]
    got = kv.to(DEVICE)
    copy_rows(got, copies, 16)
    assert torch.equal(got.cpu(), want)


def test_copies_that_touch_each_other_wait() -> None:
    a, b, c, d = (
        RowCopy(0, 0, 1, 0, 4),
        RowCopy(0, 4, 2, 0, 4),
        RowCopy(1, 0, 3, 0, 4),
        RowCopy(5, 0, 1, 4, 4),
    )
    assert waves([a, b, c, d]) == [[a, b], [c], [d]]
    assert waves([a, b]) == [[a, b]]


def write(format: str, weight: torch.Tensor | None, guard: Guard | None = None) -> KVRows:
    """Five rows of two heads of 24 into a pool of 40; free slots hold 7."""
    torch.manual_seed(1)
    heads, dim = 2, 24
    cos, sin = rope_table(1 / 10000 ** (torch.arange(0, dim, 2) / dim), 0, 64)
    qkv = torch.randn(5, 4 + 2 * heads, dim, dtype=torch.bfloat16)
    qkv[1, 6] = 0.0  # a head that is all zero has no scale to divide by
    rows = torch.full((2 * heads, 40, dim), 7.0).to(STORED[format])
    scales = None if format == "none" else torch.full((2 * heads, 40), 7.0)
    kv = KVRows(rows.to(DEVICE), None if scales is None else scales.to(DEVICE), format)
    at = torch.tensor(SLOTS, device=DEVICE), torch.tensor([3, 0, 63, 7, 8], device=DEVICE)
    k, v, cos, sin = (x.to(DEVICE) for x in (qkv[:, 4:6], qkv[:, 6:], cos, sin))
    norm = None if weight is None else weight.to(DEVICE)
    rotate_write_kv(kv, at[0], k, v, at[1], cos, sin, norm, 1e-5, guard)
    return kv


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "runs_kernels", lambda _: False)
            return call()

    return run


@pytest.mark.parametrize("format", ["none", "int8", "fp8"])
@pytest.mark.parametrize("normed", [False, True])
def test_rotated_writes(format: str, normed: bool, by_torch: Callable[..., Any]) -> None:
    weight = torch.linspace(0.5, 1.5, 24) if normed else None
    got, want = write(format, weight), by_torch(lambda: write(format, weight))
    free = [slot for slot in range(40) if slot not in SLOTS]
    assert (got.rows[:, free].float() == 7).all()
    if format == "none":
        torch.testing.assert_close(got.rows, want.rows, atol=2e-2, rtol=1e-2)
        return
    assert got.scales is not None
    assert (got.scales[:, free] == 7).all()
    torch.testing.assert_close(got.scales, want.scales)
    a, b = (dequantize(kv.rows[:, SLOTS], kv.scales[:, SLOTS], format) for kv in (got, want))
    # Where rounding differs by one code: 1/254 of the largest value, or 1/16 of the value.
    assert ((a - b).abs() <= want.scales[:, SLOTS, None] * 1.001 + b.abs() / 15).all()
    assert (got.rows == want.rows).float().mean() > 0.99


@pytest.mark.parametrize("format", ["none", "int8"])
def test_guard_refuses_sealed_rows(format: str) -> None:
    guard = Guard(40, DEVICE)
    assert guard.refused() is None
    guard.seal(torch.tensor([30, 2]))
    kv = write(format, None, guard)
    assert guard.refused() == 30
    assert guard.refused() is None, "reported once"
    assert (kv.rows[:, [30, 2]].float() == 7).all(), "a sealed row is not written"
    assert not (kv.rows[:, [9, 1, 4, 5]].float() == 7).all(2).any()
    guard.seal(torch.tensor([30]), False)
    write(format, None, guard)
    assert guard.refused() is None
