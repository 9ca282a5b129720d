"""Plans of native attention: the works of a batch as flat tables, and what C++ makes of them.

The structures mirror attention.h and kv.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError
from forkserve.types import RowCopy, Span, Work

__all__ = [
    "AttentionPlan",
    "Pool",
    "Tables",
    "copy_rows",
    "gather",
    "read_rows",
    "tables_of",
    "write_rows",
]

Ints = npt.NDArray[np.int32]
_POINTER = ctypes.c_void_p
_GONE = "gone"  # key of slots that stand for rows out of every window
_ERRORS = {
    1: "this shape of attention has no native kernel (index {0})",
    2: "page table entry {0} names a page outside the pool",
    3: "the context of work {0} does not tile the positions before it, or lacks pages",
    4: "the write span of work {0} does not follow its context, or lacks pages",
    5: "work {0} and those before it replay more rows than there are scratch rows",
    6: "work {0} has no tokens, or a negative position",
}
_MEMORY = 7


class Pool(ctypes.Structure):
    """KV of all layers in memory; see kv.h.  rows: of one head, with the scratch rows.

    paired: attention rounds its other operands to bfloat16 too.
    """

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("bf16", ctypes.c_int64),
        ("paired", ctypes.c_int64),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("kv_heads", "group", "dim", "page", "pages", "scratch", "threads", "window")
    ]


_TABLES = (
    *("count", "start", "use_end", "write", "use_run", "use_length"),
    *("run_start", "run_offset", "run_page", "pages"),
)


class _Spans(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("works", "uses", "runs", "n_pages")),
        *((name, ctypes.c_void_p) for name in _TABLES),
    ]


@dataclass(frozen=True, slots=True)
class Tables:
    """Flat tables of a batch; `spans` points into `arrays`.

    runs: what `gather` made them from; those that contexts read come first.
    """

    spans: Any
    arrays: list[Ints]
    runs: list[Span]


def tables_of(arrays: list[Ints], runs: list[Span]) -> Tables:
    """Tables of these arrays, in the order of `_TABLES`."""
    sizes = (arrays[0].size, arrays[4].size, arrays[6].size, arrays[9].size)
    return Tables(_Spans(*sizes, *(array.ctypes.data for array in arrays)), arrays, runs)


def gather(works: Sequence[Work], page_size: int, window: int = 0) -> Tables:
    """The tables that `AttentionPlan.build` takes.  Spans with equal keys become one run.

    window: the longest of the layers' windows if each has one, else 0.  A context may begin above
    position 0 then, at the first row that is in it: the kernels count positions from 0, so a run of
    slots that nothing reads stands for those before.
    """
    context = [[span for span in work.context if span.length] for work in works]
    if window:
        for work, spans in zip(works, context, strict=True):
            low = spans[0].start if spans else work.start
            if 0 < low <= max(work.start - window + 1, 0):
                spans.insert(0, Span((_GONE, low), [0] * -(-low // page_size), 0, low))
    longest: dict[Hashable, Span] = {}
    for spans in context:
        for span in spans:
            known = longest.get(span.key)
            if known is None or span.length > known.length:
                longest[span.key] = span
    number = {key: i for i, key in enumerate(longest)}
    runs = list(longest.values())
    write = []
    for work in works:
        write.append(-1 if work.write is None else len(runs))
        if work.write is not None:
            runs.append(work.write)
    pages: list[int] = []
    first = [0]
    for run in runs:
        pages += run.pages[: -(-(run.offset + run.length) // page_size)]
        first.append(len(pages))
    lists = (
        [len(work.tokens) for work in works],
        [work.start for work in works],
        list(accumulate(len(spans) for spans in context)),
        write,
        [number[span.key] for spans in context for span in spans],
        [span.length for spans in context for span in spans],
        [run.start for run in runs],
        [run.offset for run in runs],
        first,
        pages,
    )
    return tables_of([np.array(values, dtype=np.int32) for values in lists], runs)


class AttentionPlan:
    """What one batch's attention does, for all layers of one window.  Reused from batch to batch.

    library: see `load`.  pages: of the pool, with those from `scratch_page` on, which take the
    fresh rows of works without a write span.  window: rows that a row sees, itself included; 0: all
    before it.  `handle` is the ``fs::Plan*``.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        kv_heads: int,
        group: int,
        head_dim: int,
        page_size: int,
        pages: int,
        scratch_page: int,
        threads: int,
        window: int = 0,
    ) -> None:
        self._library = library
        library.fs_plan_new.restype = _POINTER
        library.fs_plan_free.argtypes = [_POINTER]
        library.fs_plan_build.argtypes = [_POINTER] * 4
        library.fs_plan_counts.argtypes = [_POINTER] * 2
        numbers = [ctypes.c_float] * 2
        library.fs_attend.argtypes = [*[_POINTER] * 2, ctypes.c_int64, *[_POINTER] * 4, *numbers]
        self._shape = _Shape(
            kv_heads, group, head_dim, page_size, pages, scratch_page, threads, window
        )
        self.handle: int | None = library.fs_plan_new()
        if self.handle is None:
            raise MemoryError("no memory for a plan of attention")

    def build(self, tables: Tables) -> None:
        """Plan a batch.

        Raises `BackendError` for spans that don't make sense, `MemoryError` where a smaller batch
        may still fit.
        """
        if self.handle is None:
            raise BackendError("this plan is closed")
        where = ctypes.c_int64()
        shape, spans = ctypes.byref(self._shape), ctypes.byref(tables.spans)
        error = self._library.fs_plan_build(self.handle, shape, spans, ctypes.byref(where))
        if error == _MEMORY:
            raise MemoryError("no memory to plan the attention of this batch")
        if error:
            raise BackendError(_ERRORS[error].format(where.value))

    @property
    def counts(self) -> dict[str, int]:
        """How the batch was cut up; rows_read: KV rows read per kv head, what sharing saves."""
        names = ("rows", "units", "parts", "items", "cut_rows", "rows_read")
        values = (ctypes.c_int64 * len(names))()
        self._library.fs_plan_counts(self.handle, values)
        return dict(zip(names, values, strict=True))

    def attend(
        self,
        pool: Pool,
        q: npt.NDArray[np.float32],
        fresh: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None,
        *,
        layer: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> npt.NDArray[np.float32]:
        """Attention of one layer by itself, for tests and benchmarks.

        q [n, H, D] rotated; fresh: K and V [n, Hk, D], written first.  Returns [n, H, D].
        Raises `BackendError` where the system gives no threads.
        """
        q = np.ascontiguousarray(q)
        out = np.empty_like(q)
        k, v = (None, None) if fresh is None else (x.ctypes.data for x in fresh)
        scale = self._shape.dim**-0.5 if scale is None else scale
        if self._library.fs_attend(
            *(self.handle, ctypes.byref(pool), layer, q.ctypes.data, k, v, out.ctypes.data),
            *(scale, softcap),
        ):
            threads = self._shape.threads
            raise BackendError(f"cannot start {threads} threads for attention; give fewer threads")
        return out

    def close(self) -> None:
        """Free the plan.  Idempotent."""
        handle, self.handle = getattr(self, "handle", None), None
        if handle is not None:
            self._library.fs_plan_free(handle)

    def __del__(self) -> None:
        self.close()


def copy_rows(library: ctypes.CDLL, pool: Pool, copies: Sequence[RowCopy]) -> None:
    """Run `copies` in order, in every layer; only the named rows move."""
    size = pool.page
    table = np.array(
        [(c.src_page * size + c.src_row, c.dst_page * size + c.dst_row, c.rows) for c in copies],
        dtype=np.int64,
    )
    library.fs_copy_rows(
        ctypes.byref(pool), _POINTER(table.ctypes.data), ctypes.c_int64(len(table))
    )


def read_rows(
    library: ctypes.CDLL,
    pool: Pool,
    runs: Sequence[tuple[int, int]],
    out: bytearray | memoryview,
) -> None:
    """Rows of `runs` (first row of the pool, count) into `out` as bytes, [layers, 2*Hk, n, D].

    Raises `BackendError` if `out` has not exactly their length.
    """
    table = np.array(runs, dtype=np.int64).reshape(-1, 2)
    need = _row_bytes(pool) * int(table[:, 1].sum())
    if len(out) != need:
        raise BackendError(f"these rows take {need} bytes, the buffer has {len(out)}")
    if out:
        at = (ctypes.c_char * need).from_buffer(out)
        library.fs_read_rows(
            ctypes.byref(pool), _POINTER(table.ctypes.data), ctypes.c_int64(len(table)), at
        )


def write_rows(
    library: ctypes.CDLL,
    pool: Pool,
    runs: Sequence[tuple[int, int]],
    rows: bytes | bytearray | memoryview,
    at: int,
) -> None:
    """Write rows from `at` on of what `read_rows` gave to `runs` (first row, count)."""
    table = np.array(runs, dtype=np.int64).reshape(-1, 2)
    source = np.frombuffer(rows, dtype=np.uint8)
    width = _row_bytes(pool)
    have, need = source.size // width, at + int(table[:, 1].sum())
    if source.size % width or need > have:
        raise BackendError(f"a run of {source.size} bytes lacks row {need - 1}; it has {have} rows")
    library.fs_write_rows(
        *(ctypes.byref(pool), _POINTER(table.ctypes.data), ctypes.c_int64(len(table))),
        *(_POINTER(source.ctypes.data), ctypes.c_int64(have), ctypes.c_int64(at)),
    )


def _row_bytes(pool: Pool) -> int:
    return int(pool.layers * 2 * pool.kv_heads * pool.dim * (2 if pool.bf16 else 4))
