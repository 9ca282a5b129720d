"""Merge partial attention results by their log-sum-exp (natural log).

A part is (o, lse): o the softmax-weighted values over its keys, lse the log of the sum of its
exponentials.  An empty part is o = 0, lse = -inf; merging two empty parts gives an empty part.
"""

from __future__ import annotations

import torch

from forkserve.kernels.jit import EXACT, Case, jit, next_power, tl

__all__ = ["BLOCK", "merge", "merge_parts"]

_LOWEST = -1e30  # stands for -inf where the difference of two of them would be nan
BLOCK = 16  # parts read at a time: those of cells [16 * i, 16 * i + 16)


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [..., D] and lse [...] of two parts -> (o, lse) over the keys of both."""
    gap = lse1.clamp_min(_LOWEST) - lse2.clamp_min(_LOWEST)
    weight = torch.sigmoid(gap).unsqueeze(-1)  # e^lse1 / (e^lse1 + e^lse2)
    return torch.lerp(o2, o1, weight.to(o1.dtype)), torch.logaddexp(lse1, lse2)


def merge_parts(
    out: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    begins: torch.Tensor,
    parts: torch.Tensor,
    leads: torch.Tensor,
) -> None:
    """out [n, H, D]: row i becomes the merge of parts[begins[i] : begins[i + 1]], a Triton kernel.

    o [slots, H, D] and lse [slots, H] in float32, indexed by what `parts` holds (int32).  A row
    without parts is left as it is.  leads [n] (int32): places left empty before a row's first part,
    so that a part has its place by its position, and empty parts on either side change no bit.
    """
    n, heads, dim = out.shape
    merge_kernel[(n, heads)](
        out,
        o,
        lse,
        begins,
        parts,
        leads,
        heads,
        D=next_power(dim),
        HEAD_DIM=dim,
        BLOCK=BLOCK,
        **EXACT,
    )


@jit
def merge_kernel(
    out: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    begins: tl.tensor,
    parts: tl.tensor,
    leads: tl.tensor,
    heads: int,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One head of one row."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(begins + row)
    count = tl.load(begins + row + 1) - begin
    dim = tl.arange(0, D)
    top = float("-inf")
    total = 0.0
    value = tl.zeros([D], tl.float32)
    lead = tl.load(leads + row)
    for low in range(0, lead + count, BLOCK):
        at = low + tl.arange(0, BLOCK) - lead
        there = (at >= 0) & (at < count)
        slot = tl.load(parts + begin + at, mask=there, other=0).to(tl.int64) * heads + head
        part = tl.load(lse + slot, mask=there, other=float("-inf"))
        new = tl.maximum(top, tl.max(part, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf minus -inf would be nan
        weight = tl.exp(part - shift)
        old = tl.exp(top - shift)
        mask = there[:, None] & (dim < HEAD_DIM)[None, :]
        block = tl.load(o + slot[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        value = value * old + tl.sum(block * weight[:, None], 0)
        total = total * old + tl.sum(weight, 0)
        top = new
    value = value / tl.where(total == 0.0, 1.0, total)
    where = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + dim
    width = tl.where(count > 0, HEAD_DIM, 0)
    tl.store(where, value.to(out.dtype.element_ty), mask=dim < width)


_TYPES = {
    "o": "*fp32",
    "lse": "*fp32",
    "begins": "*i32",
    "parts": "*i32",
    "leads": "*i32",
    "heads": "i32",
}
CASES = {
    "merge_kernel": [
        Case(
            f"d{dim} {kind}",
            {"out": f"*{kind}", **_TYPES},
            {"D": dim, "HEAD_DIM": dim, "BLOCK": BLOCK},
        )
        for dim in (64, 128)
        for kind in ("bf16", "fp32")
    ]
}
