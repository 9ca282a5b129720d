"""Debugging: what a batch wants to write must not be a row that somebody reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError
from forkserve.kernels.plan import span_rows
from forkserve.types import Batch, Work

__all__ = ["refuse_writes"]

_Rows = npt.NDArray[np.int64]


def refuse_writes(batch: Batch, page_size: int) -> None:
    """Raise BackendError if a work would write a row that stands, or one that its batch reads.

    `batch.standing` says which rows stand: those in the page pool's books, whoever reads them.
    """
    read = _rows_read(batch.works, page_size)
    for work in batch.works:
        if work.write is None:
            continue
        rows = span_rows(work.write, page_size)
        pages, slots = np.divmod(rows, page_size)
        standing = _standing(batch.standing, pages) > slots
        taken = standing | np.isin(rows, read)
        if taken.any():
            at = int(taken.argmax())
            why = (
                "whose row stands in a sealed segment or the prefix index"
                if standing[at]
                else "which another work of its batch reads"
            )
            raise BackendError(
                f"a work of node {work.node} wants to write slot {slots[at]} of page {pages[at]}, "
                f"{why}; nothing was written"
            )


def _standing(standing: Mapping[int, int], pages: _Rows) -> _Rows:
    return np.array([standing.get(page, 0) for page in pages.tolist()], np.int64)


def _rows_read(works: Sequence[Work], page_size: int) -> _Rows:
    rows = [span_rows(span, page_size) for work in works for span in work.context]
    return np.concatenate(rows) if rows else np.empty(0, np.int64)
