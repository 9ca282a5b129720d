"""What to do with an unaligned tail: copy its rows, or share its page.

A parent of L tokens leaves r = L mod P rows in its last page.  A child of l tokens either *packs*
(copies the r rows into its own first page) or *freezes* (leaves the page shared and read-only and
starts a page of its own).  Pages for k children::

    N_pack   =     sum ceil((r + l_i) / P)
    N_freeze = 1 + sum ceil(l_i / P)          (the 1 only if r > 0)

Freeze when it needs fewer, pack on a tie: a packed path is aligned and can be published as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["choose_tail", "freeze_pages", "pack_pages"]


def pack_pages(rest: int, lengths: Sequence[int], page_size: int) -> int:
    """Pages that children of `lengths` tokens need when each copies `rest` rows."""
    return sum(-(-(rest + n) // page_size) for n in lengths)


def freeze_pages(rest: int, lengths: Sequence[int], page_size: int) -> int:
    """Pages that children of `lengths` tokens need beside the one shared tail page."""
    return (1 if rest else 0) + sum(-(-n // page_size) for n in lengths)


def choose_tail(
    rest: int,
    lengths: Sequence[int],
    page_size: int,
    policy: Literal["auto", "pack", "freeze"] = "auto",
) -> bool:
    """True to freeze, False to pack.  An aligned parent (`rest` = 0) has nothing to decide."""
    if rest == 0 or policy == "pack":
        return False
    if policy == "freeze":
        return True
    return freeze_pages(rest, lengths, page_size) < pack_pages(rest, lengths, page_size)
