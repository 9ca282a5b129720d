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
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from forkserve.engine.local.spare import Spare
from forkserve.errors import ConfigError
from forkserve.kernels.copy_rows import copy_rows
from forkserve.types import RowCopy, Span

if TYPE_CHECKING:
    from forkserve.engine.local.runner import Setup
    from forkserve.engine.local.spec import ModelSpec

__all__ = ["KVSize", "PagedKV", "runs_of"]

# Linux value; the mmap module names it only from Python 3.13 on.  Address space is not a promise
# of memory: an untouched pool costs nothing, and is refused only if it cannot be addressed.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_RELEASE_PAGES = 64  # freed runs at least this long go back to the operating system
_SPARE_BYTES = 256 << 20  # that freed pages may keep


@dataclass(frozen=True, slots=True)
class KVSize:
    """What KV memory is made for.  scratch_rows: of works that may not write, behind the pool.

    dtype: of the rows, before any coding in 8 bits.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    capacity_pages: int
    scratch_rows: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, setup: Setup, dtype: torch.dtype) -> KVSize:
        """Of a model and how it is run; scratch rows are whole pages."""
        page = setup.page_size
        scratch = -(-setup.scratch_rows // page) * page
        heads, dim = spec.kv_heads, spec.head_dim
        return cls(spec.layers, heads, dim, page, setup.capacity_pages, scratch, dtype)

    @property
    def capacity_rows(self) -> int:
        """Rows of the pool."""
        return self.capacity_pages * self.page_size


class PagedKV:
    """K (rotated) and V of every layer.  `layers[i]` is [2*Hk, rows, D], K heads first."""

    def __init__(self, size: KVSize, *, spare_bytes: int = _SPARE_BYTES) -> None:
        """spare_bytes: that freed pages may keep.

        Raises `ConfigError` if the memory cannot be addressed.
        """
        self.page_size, self.dtype = size.page_size, size.dtype
        self.capacity_rows, self.scratch_rows = size.capacity_rows, size.scratch_rows
        rows = self.capacity_rows + self.scratch_rows
        self._shape = (size.layers, 2 * size.kv_heads, rows, size.head_dim)
        self._row_bytes = size.head_dim * self.dtype.itemsize
        area = _reserve(math.prod(self._shape) * self.dtype.itemsize, size)
        self._map: mmap.mmap | None = area
        self.rows = torch.frombuffer(area, dtype=self.dtype).view(self._shape)
        self.layers: list[torch.Tensor] = list(self.rows.unbind(0))
        # The same memory as plain words, since numpy knows no bfloat16.
        self._word = np.dtype(f"u{self.dtype.itemsize}")
        self._words = np.frombuffer(area, self._word).reshape(self._shape)
        self._spare = Spare(spare_bytes // (self.bytes_per_token * self.page_size))
        self._lock = threading.Lock()  # of what is spare: pages are freed beside a pass

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row over all layers, K and V."""
        return self._shape[0] * self._shape[1] * self._row_bytes

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Run the row copies of a batch, in order."""
        copy_rows(self.rows, copies, self.page_size)

    def read(self, spans: Sequence[Span]) -> bytearray:
        """Rows of consecutive spans as bytes, [layers, 2*Hk, n, D]."""
        out = bytearray(self.bytes_per_token * sum(span.length for span in spans))
        self.read_into(spans, out)
        return out

    def read_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """The same into a buffer of that many bytes.  rest: called after each layer."""
        layers, heads, _, dim = self._shape
        count = sum(span.length for span in spans)
        run = np.frombuffer(out, self._word).reshape(layers, heads, count, dim)
        runs = [piece for span in spans for piece in runs_of(span, self.page_size)]
        for layer in range(layers):
            done = 0
            for row, rows in runs:
                run[layer, :, done : done + rows] = self._words[layer, :, row : row + rows]
                done += rows
            if rest is not None:
                rest()

    def write(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """Write the rows from `at` on of a run that `read` gave to the slots of a span."""
        layers, heads, _, dim = self._shape
        run = np.frombuffer(rows, self._word).reshape(layers, heads, -1, dim)
        for row, count in runs_of(span, self.page_size):
            self._words[:, :, row : row + count] = run[:, :, at : at + count]
            at += count

    def discard(self, pages: Sequence[int]) -> None:
        """Pages were freed: give back the memory of long runs of what was freed longest ago.

        As much as `spare_bytes` stays, and short runs do: both will be reused.
        """
        area = self._map
        if area is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        with self._lock:
            gone = self._spare.free(pages)
            if len(gone) >= _RELEASE_PAGES:
                self._give_back(area, sorted(gone))

    def take(self, spans: Sequence[Span]) -> None:
        """The slots of these spans are about to be written; call it before."""
        if len(self._spare):
            with self._lock:
                for span in spans:
                    first, end = span.offset, span.offset + span.length
                    pages = span.pages[first // self.page_size : -(-end // self.page_size)]
                    self._spare.take(pages)

    def _give_back(self, area: mmap.mmap, ordered: Sequence[int]) -> None:
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


def _reserve(nbytes: int, size: KVSize) -> mmap.mmap:
    """Address space for the pool, without memory behind it until a row is written."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        area = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"a KV pool of {size.capacity_pages} pages of {size.page_size} tokens in {size.dtype} "
            f"needs {nbytes / 1e9:.1f} GB, more than this machine can address; "
            "lower capacity_pages"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # huge pages would make one live page cost 2 MB a head
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_NOHUGEPAGE)
    return area
