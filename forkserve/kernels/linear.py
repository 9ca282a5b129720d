"""Linear layers: y = x w^T + bias, with one order of summation for each output.

An output starts at zero and takes its products in ascending order of k, in steps of the matrix
instruction, whatever the number of rows and the shape of a tile; there is no split of k.  Every
shape uses one instruction: m16n8k16 of `mma.sync` on NVIDIA, 16x16x16 on AMD, fused
multiply-adds for float32.  (A larger one, such as Hopper's `wgmma`, is faster on a long prompt, but
nobody promises that it rounds like the small one that a single row takes.)  So a row's result does
not depend on which other rows share the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from forkserve.kernels.jit import (
    EXACT_DOT,
    INTERPRETED,
    Case,
    ceil_div,
    jit_for_any,
    runs_kernels,
    tl,
)

__all__ = ["CODED_BLOCK", "LinearShape", "Weight", "code_weight", "linear"]

CODED_BLOCK = 128  # weights of an output that share a scale


class Weight(NamedTuple):
    """values [N, K], one row an output: float32, bfloat16, float16, or int8 with scales.

    scales: bfloat16 [N, K / CODED_BLOCK, rounded up], or None; a weight is integer * scale.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None


def code_weight(weight: torch.Tensor) -> Weight:
    """weight [N, K] in integers of -127..127, a bfloat16 scale for every CODED_BLOCK of a row."""
    n, k = weight.shape
    blocks = ceil_div(k, CODED_BLOCK)
    padded = torch.zeros(n, blocks * CODED_BLOCK, dtype=torch.float32, device=weight.device)
    padded[:, :k] = weight
    parts = padded.view(n, blocks, CODED_BLOCK)
    scales = (parts.abs().amax(2) / 127).to(torch.bfloat16)
    steps = torch.where(scales > 0, scales, 1.0).float()
    codes = (parts / steps[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(codes.view(n, -1)[:, :k].contiguous(), scales)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """How a tile is computed: rows, outputs, warps, and steps whose loads are in flight.

    No bit of a result depends on it.
    """

    rows: int
    outs: int
    warps: int
    stages: int

    @classmethod
    def of(
        cls,
        rows: int,
        outs: int,
        itemsize: int,
        *,
        coded: bool = False,
        tight: bool = False,
        hip: bool = False,
    ) -> LinearShape:
        """For `rows` rows of x, of `itemsize` bytes, and `outs` outputs.

        coded: 8-bit weights; tight: a bias, or float32 from 16-bit numbers, take more registers.

        Few rows: all of them in one tile, and tiles so narrow that 2,048 outputs keep 128
        multiprocessors reading weights, 32 KB each on the way.  Many: two warps, since four would
        take another instruction on Hopper, and several tiles at a time in a multiprocessor.  None
        spills registers (`python -m forkserve.kernels.compile`).
        """
        if itemsize == 4:
            return cls(16, 32, 4, 3) if rows <= 16 else cls(32, 64, 8, 2)
        deep = 1 if coded else 2  # a step of coded weights has twice the inputs
        if rows <= 16:
            narrow = outs < 4096
            return cls(16, 16 if narrow else 32, 2 if narrow else 4, 2 if hip else 5 * deep - 1)
        if rows <= 32:
            return cls(32, 64, 4, 2 if hip else 2 + 2 * deep)
        wide = 64 if coded or tight else 128
        return cls(64, wide, 4, 2) if hip else cls(64, wide, 2, 2 + deep)


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: LinearShape | None = None,
) -> torch.Tensor:
    """x [m, K], contiguous in K -> [m, N] in `dtype` (that of x if None), summed in float32.

    x is of the weights' dtype, of a 16-bit one for coded weights.  bias [N] is added in float32.
    shape: by default `LinearShape.of`.
    """
    m, k = x.shape
    outs = weight.values.shape[0]
    dtype = dtype or x.dtype
    if not runs_kernels(x):
        return _linear(x, weight, bias, dtype)
    coded = weight.scales is not None
    hip = torch.version.hip is not None
    step = _step(x.element_size(), coded)
    tight = bias is not None or dtype.itemsize > x.element_size()
    at = shape or LinearShape.of(m, outs, x.element_size(), coded=coded, tight=tight, hip=hip)
    out = torch.empty(m, outs, dtype=dtype, device=x.device)
    linear_kernel[(ceil_div(m, at.rows), ceil_div(outs, at.outs))](
        out,
        x,
        x.stride(0),
        weight.values,
        weight.scales if coded else weight.values,
        bias if bias is not None else weight.values,
        m,
        outs,
        k,
        BLOCK_M=at.rows,
        BLOCK_N=at.outs,
        BLOCK_K=step,
        BIAS=bias is not None,
        CODED=coded,
        EVEN=k % step == 0,
        WIDE=max(outs * k, m * x.stride(0)) >= 1 << 31,
        UPCAST=INTERPRETED,
        num_warps=at.warps,
        num_stages=at.stages,
        **EXACT_DOT,
    )
    return out


def _step(itemsize: int, coded: bool) -> int:
    """Inputs of one step, for x of `itemsize` bytes."""
    if coded:
        return CODED_BLOCK
    return 64 if itemsize == 2 else 32


def _linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The same with torch operators."""
    values = weight.values.float()
    if weight.scales is not None:
        steps = weight.scales.float().repeat_interleave(CODED_BLOCK, 1)
        values = values * steps[:, : values.shape[1]]
    y = x.float() @ values.T
    return (y if bias is None else y + bias.float()).to(dtype)


@jit_for_any("rows")
def linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_row: int,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    rows: int,
    outs: int,
    inputs: int,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    CODED: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_M rows; neighbours in the grid share the weights.

    EVEN: inputs fill the steps.  WIDE: offsets within the weights or within x need 64 bits.
    UPCAST: products in float32, because those of bfloat16 are wrong in the interpreter.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Lines past the end repeat the last one and are not stored: a load without a mask is cheaper.
    row = tl.minimum(m, rows - 1)
    line = tl.minimum(n, outs - 1)
    if WIDE:
        row = row.to(tl.int64)
        line = line.to(tl.int64)
    x_at = row[:, None] * x_row + k[None, :]
    w_at = line[None, :] * inputs + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for low in range(0, inputs, BLOCK_K):
        if EVEN:
            a = tl.load(x + low + x_at)
            w = tl.load(weight + low + w_at)
        else:
            inside = k < inputs - low
            a = tl.load(x + low + x_at, mask=inside[None, :], other=0.0)
            w = tl.load(weight + low + w_at, mask=inside[:, None], other=0)
        if UPCAST:
            a = a.to(tl.float32)
        w = w.to(a.dtype)
        if CODED:  # integers are exact in 16 bits; their sum is scaled in float32
            scale = tl.load(scales + line * tl.cdiv(inputs, BLOCK_K) + low // BLOCK_K)
            scale = scale.to(tl.float32)
            acc += tl.dot(a, w, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(a, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + line).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * outs + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


def _cases() -> list[Case]:
    """Decoding, a few branches, a prompt; by what the weights and results are."""
    found = []
    for kind, to, bias in (
        ("bf16", "bf16", False),
        ("bf16", "bf16", True),
        ("fp16", "fp16", False),
        ("fp32", "fp32", False),
        ("i8", "bf16", False),
        ("bf16", "fp32", False),
    ):
        for rows, outs in ((16, 2048), (16, 4096), (32, 4096), (2048, 4096)):
            for hip in (False, True):
                x = "bf16" if kind == "i8" else kind
                size = 4 if x == "fp32" else 2
                shape = LinearShape.of(
                    rows, outs, size, coded=kind == "i8", tight=bias or to == "fp32" != x, hip=hip
                )
                case = Case(
                    f"{rows}x{outs} {kind}"
                    + (f" to {to}" if to != x else "")
                    + (" bias" if bias else ""),
                    {
                        "out": f"*{to}",
                        "x": f"*{x}",
                        "x_row": "i32",
                        "weight": f"*{kind}",
                        "scales": "*bf16",
                        "bias": f"*{x}",
                        "rows": "i32",
                        "outs": "i32",
                        "inputs": "i32",
                    },
                    {
                        "BLOCK_M": shape.rows,
                        "BLOCK_N": shape.outs,
                        "BLOCK_K": _step(size, kind == "i8"),
                        "BIAS": bias,
                        "CODED": kind == "i8",
                        "EVEN": True,
                        "WIDE": False,
                        "UPCAST": False,
                    },
                    aligned=("x_row", "outs", "inputs"),
                    warps=shape.warps,
                    stages=shape.stages,
                    targets=("gfx942",) if hip else ("sm_80", "sm_90"),
                )
                found.append(case)
    return found


CASES = {"linear_kernel": _cases()}
