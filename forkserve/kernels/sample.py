"""Draw one token per row with the logits staying on the device.

The same draw as `forkserve.engine.sampling.sample` for requests without filters or constraints:
temperature 0 takes the largest logit, the lowest id among equals; otherwise the inverse of the
cumulative distribution in id order at the caller's random number.  exp is in float32 here and in
float64 there, so draws differ where the number falls within rounding of a boundary.
"""

from __future__ import annotations

import torch

from forkserve.kernels.jit import EXACT, Case, jit, next_power, runs_kernels, tl

__all__ = ["draw"]

_BLOCK = 4096


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] float32 -> tokens [n] int64, log p of each in the raw distribution [n] float32.

    temperatures [n] float32, 0 for greedy; points [n] float64 in [0, 1).  A row without a finite
    largest logit, or with a nan, gives token -1.
    """
    n, vocab = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    log_p = torch.empty(n, dtype=torch.float32, device=logits.device)
    if not runs_kernels(logits):
        return _draw(logits, temperatures, points)
    draw_kernel[(n,)](
        tokens,
        log_p,
        logits,
        temperatures,
        points,
        vocab,
        BLOCK=min(_BLOCK, next_power(vocab)),
        num_warps=8,
        **EXACT,
    )
    return tokens, log_p


def _draw(
    logits: torch.Tensor, temperatures: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with torch operators."""
    top, best = logits.max(1)
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    sums = ((logits - top[:, None]) / scale).exp().double().cumsum(1)
    drawn = (sums <= points[:, None] * sums[:, -1:]).sum(1).clamp_max(logits.shape[1] - 1)
    tokens = torch.where(temperatures > 0, drawn, best)
    tokens = torch.where(top.isfinite(), tokens, -1)
    log_p = logits.log_softmax(1).gather(1, tokens.clamp_min(0)[:, None])[:, 0]
    return tokens, log_p


@jit
def draw_kernel(
    tokens: tl.tensor,
    log_p: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    points: tl.tensor,
    vocab: int,
    BLOCK: tl.constexpr,
) -> None:
    """One row: the maximum, the sums, and for a positive temperature the place of the draw."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * vocab
    i = tl.arange(0, BLOCK)
    top = float("-inf")
    best = 0
    broken = 0
    for low in range(0, vocab, BLOCK):
        x = tl.load(base + low + i, mask=low + i < vocab, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32), 0)
        peak = tl.max(x, 0)
        where = low + tl.min(tl.where(x == peak, i, BLOCK), 0)  # of equals the lowest
        best = tl.where(peak > top, where, best)
        top = tl.maximum(top, peak)

    temperature = tl.load(temperatures + row)
    scale = tl.where(temperature > 0, temperature, 1.0)
    raw = tl.sum(tl.zeros([1], tl.float64), 0)
    total = tl.sum(tl.zeros([1], tl.float64), 0)
    for low in range(0, vocab, BLOCK):
        x = tl.load(base + low + i, mask=low + i < vocab, other=float("-inf"))
        raw += tl.sum(tl.exp(x - top).to(tl.float64), 0)
        total += tl.sum(tl.exp((x - top) / scale).to(tl.float64), 0)

    if temperature > 0:
        point = tl.load(points + row) * total
        before = tl.sum(tl.zeros([1], tl.float64), 0)
        best = 0  # how many ids have a cumulative sum at or below the point
        for low in range(0, vocab, BLOCK):
            mask = low + i < vocab
            x = tl.load(base + low + i, mask=mask, other=float("-inf"))
            weight = tl.exp((x - top) / scale).to(tl.float64)
            sums = before + tl.cumsum(weight, 0)
            best += tl.sum((mask & (sums <= point)).to(tl.int32), 0)
            before += tl.sum(weight, 0)
        best = tl.minimum(best, vocab - 1)

    good = (broken == 0) & (top > float("-inf")) & (top < float("inf"))
    chosen = tl.load(base + best)
    tl.store(tokens + row, tl.where(good, best, -1).to(tl.int64))
    tl.store(log_p + row, chosen - top - tl.log(raw).to(tl.float32))


CASES = {
    "draw_kernel": [
        Case(
            "block 4096",
            {
                "tokens": "*i64",
                "log_p": "*fp32",
                "logits": "*fp32",
                "temperatures": "*fp32",
                "points": "*fp64",
                "vocab": "i32",
            },
            {"BLOCK": _BLOCK},
            aligned=("vocab",),
            warps=8,
        )
    ]
}
