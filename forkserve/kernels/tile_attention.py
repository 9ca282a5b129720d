"""Segment attention as a Triton kernel, over the tiles of a `forkserve.kernels.tiles.TilePlan`.

A program takes one tile of query rows, with the query heads of one KV head stacked as further
lines, and walks the keys of the tile's piece, a block of positions a step.
`forkserve.kernels.segment_attention` is the same operator in torch.

A row's bits depend on its query and on the keys before it alone: blocks have fixed positions; a
product is the same matrix instruction in every shape of a tile, and adds up in ascending order;
the sum of the weights is such a product too, by ones; a maximum has no order; keys that a row does
not see, and empty parts, add zeros.  So there is no sum across the lanes of a processor, whose
order would be that of the shape.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from forkserve.kernels.jit import EXACT_DOT, INTERPRETED, Case, jit, jit_for_any, next_power, tl
from forkserve.kernels.merge import merge_parts
from forkserve.kernels.pieces import BLOCK, LARGE, SMALL, block_rows
from forkserve.kernels.quant import FORMATS, KVRows, value
from forkserve.kernels.tile_plans import DevicePlan

__all__ = ["Partials", "TileShape", "attend_tiles"]


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a tile is computed: warps, and steps whose loads are in flight.  No bit depends on it."""

    warps: int
    stages: int

    @classmethod
    def of(cls, dim: int, itemsize: int, large: bool, *, hip: bool) -> TileShape:
        """For heads of `dim` elements of `itemsize` bytes.

        Chosen by the compiler's report: no registers spilled, and two or three tiles at a time in
        the shared memory of an SM, 32 KB each on the way (`python -m forkserve.kernels.compile`).
        """
        row = next_power(dim) * itemsize
        if hip:  # 64 KB of shared memory, 512 registers
            return cls(4, 2 if row <= 256 else 1)
        if itemsize == 4:  # products without tensor cores
            return cls(16 if large and row >= 256 else 8, 2 if row <= 256 else 1)
        return cls(4, (3 if large else 4) - (row > 256))


class Partials:
    """Scratch for results of a row in a tile: o [results, H, D], lse and top [results, H], float32.

    A part is a value and its log-sum-exp; a state is a sum of weighted values, the sum of weights
    (in `lse`) and the largest score.  out: where results go, if not to a new tensor each time.
    Rows without tiles keep what it holds.
    """

    def __init__(
        self,
        results: int,
        heads: int,
        dim: int,
        device: torch.device | str,
        out: torch.Tensor | None = None,
    ) -> None:
        self.out = out
        self.o = torch.empty(results, heads, dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(results, heads, dtype=torch.float32, device=device)
        self.top = torch.empty(results, heads, dtype=torch.float32, device=device)


def attend_tiles(
    q: torch.Tensor,
    kv: KVRows,
    plan: DevicePlan,
    partials: Partials,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    shapes: tuple[TileShape, TileShape] | None = None,
) -> torch.Tensor:
    """q [n, H, D] rotated, fresh rows of `kv` written -> [n, H, D] of q's dtype.

    Rows that the plan does not name are not written.  The last two axes of q must be contiguous.
    shapes: of small and large tiles, by default `TileShape.of`.
    """
    n, heads, dim = q.shape
    group = heads // (kv.rows.shape[0] // 2)
    out = partials.out
    if out is None:
        out = torch.empty(n, heads, dim, dtype=q.dtype, device=q.device)
    code = FORMATS[kv.format][0]
    hip = torch.version.hip is not None
    chosen = shapes or tuple(
        TileShape.of(dim, q.element_size(), large, hip=hip) for large in (False, True)
    )
    for level, large, first, count in plan.launches():
        shape = chosen[large]
        attend_kernel[(count, heads // group)](
            q,
            q.stride(0),
            kv.rows,
            kv.scales if kv.scales is not None else partials.lse,
            kv.rows.shape[1],
            out,
            partials.o,
            partials.lse,
            partials.top,
            plan.tiles,
            first,
            plan.rows,
            plan.carried,
            plan.positions,
            plan.keys,
            scale,
            softcap,
            window,
            HEADS=heads,
            GROUP=group,
            BLOCK_M=block_rows(group, LARGE if large else SMALL),
            BLOCK_N=plan.capacity.block,
            D=next_power(dim),
            HEAD_DIM=dim,
            FORMAT=code,
            SOFTCAP=softcap > 0,
            WINDOW=window > 0,
            CARRIED=level > 0,
            WIDE=kv.rows.shape[1] * dim >= 1 << 31,
            UPCAST=INTERPRETED,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **EXACT_DOT,
        )
    merge_parts(out, partials.o, partials.lse, plan.begins, plan.parts, plan.leads)
    return out


@jit
def _listed(
    keys: tl.tensor,
    at: tl.tensor,
    low: tl.tensor,
    end: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """KV rows of the keys at positions `at`; row 0 outside [low, end)."""
    row = tl.load(keys + at - low, mask=(at >= low) & (at < end), other=0)
    if WIDE:
        row = row.to(tl.int64)
    return row


@jit_for_any("first")
def attend_kernel(
    q: tl.tensor,
    q_row: int,
    kv: tl.tensor,
    scales: tl.tensor,
    kv_rows: int,
    out: tl.tensor,
    part_o: tl.tensor,
    part_lse: tl.tensor,
    part_top: tl.tensor,
    tiles: tl.tensor,
    first: int,
    rows: tl.tensor,
    carried: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CARRIED: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One tile under one KV head.  Line m of the block is head m % GROUP of row m // GROUP.

    first: the first tile of this launch.  CARRIED: rows go on from states of tiles that have run.
    WIDE: offsets within a head need 64 bits.  UPCAST: products in float32, because those of
    bfloat16 are wrong in the interpreter.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tiles + (first + tl.program_id(0)) * 6
    head = tl.program_id(1)
    low = tl.load(tile + 1)
    end = tl.load(tile + 2)
    listed = keys + tl.load(tile)
    slot = tl.load(tile + 3)
    count = tl.load(tile + 4)
    kind = tl.load(tile + 5)

    line = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    ones = tl.arange(0, 16)
    member = line // GROUP
    there = member < count
    row = tl.load(rows + slot + member, mask=there, other=0)
    position = tl.load(positions + row, mask=there, other=-1).to(tl.int32)
    heads = head * GROUP + line % GROUP
    line_at = row.to(tl.int64) * q_row + heads * HEAD_DIM
    width = (d < HEAD_DIM)[None, :]
    inside = there[:, None] & width
    query = tl.load(q + line_at[:, None] + d[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    head_at = head.to(tl.int64) * kv_rows
    value_at = head_at + tl.cast(kv_rows, tl.int64) * (HEADS // GROUP)
    k_base = kv + head_at * HEAD_DIM
    v_base = kv + value_at * HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)  # the same in each column
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    if CARRIED:
        state = tl.load(carried + slot + member, mask=there, other=-1)
        begun = state >= 0
        state_at = state.to(tl.int64) * HEADS + heads
        top = tl.load(part_top + state_at, mask=begun, other=float("-inf"))
        sums = part_lse + state_at[:, None] + ones[None, :] * 0
        total = tl.load(sums, mask=begun[:, None], other=0.0)
        values = part_o + state_at[:, None] * HEAD_DIM + d[None, :]
        acc = tl.load(values, mask=begun[:, None] & width, other=0.0)

    base = low // BLOCK_N * BLOCK_N
    # Rows of the pool are looked up a step ahead, so that the loads of K and V can be pipelined.
    where = _listed(listed, base + tl.arange(0, BLOCK_N), low, end, WIDE)
    for step in range(base, end, BLOCK_N):
        at = step + tl.arange(0, BLOCK_N)
        valid = (at >= low) & (at < end)
        k_mask = valid[None, :] & (d < HEAD_DIM)[:, None]
        k_from = k_base + where[None, :] * HEAD_DIM + d[:, None]
        v_mask = valid[:, None] & width
        v_from = v_base + where[:, None] * HEAD_DIM + d[None, :]
        if FORMAT == 0:
            k = tl.load(k_from, mask=k_mask, other=0.0)
            v = tl.load(v_from, mask=v_mask, other=0.0)
        else:
            k = value(tl.load(k_from, mask=k_mask, other=0), FORMAT)
            v = value(tl.load(v_from, mask=v_mask, other=0), FORMAT)
        k = k.to(query.dtype)
        v = v.to(query.dtype)

        score = tl.dot(query, k, input_precision="ieee") * scale
        if FORMAT != 0:
            score *= tl.load(scales + head_at + where, mask=valid, other=0.0)[None, :]
        if SOFTCAP:  # softcap * tanh(score / softcap)
            fade = tl.exp(-2.0 * tl.abs(score) / softcap)
            tanh = (1.0 - fade) / (1.0 + fade)
            score = softcap * tl.where(score < 0, -tanh, tanh)
        seen = valid[None, :] & (at[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        score = tl.where(seen, score * LOG2E, float("-inf"))

        new = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf minus -inf would be nan
        weight = tl.exp2(score - shift[:, None])
        old = tl.exp2(top - shift)
        ones_of = tl.full([BLOCK_N, 16], 1.0, v.dtype)
        total = tl.dot(weight.to(v.dtype), ones_of, total * old[:, None], input_precision="ieee")
        if FORMAT != 0:
            weight *= tl.load(scales + value_at + where, mask=valid, other=0.0)[None, :]
        acc = tl.dot(weight.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        top = new
        where = _listed(listed, at + BLOCK_N, low, end, WIDE)

    total = tl.max(total, 1)
    line_at = (slot + member).to(tl.int64) * HEADS + heads
    part = part_o + line_at[:, None] * HEAD_DIM + d[None, :]
    if kind == 2:
        tl.store(part_lse + line_at, total, mask=there)
        tl.store(part_top + line_at, top, mask=there)
        tl.store(part, acc, mask=inside)
    else:
        empty = total == 0.0
        safe = tl.where(empty, 1.0, total)
        result = acc / safe[:, None]
        partly = member < tl.where(kind == 0, count, 0)
        lse = tl.where(empty, float("-inf"), top / LOG2E + tl.log(safe))
        tl.store(part_lse + line_at, lse, mask=partly)
        tl.store(part, result, mask=partly[:, None] & width)
        out_at = row.to(tl.int64) * HEADS + heads
        whole = out + out_at[:, None] * HEAD_DIM + d[None, :]
        wholly = member < tl.where(kind == 1, count, 0)
        tl.store(whole, result.to(out.dtype.element_ty), mask=wholly[:, None] & width)


_POINTERS = {
    "part_o": "fp32",
    "part_lse": "fp32",
    "part_top": "fp32",
    "scales": "fp32",
    "tiles": "i32",
    "rows": "i32",
    "carried": "i32",
    "positions": "i64",
    "keys": "i32",
}
_SCALARS = {"q_row": "i32", "kv_rows": "i32", "first": "i32", "window": "i32"}
_SCALARS |= {"scale": "fp32", "softcap": "fp32"}


def _cases(
    dim: int,
    group: int,
    kind: str = "bf16",
    format: str = "none",
    *,
    gemma: bool = False,
    carried: bool = False,
) -> list[Case]:
    """Small and large tiles of one model's heads.  gemma: with soft caps and windows."""
    found = []
    for hip, large in itertools.product((False, True), (False, True)):
        size = 4 if kind == "fp32" else 2
        shape = TileShape.of(dim, size, large, hip=hip)
        pointers = {"q": kind, "kv": kind, "out": kind, **_POINTERS}
        if format != "none":
            pointers["kv"] = {"int8": "i8", "fp8": "u8"}[format]
        words = [f"d{dim} g{group} {kind}", "large" if large else "small"]
        words += [format] if format != "none" else []
        words += ["cap window"] if gemma else []
        words += ["carried"] if carried else []
        case = Case(
            " ".join(words),
            {**{name: f"*{type}" for name, type in pointers.items()}, **_SCALARS},
            {
                "HEADS": 8 * group,
                "GROUP": group,
                "BLOCK_M": block_rows(group, LARGE if large else SMALL),
                "BLOCK_N": BLOCK,
                "D": next_power(dim),
                "HEAD_DIM": dim,
                "FORMAT": FORMATS[format][0],
                "SOFTCAP": gemma,
                "WINDOW": gemma,
                "CARRIED": carried,
                "WIDE": False,
                "UPCAST": False,
            },
            aligned=("q_row", "kv_rows"),
            warps=shape.warps,
            stages=shape.stages,
            targets=("gfx942",) if hip else ("sm_80", "sm_90"),
        )
        found.append(case)
    return found


CASES = {
    "attend_kernel": [
        *_cases(64, 3),
        *_cases(64, 8),
        *_cases(128, 8),
        *_cases(128, 4),
        *_cases(128, 8, carried=True),
        *_cases(128, 8, format="int8"),
        *_cases(128, 8, format="fp8"),
        *_cases(256, 2, gemma=True),
        *_cases(64, 3, "fp32"),
        *_cases(128, 8, "fp32"),
        *_cases(256, 2, "fp32", gemma=True),
    ]
}
