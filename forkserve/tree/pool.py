"""The page pool: the one authority on which KV page is whose.

A page spans all layers and `page_size` token rows.  The pool knows ids, reference counts,
generations, pins and the read-only mark; which rows of a page stand is said by the segments that
list it.  A backend owns tensors indexed by page id and nothing else.  Single-threaded by contract:
the engine's lock guards it.

References of a page = segments that list it + pins + index entries.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence

from forkserve.errors import OutOfPages

__all__ = ["PagePool"]


class PagePool:
    """A fixed number of pages, handed out lowest id first.

    Lowest-first keeps the resident part of the backend's tensors small and runs of pages
    contiguous, which a backend can then read without a gather.  With `shuffle` (a seed) pages come
    in a fixed random order instead: tests use it to catch code that relies on contiguity.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int,
        *,
        shuffle: int | None = None,
        on_free: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.refs = [0] * capacity
        self.generation = [0] * capacity  # times the page was handed out
        self.pins = [0] * capacity
        self.indexed = bytearray(capacity)  # 1 while a prefix-index entry names the page
        self.read_only = bytearray(capacity)
        self.index_only = 0  # pages that nothing but the index holds
        order = list(range(capacity))
        if shuffle is not None:
            random.Random(shuffle).shuffle(order)
        self._order = order  # rank -> page
        self._rank = [0] * capacity
        for rank, page in enumerate(order):
            self._rank[page] = rank
        self._free = list(range(capacity))  # heap of ranks
        self._on_free = on_free

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def live_pages(self) -> int:
        return self.capacity - len(self._free)

    def pages_for(self, rows: int) -> int:
        """Pages that `rows` rows fill from a page boundary on."""
        return -(-rows // self.page_size)

    def alloc(self, count: int) -> list[int]:
        """`count` fresh pages, each with one reference; all or none.

        Raises OutOfPages; the caller evicts and tries again.
        """
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.capacity)
        pages = []
        for _ in range(count):
            page = self._order[heapq.heappop(self._free)]
            assert self.refs[page] == 0, f"page {page} was free with {self.refs[page]} references"
            self.refs[page] = 1
            self.generation[page] += 1
            pages.append(page)
        return pages

    def incref(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self.refs[page] > 0, f"reference to the free page {page}"
            if self.indexed[page] and self.refs[page] == 1:
                self.index_only -= 1
            self.refs[page] += 1

    def decref(self, pages: Iterable[int]) -> int:
        """Drop one reference each; pages that reach zero become free.  Returns how many did."""
        freed = []
        for page in pages:
            left = self.refs[page] - 1
            assert left >= 0, f"page {page} was released more often than it was taken"
            self.refs[page] = left
            if left == 1 and self.indexed[page]:
                self.index_only += 1
            if left == 0:
                assert not self.pins[page], f"page {page} was freed while pinned"
                assert not self.indexed[page], f"page {page} was freed while in the index"
                self.read_only[page] = 0
                heapq.heappush(self._free, self._rank[page])
                freed.append(page)
        if freed and self._on_free is not None:
            self._on_free(freed)
        return len(freed)

    def pin(self, pages: Sequence[int]) -> None:
        """Hold pages from outside the trees (a publish in progress, a reader)."""
        self.incref(pages)
        for page in pages:
            self.pins[page] += 1

    def unpin(self, pages: Sequence[int]) -> int:
        for page in pages:
            assert self.pins[page] > 0, f"page {page} was unpinned more often than pinned"
            self.pins[page] -= 1
        return self.decref(pages)

    def index(self, page: int) -> None:
        """Note an index entry: it holds a reference, and the page is read-only from now on."""
        assert not self.indexed[page], f"page {page} is in the index already"
        self.incref((page,))
        self.indexed[page] = 1
        self.read_only[page] = 1

    def unindex(self, page: int) -> int:
        """Forget the index entry; returns 1 when that freed the page."""
        assert self.indexed[page], f"page {page} is not in the index"
        self.indexed[page] = 0
        if self.refs[page] == 1:
            self.index_only -= 1
        return self.decref((page,))

    def writable(self, page: int) -> bool:
        """True if exactly one table names the page, nobody pins it, and it is not read-only."""
        return self.refs[page] == 1 and not self.read_only[page] and not self.pins[page]
