"""Write fresh K and V rows to their slots.  K comes in already rotated."""

from __future__ import annotations

import torch

__all__ = ["write_kv"]


def write_kv(kv: torch.Tensor, slots: slice | torch.Tensor, fresh: torch.Tensor) -> None:
    """kv [2*Hk, rows, D]; fresh [n, 2*Hk, D] goes to rows `slots` (a slice if consecutive)."""
    rows = fresh.transpose(0, 1)  # [2*Hk, n, D]
    if isinstance(slots, slice):
        kv[:, slots] = rows
    elif rows.dtype == kv.dtype:
        kv.index_copy_(1, slots, rows)
    else:
        kv.index_copy_(1, slots, rows.to(kv.dtype))
