"""KV rows in 8 bits: one float32 scale per row and head, stored beside the row.

A scale belongs to one row, so that rows written later never change those written before, and a
copied or shared page takes its scales along.  ``int8``: x / scale rounded, scale = max|x| / 127.
``fp8``: OCP e4m3 (no infinities), scale = max|x| / 448, coded by integer arithmetic, because not
every GPU that Triton serves can convert to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from forkserve.kernels.jit import jit, tl

__all__ = ["FORMATS", "KVRows", "dequantize", "quantize"]

# Code of a format in the kernels, and the largest magnitude that it holds.
FORMATS = {"none": (0, 0.0), "int8": (1, 127.0), "fp8": (2, 448.0)}


class KVRows(NamedTuple):
    """KV of one layer.  rows [2*Hk, R, D], K heads first; scales [2*Hk, R] float32 or None.

    format: "none" (the model's dtype), "int8" (int8 rows) or "fp8" (uint8 rows).
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    format: str = "none"


def quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (coded rows like x, scales [...])."""
    top = FORMATS[format][1]
    x = x.float()
    peak = x.abs().amax(-1)
    y = x * (top / torch.where(peak > 0, peak, top))[..., None]
    if format == "int8":
        coded = torch.floor(y + 0.5).clamp_(-127, 127).to(torch.int8)
    else:
        coded = y.clamp_(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)
    return coded, peak / top


def dequantize(rows: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """The inverse of `quantize`, in float32."""
    values = rows.float() if format == "int8" else rows.view(torch.float8_e4m3fn).float()
    return values * scales[..., None]


@jit
def coded(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """A row in float32, already divided by its scale -> the stored integer.

    e4m3 is float32 with 3 bits of mantissa and 4 of exponent, the bias 120 lower: scaled by 2^-120
    the value has the wanted bits on top, after rounding to even at bit 20.
    """
    if FORMAT == 1:
        code = tl.minimum(tl.maximum(tl.floor(x + 0.5), -127.0), 127.0).to(tl.int8)
    else:
        small = (tl.abs(x) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2 ** -120
        rounded = (small + 0x7FFFF + ((small >> 20) & 1)) >> 20
        rounded = tl.minimum(rounded, 0x7E)
        code = tl.where(x < 0, rounded | 0x80, rounded).to(tl.uint8)
    return code


@jit
def value(stored: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """The stored integer -> float32, to be multiplied by its scale."""
    if FORMAT == 1:
        result = stored.to(tl.float32)
    else:
        bits = stored.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        result = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return result
