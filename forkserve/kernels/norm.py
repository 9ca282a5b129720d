"""RMS norm, fused with the residual sum before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forkserve.kernels.jit import EXACT, Case, jit, next_power, runs_kernels, tl

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    delta: torch.Tensor | None = None,
    delta_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, E] float32 += delta, in place; returns rms_norm(x) * weight in `dtype`.

    delta_weight: delta is itself normed with it before it is added.  Weights [E] are float32.
    """
    n, width = x.shape
    if not runs_kernels(x):
        if delta is not None:
            delta = delta.float()
            if delta_weight is not None:
                delta = F.rms_norm(delta, (width,), delta_weight, eps)
            x += delta
        return F.rms_norm(x, (width,), weight, eps).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    block = next_power(width)
    add_rms_norm_kernel[(n,)](
        out,
        x,
        weight,
        x if delta is None else delta,
        weight if delta_weight is None else delta_weight,
        width,
        eps,
        BLOCK=block,
        ADD=delta is not None,
        NORM=delta_weight is not None,
        num_warps=_warps(block),
        **EXACT,
    )
    return out


def _warps(block: int) -> int:
    """Eight elements a thread, within 1 to 8 warps."""
    return min(max(block // 256, 1), 8)


@jit
def add_rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    delta: tl.tensor,
    delta_weight: tl.tensor,
    width: int,
    eps: float,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """One row, held in registers."""
    i = tl.arange(0, BLOCK)
    mask = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    value = tl.load(x + at, mask=mask, other=0.0)
    if ADD:
        more = tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(more * more, 0) / width + eps)
            more = more * scale * tl.load(delta_weight + i, mask=mask, other=0.0)
        value += more
        tl.store(x + at, value, mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value = value * scale * tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


CASES = {
    "add_rms_norm_kernel": [
        Case(
            f"e{width} {kind}" + (" added" if add else "") + (" normed" if norm else ""),
            {
                "out": f"*{kind}",
                "x": "*fp32",
                "weight": "*fp32",
                "delta": f"*{kind}",
                "delta_weight": "*fp32",
                "width": "i32",
                "eps": "fp32",
            },
            {"BLOCK": next_power(width), "ADD": add, "NORM": norm},
            aligned=("width",),
            warps=_warps(next_power(width)),
        )
        for width, kind, add, norm in (
            (576, "bf16", True, False),
            (4096, "bf16", True, False),
            (4096, "bf16", True, True),
            (4096, "fp32", False, False),
            (8192, "bf16", True, False),
        )
    ]
}
