"""Tables of native attention that live longer than a batch.

While a tree stays and each of its branches goes on by a row, what a batch's tables say changes in
few places: `TablePlanner` puts these right, and gathers anew where anything else is different.
Chunks that come after the branches are gathered by themselves, and joined to that.
Either way the tables are those of `gather`, number by number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from forkserve.kernels.forest import alike
from forkserve.kernels.native.attention import Tables, gather
from forkserve.kernels.native.joined_tables import join
from forkserve.types import Span, Work

__all__ = ["TablePlanner"]


@dataclass(slots=True)
class _Branch:
    """A decoding work of the tables: its own run of rows, which the fresh one goes on."""

    above: tuple[Span, ...]
    key: Hashable
    start: int  # position of its own run
    offset: int
    rows: int  # of its own run in the context
    pages: Sequence[int]  # of these and the fresh row
    run: int  # its number


class TablePlanner:
    """The tables of batch after batch, gathered or grown.  made, grown: how often."""

    def __init__(self, page_size: int, window: int = 0) -> None:
        """window: see `gather`."""
        self._size, self._window = page_size, window
        self._tables = gather([], page_size)
        self._branches: list[_Branch] = []
        self._numbers: dict[Hashable, int] = {}  # of the runs that contexts read; if asked for
        self._uses = self._tables.arrays[4]  # of each branch: where its own run is used
        self._writes = 0  # the first run that takes fresh rows
        # Pages of the runs that do not grow: as spans hold them, and as they were gathered.
        self._held: list[Sequence[int]] = []
        self._copies: list[Sequence[int]] = []
        self.made = 0
        self.grown = 0

    def tables(self, works: Sequence[Work]) -> Tables:
        """The tables of `works`.  They are the planner's own: the next call may change them.

        The works that decode before the first that does not are what grows.
        """
        count = len(self._branches)
        more = len(works) > count and _decodes(works[count])
        if count and not more and self._grow(works[:count]):
            self.grown += 1
        else:
            self.made += 1
            self._branches = []  # nothing to grow, should gathering fail
            count = next((i for i, work in enumerate(works) if not _decodes(work)), len(works))
            if not count:
                return gather(works, self._size, self._window)
            self._tables = gather(works[:count], self._size, self._window)
            self._numbers = {}
            self._remember(works[:count])
        if count == len(works):
            return self._tables
        back = gather(works[count:], self._size, self._window)
        if not self._numbers:
            runs = self._tables.runs
            self._numbers = {run.key: i for i, run in enumerate(runs[: len(runs) - count])}
        grown = {branch.run: branch.rows for branch in self._branches}
        return join(self._tables, back, self._numbers, grown)

    def _remember(self, works: Sequence[Work]) -> None:
        """Keep what must stay equal for the tables to be grown; nothing if they cannot be."""
        arrays, runs = self._tables.arrays, self._tables.runs
        _, _, use_end, _, use_run, _, run_start, *_ = arrays
        first = np.concatenate([[0], use_end[:-1]])
        if run_start[use_run[first]].any():
            return  # more of the window may be gone a row later
        self._uses = use_end - 1
        numbers = use_run[self._uses].tolist()
        if len(set(numbers)) < len(works):
            return
        branches = []
        for work, number in zip(works, numbers, strict=True):
            own, write, known = work.context[-1], work.write, runs[number]
            assert write is not None
            end = own.offset + own.length
            if (write.start, write.offset, write.length) != (work.start, end, 1):
                return
            if own.start + own.length != work.start or (known is not own and known != own):
                return  # known: who reads most of its run must not read more than the branch has
            pages, used = write.pages[: end // self._size + 1], -(-end // self._size)
            if len(pages) <= end // self._size:
                return
            if own.pages is not write.pages and own.pages[:used] != pages[:used]:
                return
            place = own.start, own.offset, own.length
            branches.append(_Branch(work.context[:-1], own.key, *place, pages, number))
        self._writes = len(runs) - len(works)
        grows, context = set(numbers), runs[: self._writes]
        self._held = [run.pages for i, run in enumerate(context) if i not in grows]
        self._copies = [pages[:] for pages in self._held]
        self._branches = branches

    def _grow(self, works: Sequence[Work]) -> bool:
        """Whether `works` are those of the tables, a row further each; then these are grown.

        The spans above a branch must hold the very same lists of pages: to compare others would
        take as long as to gather them.  What the lists say is compared, for it may have changed.
        """
        if len(works) != len(self._branches) or self._held != self._copies:
            return False
        size = self._size
        tables: list[Sequence[int]] = []
        more: list[tuple[int, int]] = []
        for number, (work, branch) in enumerate(zip(works, self._branches, strict=True)):
            write, context, above = work.write, work.context, branch.above
            if write is None or len(work.tokens) != 1 or not context:
                return False
            if not alike(context[:-1], above):
                return False
            branch.above = context[:-1]  # the next may be the very same
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
            pages, used = write.pages[: end // size + 1], -(-end // size)
            if (pages if end % size else pages[:-1]) != branch.pages:
                return False
            if own.pages is not write.pages and own.pages[:used] != pages[:used]:
                return False
            tables.append(pages)
            if end % size == 0:  # the fresh row is the first of its page
                more.append((self._writes + number, pages[-1]))
            if (end - 1) % size == 0:  # the one before was, and is of the context now
                more.append((branch.run, pages[used - 1]))
        branches, self._branches = self._branches, []  # nothing to grow, should this fail
        for branch, pages in zip(branches, tables, strict=True):
            branch.rows += 1
            branch.pages = pages
        self._extend(more)
        self._branches = branches
        return True

    def _extend(self, more: list[tuple[int, int]]) -> None:
        """Put one more row of every branch into the tables.  more: runs that take on a page."""
        arrays = self._tables.arrays
        _, start, _, _, _, use_length, run_start, run_offset, run_page, pages = arrays
        start += 1
        use_length[self._uses] += 1
        run_start[self._writes :] += 1
        run_offset[self._writes :] += 1
        if not more:
            return
        more.sort()
        runs, values = np.array(more).T
        counts = np.zeros(run_page.size, np.int32)
        counts[runs + 1] = 1
        run_page += np.cumsum(counts, dtype=np.int32)
        fresh = np.zeros(pages.size + len(more), np.bool_)
        fresh[run_page[runs + 1] - 1] = True
        longer = np.empty(fresh.size, np.int32)
        longer[fresh], longer[~fresh] = values, pages
        arrays[-1], spans = longer, self._tables.spans
        spans.n_pages, spans.pages = longer.size, longer.ctypes.data


def _decodes(work: Work) -> bool:
    """Whether the work goes on by a row that it writes."""
    own = work.context[-1:]
    return len(work.tokens) == 1 and work.write is not None and bool(own and own[0].length)
