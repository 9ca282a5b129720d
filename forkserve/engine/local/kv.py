"""KV tensors indexed by page id.

Memory map of one layer (D values a row, Hk = kv heads)::

    head 0 of K | row 0 .. row C*P-1 | scratch rows
    ...
    head 0 of V | ...

so that a run of consecutive pages is a slice ``[2*Hk, rows, D]`` without a copy.  The scratch rows
take the fresh K/V of works that may not write (`Work.write` is None).  The native kernels keep the
same map, but for K transposed inside each page (`native.NativeKV`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from forkserve.errors import ConfigError
from forkserve.kernels.copy_rows import copy_rows
from forkserve.types import RowCopy, Span

__all__ = ["PagedKV", "runs_of"]

# Linux value; the mmap module names it only from Python 3.13 on.  Address space is not a promise
# of memory: an untouched pool costs nothing, and is refused only if it cannot be addressed.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_RELEASE_PAGES = 64  # freed runs at least this long go back to the operating system


class PagedKV:
    """K (rotated) and V of every layer.  `layers[i]` is [2*Hk, rows, D], K heads first."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        capacity_pages: int,
        scratch_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.page_size = page_size
        self.capacity_rows = capacity_pages * page_size
        self.scratch_rows = scratch_rows
        rows = self.capacity_rows + scratch_rows
        self._shape = (layers, 2 * kv_heads, rows, head_dim)
        self.dtype = dtype
        self._row_bytes = head_dim * dtype.itemsize
        nbytes = math.prod(self._shape) * dtype.itemsize
        area = _reserve(nbytes, capacity_pages, page_size, dtype)
        self._map: mmap.mmap | None = area
        self.rows = torch.frombuffer(area, dtype=dtype).view(self._shape)
        self.layers: list[torch.Tensor] = list(self.rows.unbind(0))
        # The same memory as plain words, since numpy knows no bfloat16.
        self._word = np.dtype(f"u{dtype.itemsize}")
        self._words = np.frombuffer(area, self._word).reshape(self._shape)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row over all layers, K and V."""
        return self._shape[0] * self._shape[1] * self._row_bytes

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Run the row copies of a batch, in order."""
        copy_rows(self.rows, copies, self.page_size)

    def read(self, spans: Sequence[Span]) -> bytearray:
        """Rows of consecutive spans as bytes, [layers, 2*Hk, n, D]."""
        layers, heads, _, dim = self._shape
        count = sum(span.length for span in spans)
        out = bytearray(self.bytes_per_token * count)
        run = np.frombuffer(out, self._word).reshape(layers, heads, count, dim)
        done = 0
        for span in spans:
            for row, rows in runs_of(span, self.page_size):
                run[:, :, done : done + rows] = self._words[:, :, row : row + rows]
                done += rows
        return out

    def write(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """Write the rows from `at` on of a run that `read` gave to the slots of a span."""
        layers, heads, _, dim = self._shape
        run = np.frombuffer(rows, self._word).reshape(layers, heads, -1, dim)
        for row, count in runs_of(span, self.page_size):
            self._words[:, :, row : row + count] = run[:, :, at : at + count]
            at += count

    def discard(self, pages: Sequence[int]) -> None:
        """Give the memory of long freed runs back; short ones will be reused soon."""
        area = self._map
        if area is None or len(pages) < _RELEASE_PAGES or not hasattr(mmap, "MADV_DONTNEED"):
            return
        ordered = sorted(pages)
        start = previous = ordered[0]
        for page in [*ordered[1:], -1]:
            if page == previous + 1:
                previous = page
                continue
            if previous - start + 1 >= _RELEASE_PAGES:
                self._release(area, start, previous + 1)
            start = previous = page

    def close(self) -> None:
        """Drop the tensors; the memory goes when their last view does."""
        self.layers = []
        self.rows = torch.empty(0)
        self._words = np.empty(0, self._word)
        self._map = None

    def _release(self, area: mmap.mmap, first: int, end: int) -> None:
        """madvise away pages [first, end) of every layer and head (whole OS pages only)."""
        layers, heads, rows, _ = self._shape
        unit = mmap.PAGESIZE
        for block in range(layers * heads):
            base = block * rows
            low = (base + first * self.page_size) * self._row_bytes
            high = (base + end * self.page_size) * self._row_bytes
            low, high = -(-low // unit) * unit, high // unit * unit
            if high > low:
                area.madvise(mmap.MADV_DONTNEED, low, high - low)


def runs_of(span: Span, size: int) -> Iterator[tuple[int, int]]:
    """(first row in the pool, rows) of the runs of consecutive pages of a span."""
    done = 0
    while done < span.length:
        slot = span.offset + done
        number, within = divmod(slot, size)
        first, rows = span.pages[number], min(size - within, span.length - done)
        while done + rows < span.length and span.pages[number + 1] == span.pages[number] + 1:
            number += 1
            rows = min(rows + size, span.length - done)
        yield first * size + within, rows
        done += rows


def _reserve(nbytes: int, pages: int, page_size: int, dtype: torch.dtype) -> mmap.mmap:
    """Address space for the pool, without memory behind it until a row is written."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        area = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"a KV pool of {pages} pages of {page_size} tokens in {dtype} needs {nbytes / 1e9:.1f} "
            "GB, more than this machine can address; lower capacity_pages"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # huge pages would make one live page cost 2 MB a head
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_NOHUGEPAGE)
    return area
