"""Tables of native attention that live longer than a batch.

While a tree stays and each of its branches goes on by a row, what a batch's tables say changes in
few places: `TablePlanner` puts these right, and gathers anew where anything else is different.
Either way the tables are those of `gather`, number by number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import numpy.typing as npt

from forkserve.kernels.native.attention import Tables, gather
from forkserve.types import Span, Work

__all__ = ["TablePlanner"]

Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Branch:
    """A decoding work of the tables: its own run of rows, which the fresh one goes on."""

    above: tuple[Span, ...]
    key: Hashable
    start: int  # position of its own run
    offset: int
    rows: int  # of its own run in the context
    pages: Sequence[int]  # of these and the fresh row


class TablePlanner:
    """The tables of batch after batch, gathered or grown.  made, grown: how often."""

    def __init__(self, page_size: int, window: int = 0) -> None:
        """window: see `gather`."""
        self._size, self._window = page_size, window
        self._branches: list[_Branch] = []
        # Pages of the runs that do not grow: as spans hold them, and as they were gathered.
        self._held: list[Sequence[int]] = []
        self._copies: list[Sequence[int]] = []
        self.made = 0
        self.grown = 0

    def tables(self, works: Sequence[Work]) -> Tables:
        """The tables of `works`.  They are the planner's own: the next call may change them."""
        if self._branches and self._grow(works):
            self.grown += 1
            return self._tables
        self.made += 1
        self._branches = []  # nothing to grow, should gathering fail
        self._tables = gather(works, self._size, self._window)
        self._remember(works)
        return self._tables

    def _remember(self, works: Sequence[Work]) -> None:
        """Keep what must stay equal for the tables to be grown; nothing if they cannot be."""
        for work in works:
            if len(work.tokens) != 1 or work.write is None:
                return
            if not work.context or not work.context[-1].length:
                return
        arrays, runs = self._tables.arrays, self._tables.runs
        _, _, use_end, _, use_run, use_length, run_start, *_ = arrays
        first = np.concatenate([[0], use_end[:-1]])
        if run_start[use_run[first]].any():
            return  # more of the window may be gone a row later
        self._uses = use_end.astype(np.int64) - 1
        self._runs = use_run[self._uses].astype(np.int64)
        longest = np.zeros(len(runs), np.int32)
        np.maximum.at(longest, use_run, use_length)
        if np.unique(self._runs).size < len(works):
            return
        if (longest[self._runs] != use_length[self._uses]).any():
            return  # somebody reads rows of a branch that it has not
        branches = []
        for work, number in zip(works, self._runs.tolist(), strict=True):
            own, write, known = work.context[-1], work.write, runs[number]
            assert write is not None
            end = own.offset + own.length
            if write.offset != end or (known is not own and known != own):
                return
            pages = write.pages[: end // self._size + 1]
            used = -(-end // self._size)
            if own.pages is not write.pages and own.pages[:used] != pages[:used]:
                return
            branches.append(
                _Branch(work.context[:-1], own.key, own.start, own.offset, own.length, pages)
            )
        grows = set(self._runs.tolist())
        context = runs[: len(runs) - len(works)]
        self._held = [run.pages for i, run in enumerate(context) if i not in grows]
        self._copies = [pages[:] for pages in self._held]
        self._branches = branches

    def _grow(self, works: Sequence[Work]) -> bool:
        """Whether `works` are those of the tables, a row further each; then these are grown.

        The spans above a branch must hold the very same lists of pages: to compare others would take
        as long as to gather them.  What the lists say is compared, for it may have changed.
        """
        if len(works) != len(self._branches) or self._held != self._copies:
            return False
        size = self._size
        tables: list[Sequence[int]] = []
        for work, branch in zip(works, self._branches, strict=True):
            write, context, above = work.write, work.context, branch.above
            if (
                write is None
                or len(work.tokens) != 1
                or len(context) != len(above) + 1
            ):
                return False
            if not all(map(is_, context, above)):
                if not all(map(_alike, context, above)):
                    return False
                branch.above = context[:-1]
            own, rows = context[-1], branch.rows + 1
            end = branch.offset + rows
            if (
                own.length != rows
                or own.key != branch.key
                or own.start != branch.start
                or own.offset != branch.offset
                or work.start != branch.start + rows
                or write.start != work.start
                or write.offset != end
                or write.length != 1
            ):
                return False
            pages, before = write.pages[: end // size + 1], branch.pages
            if pages != before and (end % size or pages[:-1] != before):
                return False
            used = -(-end // size)
            if own.pages is not write.pages and own.pages[:used] != pages[:used]:
                return False
            tables.append(pages)
        for branch, pages in zip(self._branches, tables, strict=True):
            branch.rows += 1
            branch.pages = pages
        self._extend()
        return True

    def _extend(self) -> None:
        """Put one more row of every branch into the tables."""
        works, branches = len(self._branches), self._branches
        arrays, size = self._tables.arrays, self._size
        _, start, _, _, _, use_length, run_start, run_offset, run_page, pages = arrays
        writes = len(run_start) - works  # the first run that takes fresh rows
        start += 1
        use_length[self._uses] += 1
        run_start[writes:] += 1
        run_offset[writes:] += 1
        # The row written before may be the first of its page in the context, the fresh one too.
        end = run_offset[writes:]
        read, written = (end - 1) % size == 0, end % size == 0
        grown = np.concatenate([self._runs[read], writes + np.flatnonzero(written)])
        if not grown.size:
            return
        values = [branches[i].pages[(end[i] - 1) // size] for i in np.flatnonzero(read)]
        values += [branches[i].pages[-1] for i in np.flatnonzero(written)]
        arrays[-1] = np.insert(pages, run_page[grown + 1], np.array(values, np.int32))
        more = np.zeros(len(run_start), np.int32)
        more[grown] = 1
        run_page[1:] += np.cumsum(more, dtype=np.int32)
        self._tables = Tables.of(arrays, self._tables.runs)


def _alike(span: Span, other: Span) -> bool:
    """Whether two spans are equal and hold the same list."""
    return span is other or (span.pages is other.pages and span == other)
