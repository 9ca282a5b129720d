"""Merge partial attention results by their log-sum-exp (natural log).

A part is (o, lse): o the softmax-weighted values over its keys, lse the log of the sum of its
exponentials.  An empty part is o = 0, lse = -inf; merging two empty parts gives an empty part.
"""

from __future__ import annotations

import torch

__all__ = ["merge"]

_LOWEST = -1e30  # stands for -inf where the difference of two of them would be nan


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [..., D] and lse [...] of two parts -> (o, lse) over the keys of both."""
    gap = lse1.clamp_min(_LOWEST) - lse2.clamp_min(_LOWEST)
    weight = torch.sigmoid(gap).unsqueeze(-1)  # e^lse1 / (e^lse1 + e^lse2)
    return torch.lerp(o2, o1, weight.to(o1.dtype)), torch.logaddexp(lse1, lse2)
