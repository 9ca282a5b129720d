"""Rotary position embedding, rotate-half layout; on a GPU fused with the norm of a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forkserve.kernels.jit import EXACT, Case, jit, next_power, runs_kernels, tl

__all__ = ["apply_rope", "norm_rope", "rope_table"]


def rope_table(
    inv_freq: torch.Tensor, begin: int, end: int, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of positions [begin, end), each [end - begin, 1, 2 * len(inv_freq)].

    float32, times `magnitude`.

    The sign of the first half is folded into sin, so that rotating needs one swap of halves.
    """
    angle = torch.outer(torch.arange(begin, end, dtype=torch.float32), inv_freq)
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    return torch.cat([cos, cos], 1)[:, None], torch.cat([-sin, sin], 1)[:, None]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, heads, D] by cos, sin [n, 1, D]; a new tensor."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos).addcmul_(swapped, sin)


def norm_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm (if `weight` [D] is given) and rotate x [n, heads, D]; a new tensor of its dtype.

    positions [n]; cos and sin are tables of `rope_table`.  Computed in float32.  The last two axes
    of x must be contiguous.
    """
    n, heads, dim = x.shape
    if not runs_kernels(x):
        y = x.float()
        if weight is not None:
            y = F.rms_norm(y, (dim,), weight, eps)
        return apply_rope(y, cos[positions], sin[positions]).to(x.dtype)
    out = x.new_empty(x.shape)
    norm_rope_kernel[(n, heads)](
        out,
        x,
        x.stride(0),
        positions,
        cos,
        sin,
        weight if weight is not None else cos,
        eps,
        heads,
        HALF=dim // 2,
        BLOCK=next_power(dim // 2),
        NORM=weight is not None,
        num_warps=1,
        **EXACT,
    )
    return out


@jit
def rotated(
    x: tl.tensor,
    position: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Both halves [BLOCK] of the head at pointer x, normed and rotated, in float32."""
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    low = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + HALF + i, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(low * low, 0) + tl.sum(high * high, 0)
        factor = 1.0 / tl.sqrt(square / (2 * HALF) + eps)
        low = low * factor * tl.load(weight + i, mask=mask, other=0.0)
        high = high * factor * tl.load(weight + HALF + i, mask=mask, other=0.0)
    at = position.to(tl.int64) * (2 * HALF) + i
    c = tl.load(cos + at, mask=mask, other=0.0)
    s = tl.load(sin + at + HALF, mask=mask, other=0.0)
    return low * c - high * s, high * c + low * s


@jit
def norm_rope_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_row: int,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: float,
    heads: int,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """One head of one row.  x_row: elements from row to row."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    source = x + row.to(tl.int64) * x_row + head * 2 * HALF
    position = tl.load(positions + row)
    low, high = rotated(source, position, cos, sin, weight, eps, HALF, BLOCK, NORM)
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    to = out + (row.to(tl.int64) * heads + head) * 2 * HALF + i
    tl.store(to, low.to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=mask)


_TYPES = {
    "x_row": "i32",
    "positions": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    "weight": "*fp32",
    "eps": "fp32",
    "heads": "i32",
}
CASES = {
    "norm_rope_kernel": [
        Case(
            f"d{2 * half} {kind}" + (" normed" if norm else ""),
            {"out": f"*{kind}", "x": f"*{kind}", **_TYPES},
            {"HALF": half, "BLOCK": half, "NORM": norm},
            aligned=("x_row",),
            warps=1,
        )
        for half, kind, norm in (
            (32, "bf16", False),
            (64, "bf16", False),
            (64, "bf16", True),
            (64, "fp32", False),
        )
    ]
}
