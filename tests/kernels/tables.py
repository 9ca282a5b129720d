"""What makes tables of native attention equal."""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.kernels.native.attention import Tables, gather
from forkserve.types import Work

__all__ = ["same"]


def same(got: Tables, works: Sequence[Work], page: int, window: int = 0) -> None:
    """Compare all numbers, and what C++ is told about them."""
    want = gather(works, page, window)
    for mine, fresh in zip(got.arrays, want.arrays, strict=True):
        assert mine.dtype == fresh.dtype
        assert mine.tolist() == fresh.tolist()
    sizes = [name for name, kind in got.spans._fields_[:4]]
    assert [getattr(got.spans, n) for n in sizes] == [getattr(want.spans, n) for n in sizes]
    places = [getattr(got.spans, name) for name, _ in got.spans._fields_[4:]]
    assert places == [array.ctypes.data for array in got.arrays]
