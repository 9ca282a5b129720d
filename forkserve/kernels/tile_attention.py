"""Segment attention as a Triton kernel, over the tiles of a `forkserve.kernels.tiles.TilePlan`.

A program takes one tile of query rows, with the query heads of one KV head stacked as further
lines, and walks the tile's page entries.  `forkserve.kernels.segment_attention` is the same
operator in torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from forkserve.kernels.jit import INTERPRETED, Case, jit, next_power, tl
from forkserve.kernels.merge import merge_parts
from forkserve.kernels.quant import FORMATS, KVRows, value
from forkserve.kernels.tile_plans import DevicePlan
from forkserve.kernels.tiles import LARGE, SMALL, block_rows

__all__ = ["Partials", "TileShape", "attend_tiles"]


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a tile is computed: keys of a step, warps, and steps whose loads are in flight."""

    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dim: int, itemsize: int, large: bool, *, coded: bool, hip: bool) -> TileShape:
        """For heads of `dim` elements of `itemsize` bytes; coded: KV of 8 bits.

        Chosen by the compiler's report: no registers spilled, and two or three tiles at a time in
        the shared memory of an SM, 32 KB each on the way (`python -m forkserve.kernels.compile`).
        """
        row = next_power(dim) * itemsize
        if hip:  # 64 KB of shared memory, 512 registers
            return cls(32 if row <= 512 else 16, 4, 2 if row <= 256 else 1)
        if itemsize == 4:  # products without tensor cores
            return cls(16, 8 if large else 4, 2)
        if large:
            return cls(
                32 if coded or row > 256 else 64, 8 if row > 256 else 4, 3 if row <= 256 else 2
            )
        keys = max((8192 if coded else 4096) // next_power(dim), 32)
        return cls(keys, 4, 4 if row <= 256 else 3)


class Partials:
    """Scratch for parts of results: o [slots, H, D] and lse [slots, H] in float32.

    out: where results go, if not to a new tensor each time.  Rows without tiles keep what it holds.
    """

    def __init__(
        self,
        slots: int,
        heads: int,
        dim: int,
        device: torch.device | str,
        out: torch.Tensor | None = None,
    ) -> None:
        self.out = out
        self.o = torch.empty(slots, heads, dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(slots, heads, dtype=torch.float32, device=device)


def attend_tiles(
    q: torch.Tensor,
    kv: KVRows,
    plan: DevicePlan,
    partials: Partials,
    *,
    page_size: int,
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
        TileShape.of(dim, q.element_size(), large, coded=code > 0, hip=hip)
        for large in (False, True)
    )
    for large, (first, count) in enumerate(((0, plan.small), (plan.small, plan.large))):
        if not count:
            continue
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
            plan.tiles[first:],
            plan.rows,
            plan.positions,
            plan.pages,
            plan.firsts,
            plan.bounds,
            scale,
            softcap,
            window,
            HEADS=heads,
            GROUP=group,
            BLOCK_M=block_rows(group, LARGE if large else SMALL),
            BLOCK_N=shape.keys,
            D=next_power(dim),
            HEAD_DIM=dim,
            PAGE=page_size,
            FORMAT=code,
            SOFTCAP=softcap > 0,
            WINDOW=window > 0,
            WIDE=kv.rows.shape[1] * dim >= 1 << 31,
            UPCAST=INTERPRETED,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    merge_parts(out, partials.o, partials.lse, plan.begins, plan.parts)
    return out


@jit
def _listed(
    pages: tl.tensor,
    firsts: tl.tensor,
    bounds: tl.tensor,
    begin: tl.tensor,
    low: tl.tensor,
    keys: tl.tensor,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """KV rows and positions of keys [low, low + BLOCK_N); 2**30 is the position of a hidden one."""
    i = low + tl.arange(0, BLOCK_N)
    entry = begin + i // PAGE
    within = i % PAGE
    listed = i < keys
    page = tl.load(pages + entry, mask=listed, other=0)
    first = tl.load(firsts + entry, mask=listed, other=0)
    bound = tl.load(bounds + entry, mask=listed, other=0)  # slots [low 16 bits, high 16 bits)
    valid = (within >= (bound & 0xFFFF)) & (within < (bound >> 16))
    if WIDE:
        page = page.to(tl.int64)
    return page * PAGE + within, tl.where(valid, first + within, 1 << 30)


@jit
def attend_kernel(
    q: tl.tensor,
    q_row: int,
    kv: tl.tensor,
    scales: tl.tensor,
    kv_rows: int,
    out: tl.tensor,
    part_o: tl.tensor,
    part_lse: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    pages: tl.tensor,
    firsts: tl.tensor,
    bounds: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One tile under one KV head.  Line m of the block is head m % GROUP of row m // GROUP.

    WIDE: offsets within a head need 64 bits.  UPCAST: products in float32, because those of
    bfloat16 are wrong in the interpreter.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    HIDDEN: tl.constexpr = 1 << 30
    tile = tiles + tl.program_id(0) * 5
    head = tl.program_id(1)
    begin = tl.load(tile)
    keys = (tl.load(tile + 1) - begin) * PAGE
    slot = tl.load(tile + 2)
    count = tl.load(tile + 3)
    direct = tl.load(tile + 4)

    line = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    member = line // GROUP
    there = member < count
    row = tl.load(rows + slot + member, mask=there, other=0)
    position = tl.load(positions + row, mask=there, other=-1).to(tl.int32)
    heads = head * GROUP + line % GROUP
    line_at = row.to(tl.int64) * q_row + heads * HEAD_DIM
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + line_at[:, None] + d[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    head_at = head.to(tl.int64) * kv_rows
    value_at = head_at + tl.cast(kv_rows, tl.int64) * (HEADS // GROUP)
    k_base = kv + head_at * HEAD_DIM
    v_base = kv + value_at * HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # Entries are read a step ahead, so that the loads of K and V can be pipelined.
    where, at = _listed(pages, firsts, bounds, begin, 0, keys, BLOCK_N, PAGE, WIDE)
    for low in range(0, keys, BLOCK_N):
        valid = at < HIDDEN
        k_mask = valid[None, :] & (d < HEAD_DIM)[:, None]
        k_from = k_base + where[None, :] * HEAD_DIM + d[:, None]
        v_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
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
        seen = at[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        score = tl.where(seen, score * LOG2E, float("-inf"))

        new = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf minus -inf would be nan
        weight = tl.exp2(score - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(weight, 1)
        if FORMAT != 0:
            weight *= tl.load(scales + value_at + where, mask=valid, other=0.0)[None, :]
        acc = acc * old[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new
        where, at = _listed(pages, firsts, bounds, begin, low + BLOCK_N, keys, BLOCK_N, PAGE, WIDE)

    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    result = acc / safe[:, None]
    line_at = (slot + member).to(tl.int64) * HEADS + heads
    partly = member < tl.where(direct == 0, count, 0)
    wholly = member < tl.where(direct == 0, 0, count)
    width = (d < HEAD_DIM)[None, :]
    lse = tl.where(empty, float("-inf"), top / LOG2E + tl.log(safe))
    tl.store(part_lse + line_at, lse, mask=partly)
    part = part_o + line_at[:, None] * HEAD_DIM + d[None, :]
    tl.store(part, result, mask=partly[:, None] & width)
    line_at = row.to(tl.int64) * HEADS + heads
    whole = out + line_at[:, None] * HEAD_DIM + d[None, :]
    tl.store(whole, result.to(out.dtype.element_ty), mask=wholly[:, None] & width)


_POINTERS = {
    "part_o": "fp32",
    "part_lse": "fp32",
    "scales": "fp32",
    "tiles": "i32",
    "rows": "i32",
    "positions": "i64",
    "pages": "i32",
    "firsts": "i32",
    "bounds": "i32",
}
_SCALARS = {"q_row": "i32", "kv_rows": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32"}


def _cases(
    dim: int, group: int, kind: str = "bf16", format: str = "none", *, gemma: bool = False
) -> list[Case]:
    """Small and large tiles of one model's heads.  gemma: with soft caps and windows."""
    found = []
    for hip, large in itertools.product((False, True), (False, True)):
        size = 4 if kind == "fp32" else 2
        shape = TileShape.of(dim, size, large, coded=format != "none", hip=hip)
        pointers = {"q": kind, "kv": kind, "out": kind, **_POINTERS}
        if format != "none":
            pointers["kv"] = {"int8": "i8", "fp8": "u8"}[format]
        words = [f"d{dim} g{group} {kind}", "large" if large else "small"]
        words += [format] if format != "none" else []
        case = Case(
            " ".join([*words, "cap window"] if gemma else words),
            {**{name: f"*{type}" for name, type in pointers.items()}, **_SCALARS},
            {
                "HEADS": 8 * group,
                "GROUP": group,
                "BLOCK_M": block_rows(group, LARGE if large else SMALL),
                "BLOCK_N": shape.keys,
                "D": next_power(dim),
                "HEAD_DIM": dim,
                "PAGE": 16,
                "FORMAT": FORMATS[format][0],
                "SOFTCAP": gemma,
                "WINDOW": gemma,
                "WIDE": False,
                "UPCAST": False,
            },
            aligned=("q_row", "kv_rows"),
            warps=shape.warps,
            stages=shape.stages,
            main=kind != "fp32",  # float32 is there to check by, not to serve with
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
        *_cases(128, 8, format="int8"),
        *_cases(128, 8, format="fp8"),
        *_cases(256, 2, gemma=True),
        *_cases(128, 8, "fp32"),
    ]
}
