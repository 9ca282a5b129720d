"""Write fresh K and V rows to their slots: K comes in already rotated, or is rotated on the way."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forkserve.kernels.jit import EXACT, Case, jit, next_power, runs_kernels, tl
from forkserve.kernels.quant import FORMATS, KVRows, coded, quantize
from forkserve.kernels.rope import apply_rope, rotated

__all__ = ["Guard", "rotate_write_kv", "write_kv"]


def write_kv(kv: torch.Tensor, slots: slice | torch.Tensor, fresh: torch.Tensor) -> None:
    """kv [2*Hk, rows, D]; fresh [n, 2*Hk, D] goes to rows `slots` (a slice if consecutive)."""
    rows = fresh.transpose(0, 1)  # [2*Hk, n, D]
    if isinstance(slots, slice):
        kv[:, slots] = rows
    elif rows.dtype == kv.dtype:
        kv.index_copy_(1, slots, rows)
    else:
        kv.index_copy_(1, slots, rows.to(kv.dtype))


class Guard:
    """Refuses writes to rows that may not change: sealed segments, pages that others read.

    For debugging.  sealed [R]: 1 where a row is read-only.  A refused row is not written;
    `refused` then names one such row.
    """

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.sealed = torch.zeros(rows, dtype=torch.uint8, device=device)
        self.fault = torch.full((1,), -1, dtype=torch.int64, device=device)

    def seal(self, rows: torch.Tensor, sealed: bool = True) -> None:
        """Make rows (ids) read-only, or writable again."""
        self.sealed[rows.to(self.sealed.device)] = int(sealed)

    def refused(self) -> int | None:
        """A row that a write was refused for since the last call, or None.  Waits for the GPU."""
        row = int(self.fault)
        self.fault.fill_(-1)
        return row if row >= 0 else None


def rotate_write_kv(
    kv: KVRows,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    guard: Guard | None = None,
) -> None:
    """k, v [n, Hk, D] of positions [n] to rows slots [n] of `kv`, in its format.

    K is normed (if `weight` [D] is given) and rotated by the tables of `rope_table`.  The last two
    axes of k and v must be contiguous.
    """
    if not runs_kernels(kv.rows):
        _write(kv, slots, k, v, positions, cos, sin, weight, eps, guard)
        return
    n, kv_heads, dim = k.shape
    code, top = FORMATS[kv.format]
    rotate_write_kv_kernel[(n, kv_heads)](
        kv.rows,
        kv.scales if kv.scales is not None else cos,
        kv.rows.shape[1],
        slots,
        k,
        v,
        k.stride(0),
        v.stride(0),
        positions,
        cos,
        sin,
        weight if weight is not None else cos,
        eps,
        guard.sealed if guard else slots,
        guard.fault if guard else slots,
        HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=next_power(dim // 2),
        NORM=weight is not None,
        FORMAT=code,
        TOP=top,
        GUARD=guard is not None,
        num_warps=1,
        **EXACT,
    )


def _write(
    kv: KVRows,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    guard: Guard | None,
) -> None:
    """The same with torch operators."""
    k = k.float()
    if weight is not None:
        k = F.rms_norm(k, (k.shape[-1],), weight, eps)
    fresh = torch.cat([apply_rope(k, cos[positions], sin[positions]), v.float()], 1)
    if guard is not None:
        kept = guard.sealed[slots] == 0
        if not kept.all():
            guard.fault[0] = slots[~kept][0]
        slots, fresh = slots[kept], fresh[kept]
    if kv.scales is None:
        write_kv(kv.rows, slots, fresh)
        return
    rows, scales = quantize(fresh, kv.format)
    write_kv(kv.rows, slots, rows)
    kv.scales[:, slots] = scales.T


@jit
def _store(
    low: tl.tensor,
    high: tl.tensor,
    to: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Both halves of a row to pointer `to`, and its scale."""
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    if FORMAT == 0:
        tl.store(to + i, low.to(to.dtype.element_ty), mask=mask)
        tl.store(to + HALF + i, high.to(to.dtype.element_ty), mask=mask)
    else:
        peak = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        factor = TOP / tl.where(peak > 0, peak, TOP)
        tl.store(to + i, coded(low * factor, FORMAT), mask=mask)
        tl.store(to + HALF + i, coded(high * factor, FORMAT), mask=mask)
        tl.store(scale, peak / TOP)


@jit
def rotate_write_kv_kernel(
    kv: tl.tensor,
    scales: tl.tensor,
    rows: int,
    slots: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_row: int,
    v_row: int,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: float,
    sealed: tl.tensor,
    fault: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    TOP: tl.constexpr,
    GUARD: tl.constexpr,
) -> None:
    """K and V of one head of one row.  k_row, v_row: elements from row to row."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    refused = False
    if GUARD:
        refused = tl.load(sealed + slot) != 0
        if refused:
            tl.store(fault, slot)
    if not refused:
        position = tl.load(positions + row)
        source = k + row.to(tl.int64) * k_row + head * 2 * HALF
        low, high = rotated(source, position, cos, sin, weight, eps, HALF, BLOCK, NORM)
        at = head.to(tl.int64) * rows + slot
        _store(low, high, kv + at * 2 * HALF, scales + at, HALF, BLOCK, FORMAT, TOP)
        i = tl.arange(0, BLOCK)
        mask = i < HALF
        source = v + row.to(tl.int64) * v_row + head * 2 * HALF
        low = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + HALF + i, mask=mask, other=0.0).to(tl.float32)
        at += HEADS * tl.cast(rows, tl.int64)
        _store(low, high, kv + at * 2 * HALF, scales + at, HALF, BLOCK, FORMAT, TOP)


_STORED = {"none": "bf16", "int8": "i8", "fp8": "u8"}
CASES = {
    "rotate_write_kv_kernel": [
        Case(
            f"d{2 * half} {kind}"
            + (f" to {format}" if format != "none" else "")
            + (" normed" if norm else "")
            + (" guarded" if guard else ""),
            {
                "kv": f"*{kind}" if format == "none" else f"*{_STORED[format]}",
                "scales": "*fp32",
                "rows": "i32",
                "slots": "*i64",
                "k": f"*{kind}",
                "v": f"*{kind}",
                "k_row": "i32",
                "v_row": "i32",
                "positions": "*i64",
                "cos": "*fp32",
                "sin": "*fp32",
                "weight": "*fp32",
                "eps": "fp32",
                "sealed": "*u8",
                "fault": "*i64",
            },
            {
                "HEADS": 8,
                "HALF": half,
                "BLOCK": half,
                "NORM": norm,
                "FORMAT": FORMATS[format][0],
                "TOP": FORMATS[format][1],
                "GUARD": guard,
            },
            aligned=("rows", "k_row", "v_row"),
            warps=1,
        )
        for half, kind, format, norm, guard in (
            (32, "bf16", "none", False, False),
            (64, "bf16", "none", False, False),
            (64, "bf16", "none", True, True),
            (64, "bf16", "int8", False, False),
            (64, "bf16", "fp8", False, False),
            (64, "fp32", "none", False, False),
        )
    ]
}
