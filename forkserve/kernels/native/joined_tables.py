"""Tables of a batch out of those of its first works and those of the others.

Apart, both list the runs of rows that both read; together these are listed once, with the pages
that the one who reads further needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
import numpy.typing as npt

from forkserve.kernels.native.attention import Ints, Tables, tables_of

__all__ = ["join"]

Bools = npt.NDArray[np.bool_]


def join(
    front: Tables, back: Tables, numbers: Mapping[Hashable, int], grown: Mapping[int, int]
) -> Tables:
    """The tables that `gather` makes of the works of `front`, which all write, then of `back`'s.

    numbers: by key, of the runs that contexts of `front` read; they come before those that take
    fresh rows.  grown: rows by now of those that have grown since.  Both tables stay as they are.
    """
    mine, writes = len(numbers), len(front.runs) - len(numbers)
    count, start, use_end, write, use_run, use_length, *of_front = front.arrays
    more_count, more_start, more_end, more_write, more_run, more_length, *of_back = back.arrays
    theirs = len(back.runs) - int(np.count_nonzero(more_write >= 0))
    place, fresh = np.empty(theirs, np.int32), np.ones(theirs, np.bool_)
    longer: dict[
        int, int
    ] = {}  # runs of `front` that `back` reads further, and their numbers there
    for i, run in enumerate(back.runs[:theirs]):
        number = numbers.get(run.key)
        if number is not None:
            place[i], fresh[i] = number, False
            if run.length > grown.get(number, front.runs[number].length):
                longer[number] = i
    added = int(np.count_nonzero(fresh))
    place[fresh] = np.arange(mine, mine + added)
    shift = mine + added + writes - theirs
    arrays = [
        np.concatenate([count, more_count]),
        np.concatenate([start, more_start]),
        np.concatenate([use_end, more_end + np.int32(use_run.size)]),
        np.concatenate([write + np.int32(added), np.where(more_write < 0, -1, more_write + shift)]),
        np.concatenate([use_run, place[more_run]]),
        np.concatenate([use_length, more_length]),
        *_runs(of_front, of_back, mine, fresh, longer),
    ]
    return tables_of([array.astype(np.int32, copy=False) for array in arrays], [])


def _runs(
    front: list[Ints],
    back: list[Ints],
    mine: int,
    fresh: npt.NDArray[np.bool_],
    longer: Mapping[int, int],
) -> list[Ints]:
    """Start, offset, first page and pages of runs.

    In order: those that contexts of `front` read, those that only contexts of `back` do, then
    those that take fresh rows.
    """
    start, offset, first, pages = front
    more_start, more_offset, more_first, more_pages = back
    kept = np.concatenate([fresh, np.ones(more_start.size - fresh.size, np.bool_)])
    sizes, more_sizes = np.diff(first), np.diff(more_first)
    new, last = int(np.count_nonzero(fresh)), int(more_first[fresh.size])
    start, offset = start.copy(), offset.copy()
    pieces, done = [], 0
    for number, i in sorted(longer.items()):
        start[number], offset[number] = more_start[i], more_offset[i]
        sizes[number] = more_sizes[i]
        pieces += [pages[done : first[number]], more_pages[more_first[i] : more_first[i + 1]]]
        done = first[number + 1]
    of_contexts = np.repeat(fresh, more_sizes[: fresh.size])
    pieces += [
        *(pages[done : first[mine]], more_pages[:last][of_contexts]),
        *(pages[first[mine] :], more_pages[last:]),
    ]

    def merged(a: Ints, b: Ints) -> Ints:
        chosen = b[kept]
        return np.concatenate([a[:mine], chosen[:new], a[mine:], chosen[new:]])

    ends = np.cumsum(merged(sizes, more_sizes))
    return [
        merged(start, more_start),
        merged(offset, more_offset),
        np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32),
        np.concatenate(pieces),
    ]
