"""Copy rows of every layer from page to page: the copy of an unaligned tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forkserve.kernels.jit import Case, jit, next_power, runs_kernels, tl
from forkserve.types import RowCopy

__all__ = ["copy_rows", "waves"]


def copy_rows(kv: torch.Tensor, copies: Sequence[RowCopy], page_size: int) -> None:
    """Run `copies` in order on kv [layers, 2*kv_heads, rows, D]; only the valid rows move."""
    if not copies:
        return
    if runs_kernels(kv):
        for wave in waves(copies):
            _launch(kv, wave, page_size)
        return
    for copy in copies:
        src = copy.src_page * page_size + copy.src_row
        dst = copy.dst_page * page_size + copy.dst_row
        kv[:, :, dst : dst + copy.rows] = kv[:, :, src : src + copy.rows]


def waves(copies: Sequence[RowCopy]) -> list[list[RowCopy]]:
    """`copies` in groups that may run at once: none touches a page that another of them writes."""
    found: list[list[RowCopy]] = [[]]
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if {copy.src_page, copy.dst_page} & written or copy.dst_page in read:
            found.append([])
            read, written = set(), set()
        found[-1].append(copy)
        read.add(copy.src_page)
        written.add(copy.dst_page)
    return found


def _launch(kv: torch.Tensor, copies: Sequence[RowCopy], page_size: int) -> None:
    table = torch.tensor(
        [
            [
                copy.src_page * page_size + copy.src_row,
                copy.dst_page * page_size + copy.dst_row,
                copy.rows,
            ]
            for copy in copies
        ]
    ).to(kv.device)
    words, width = _words(kv)
    copy_rows_kernel[(len(copies), kv.shape[0] * kv.shape[1])](
        words,
        table,
        kv.shape[2],
        ROWS=next_power(page_size),
        WIDTH=width,
        BLOCK=next_power(width),
    )


def _words(kv: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows as integers of at most 4 bytes, and how many a row has."""
    width = kv.shape[3] * kv.element_size()
    kind = next(
        kind for kind in (torch.int32, torch.int16, torch.int8) if width % kind.itemsize == 0
    )
    return kv.view(kind), width // kind.itemsize


@jit
def copy_rows_kernel(
    kv: tl.tensor,
    table: tl.tensor,
    rows: int,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One copy in one head of one layer.  kv: words; table [copies, 3]: from, to, rows."""
    copy = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * rows
    src = tl.load(table + copy * 3)
    dst = tl.load(table + copy * 3 + 1)
    count = tl.load(table + copy * 3 + 2)
    row = tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (word < WIDTH)
    value = tl.load(kv + (base + src + row) * WIDTH + word, mask=mask)
    tl.store(kv + (base + dst + row) * WIDTH + word, value, mask=mask)


CASES = {
    "copy_rows_kernel": [
        Case(
            "page16 d128 bf16",
            {"kv": "*i32", "table": "*i64", "rows": "i32"},
            {"ROWS": 16, "WIDTH": 64, "BLOCK": 64},
            aligned=("rows",),
        ),
        Case(
            "scales",
            {"kv": "*i32", "table": "*i64", "rows": "i32"},
            {"ROWS": 16, "WIDTH": 1, "BLOCK": 1},
            aligned=("rows",),
        ),
    ]
}
