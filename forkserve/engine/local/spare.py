"""Freed pages of the pool whose memory is still there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Spare"]


class Spare:
    """Keeps up to `limit` freed pages back from the operating system; the oldest go first.

    Memory that is given back comes again as one page fault for 4 KiB, which takes several times as
    long as to fill it: a session that is brought back soon after another has ended is to find
    memory.  Whoever writes to pages says so with `take` before, since only a page that nobody has
    written to since it was freed may be given back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pages: dict[int, None] = {}  # in the order in which they were freed

    def __len__(self) -> int:
        return len(self._pages)

    def free(self, pages: Iterable[int]) -> list[int]:
        """Keep these; returns the pages to give back now, down to seven eighths of the limit."""
        for page in pages:
            self._pages.pop(page, None)
            self._pages[page] = None
        if len(self._pages) <= self.limit:
            return []
        out = list(self._pages)[: len(self._pages) - self.limit * 7 // 8]
        self.take(out)
        return out

    def take(self, pages: Sequence[int]) -> None:
        """These are in use again."""
        if self._pages:
            for page in pages:
                self._pages.pop(page, None)
