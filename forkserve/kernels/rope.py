"""Rotary position embedding, rotate-half layout."""

from __future__ import annotations

import torch

__all__ = ["apply_rope", "rope_table"]


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
