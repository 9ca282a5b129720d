"""Copy rows of every layer from page to page: the copy of an unaligned tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forkserve.types import RowCopy

__all__ = ["copy_rows"]


def copy_rows(kv: torch.Tensor, copies: Sequence[RowCopy], page_size: int) -> None:
    """Run `copies` in order on kv [layers, 2*kv_heads, rows, D]; only the valid rows move."""
    for copy in copies:
        src = copy.src_page * page_size + copy.src_row
        dst = copy.dst_page * page_size + copy.dst_row
        kv[:, :, dst : dst + copy.rows] = kv[:, :, src : src + copy.rows]
