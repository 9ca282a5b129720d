"""Turn the pieces of a batch into tiles for the attention kernel.

A tile is up to a block of query rows over the keys of one piece::

    shared piece   once per tile of all its rows
    own piece      of one work, fresh rows among them: causal by position

A row has one part in each cell that it sees, and the parts are merged by log-sum-exp in ascending
order; a row with one part is written directly.  `forkserve.kernels.pieces` says what a piece is,
and why none of this shows in a row's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forkserve.kernels.forest import Part
from forkserve.kernels.jit import ceil_div
from forkserve.kernels.merge import BLOCK as MERGED
from forkserve.kernels.pieces import LEVELS, Piece, Tiling, pieces_of
from forkserve.types import Span, Work

__all__ = ["DIRECT", "PART", "STATE", "TilePlan", "draft_tiles", "plan_tiles"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# What becomes of a tile's result: a part to be merged, the row's output, a state to go on from.
PART, DIRECT, STATE = 0, 1, 2


@dataclass(slots=True)
class TilePlan:
    """Tables of one batch.  n rows, T tiles, K keys, S results of a row in a tile.

    tiles [T, 6]: its first place in `keys`, the position of that key, the one behind the last key,
    its first place in `rows`, rows, and one of PART, DIRECT, STATE.  Level by level, in each the
    small ones first; counts [LEVELS, 2]: how many of each.  keys [K]: KV rows.  rows [S]: query
    rows, tile by tile.  carried [S]: the result whose state this one goes on from, or -1.
    begins [n+1], parts [S']: the parts of a row, and leads [n]: the cell of the first of them
    modulo the parts that are merged at a time.  positions, slots [n]: of the fresh rows.
    block: keys of a step.
    """

    tiles: Ints
    counts: Ints
    keys: Ints
    rows: Ints
    carried: Ints
    begins: Ints
    parts: Ints
    leads: Ints
    positions: Longs
    slots: Longs
    block: int

    @property
    def keys_read(self) -> int:
        """KV rows read per KV head: what sharing saves shows here."""
        return int((self.tiles[:, 2] - self.tiles[:, 1]).sum())


@dataclass(slots=True)
class Draft:
    """Tiles [T] in the order of their pieces, and their results [S], tile after tile.

    runs: number of each tile's piece.  ends: the position behind its last key.  states: whether
    it leaves a state.  sizes: query rows.  rows, carried: as in a plan, but for the order.
    """

    runs: Longs
    lows: Longs
    ends: Longs
    levels: Longs
    states: Bools
    sizes: Longs
    rows: Longs
    carried: Longs


def plan_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> TilePlan:
    """Plan `works`.  scratch: first KV row for fresh rows of works without a write span."""
    return draft_tiles(works, tiling, scratch)[0]


def draft_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> tuple[TilePlan, Longs]:
    """The plan, and [works, 2]: each work's tile that holds its last row, and the one to grow into.

    The second is the first but for a single row close to the end of a cell.
    """
    counts = np.array([len(work.tokens) for work in works])
    begins = np.array([work.start for work in works])
    positions = _ranges(begins, counts)
    fresh = _fresh(works, counts.tolist(), tiling.page_size, scratch)
    pieces = pieces_of(works, fresh, tiling)
    number = len(pieces)
    # A branch has spare keys up to the end of its cell, and close to that an empty piece behind.
    ahead = tiling.split - 1 - begins % tiling.split  # rows until the next cell
    close = np.flatnonzero((counts == 1) & (ahead < tiling.room))
    lows = (begins + 1 + ahead)[close].tolist()
    pieces += [
        Piece((u,), [], low, low, rows=1) for u, low in zip(close.tolist(), lows, strict=True)
    ]
    alone = np.flatnonzero([len(piece.users) == 1 for piece in pieces[:number]])
    users = np.array([pieces[i].users[0] for i in alone])
    highs = np.array([pieces[i].high for i in alone])
    spare = np.zeros(len(pieces), np.int64)
    grown = (counts[users] == 1) & (highs == begins[users] + 1)
    spare[alone] = np.where(grown, np.minimum(tiling.room, -highs % tiling.split), 0)
    spare[number:] = tiling.room
    draft = _draft(pieces, counts, positions, tiling)
    last = np.searchsorted(draft.runs, np.arange(len(pieces)), "right") - 1  # tile of each piece
    tips = np.empty(len(works), np.int64)
    tips[users] = last[alone]  # pieces ascend: what stays is the one with the last row
    grows = tips.copy()
    grows[close] = last[number:]
    slots, _ = _kv_rows([(span, 0, span.length) for span in fresh], tiling.page_size)
    plan, place = _tables(draft, _keys(pieces, spare, tiling.page_size), positions, slots, tiling)
    return plan, place[np.stack([tips, grows], 1)]


def _ranges(firsts: Longs, counts: Longs) -> Longs:
    """[first, first + count) one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - ends + counts, counts) + np.arange(counts.sum())


def _fresh(works: Sequence[Work], counts: list[int], size: int, scratch: int) -> list[Span]:
    """Where each work's fresh rows go."""
    spans = []
    for work, n in zip(works, counts, strict=True):
        if work.write is not None:
            spans.append(work.write)
            continue
        pages = range(scratch // size, ceil_div(scratch + n, size))
        spans.append(Span(("scratch", scratch), pages, work.start, n, scratch % size))
        scratch += n
    return spans


def _kv_rows(parts: Sequence[Part], size: int) -> tuple[Longs, Longs]:
    """KV rows of parts of spans, one part after the other, and how many each has."""
    starts = np.array([span.offset + low for span, low, _ in parts])
    ends = np.array([span.offset + high for span, _, high in parts])
    first, last = starts // size, -(-ends // size)
    flat: list[int] = []
    for (span, _, _), a, b in zip(parts, first.tolist(), last.tolist(), strict=True):
        flat += span.pages[a:b]
    pages, counts = last - first, ends - starts
    shift = np.cumsum(pages) - pages - first  # from a page of the span to its place in `flat`
    slot = _ranges(starts, counts)
    page = np.array(flat, np.int64)[np.repeat(shift, counts) + slot // size]
    return page * size + slot % size, counts


# -- tiles -----------------------------------------------------------------------------------------


def _draft(pieces: Sequence[Piece], counts: Longs, positions: Longs, tiling: Tiling) -> Draft:
    """A tile for every block of a piece's rows that sees any of it, or where it has no key yet.

    A row goes on from the state that it left in the piece before, if it saw that one.
    """
    numbers = {piece: number for number, piece in enumerate(pieces)}
    users = np.concatenate([piece.users for piece in pieces])
    rows = _ranges((np.cumsum(counts) - counts)[users], counts[users])
    of_piece = np.array([piece.rows for piece in pieces])
    step = np.where(of_piece > tiling.small_rows, tiling.large_rows, tiling.small_rows)
    tiles = -(-of_piece // step)
    runs = np.repeat(np.arange(len(pieces)), tiles)
    number = _ranges(np.zeros_like(tiles), tiles)  # of a tile within its piece
    sizes = np.minimum(step[runs], of_piece[runs] - number * step[runs])
    lows = np.array([piece.low for piece in pieces])[runs]
    highs = np.array([piece.high for piece in pieces])[runs]
    first = np.cumsum(sizes) - sizes
    ends = np.clip(np.maximum.reduceat(positions[rows], first) + 1, lows, highs)
    seen = (ends > lows) | (highs == lows)
    if tiling.window:
        seen &= highs > np.minimum.reduceat(positions[rows], first) - tiling.window + 1
    rows = rows[np.repeat(seen, sizes)]
    runs, sizes = runs[seen], sizes[seen]
    # A result by its piece and row, in ascending order, and the one that it goes on from.
    of_result = np.repeat(runs, sizes)
    before = np.array([numbers[p.before] if p.before is not None else -1 for p in pieces])
    own = of_result * positions.size + rows
    wanted = before[of_result] * positions.size + rows
    carried = np.minimum(np.searchsorted(own, wanted), own.size - 1)
    carried[own[carried] != wanted] = -1
    levels = np.array([piece.level for piece in pieces])
    states = np.array([bool(piece.behind) for piece in pieces])
    return Draft(runs, lows[seen], ends[seen], levels[runs], states[runs], sizes, rows, carried)


def _tables(
    draft: Draft, keys: tuple[Ints, Longs], positions: Longs, slots: Longs, tiling: Tiling
) -> tuple[TilePlan, Longs]:
    """The draft as tables, and where each of its tiles went.  keys: see `_keys`."""
    # Level by level; in each small tiles first, the longest of a kind before the others.
    large = _large(draft, tiling)
    order = np.lexsort((draft.lows - draft.ends, large, draft.levels))
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    sizes, states = draft.sizes[order], draft.states[order]
    tiles = np.empty((order.size, 6), np.int32)
    tiles[:, 0] = keys[1][draft.runs[order]]
    tiles[:, 1] = draft.lows[order]
    tiles[:, 2] = draft.ends[order]
    tiles[:, 3] = np.cumsum(sizes) - sizes
    tiles[:, 4] = sizes
    source = _ranges((np.cumsum(draft.sizes) - draft.sizes)[order], sizes)
    moved = np.empty_like(source)
    moved[source] = np.arange(source.size)
    rows, carried = draft.rows[source], draft.carried[source]
    carried = np.where(carried >= 0, moved[carried], -1)
    # The parts of a row, cell by cell: of the cells that it sees, and of the one it grows into.
    low, end = np.repeat(tiles[:, 1], sizes), np.repeat(tiles[:, 2], sizes)
    cells = low // tiling.split
    at = positions[rows]
    sees = (at >= low) | (low == end)
    if tiling.window:
        sees &= at - tiling.window + 1 < (cells + 1) * tiling.split
    final = sees & ~np.repeat(states, sizes)
    seen_by = np.bincount(rows[final], minlength=positions.size)
    alone = np.minimum.reduceat(final & (seen_by[rows] == 1), tiles[:, 3])
    tiles[:, 5] = np.where(states, STATE, np.where(alone, DIRECT, PART))
    merged = final & np.repeat(tiles[:, 5] == PART, sizes)
    parts = np.lexsort((cells, rows))
    parts = parts[merged[parts]]
    numbers = np.bincount(rows[parts], minlength=positions.size)
    row_begins = np.concatenate([[0], np.cumsum(numbers)])
    leads = np.zeros(positions.size, np.int32)
    there = numbers > 0
    leads[there] = cells[parts[row_begins[:-1][there]]] % MERGED
    plan = TilePlan(
        tiles=tiles,
        counts=np.array(
            [
                [np.count_nonzero((draft.levels == i) & (large == kind)) for kind in (False, True)]
                for i in range(LEVELS)
            ],
            np.int32,
        ),
        keys=keys[0],
        rows=rows.astype(np.int32),
        carried=carried.astype(np.int32),
        begins=row_begins.astype(np.int32),
        parts=parts.astype(np.int32),
        leads=leads,
        positions=positions.astype(np.int64),
        slots=slots,
        block=tiling.block,
    )
    return plan, place


def _large(draft: Draft, tiling: Tiling) -> Bools:
    """Which tiles run in large blocks: those with many rows, and a few small ones beside them.

    Kinds are launches of their own, one after the other.  A small tile in a large block reads no
    more, so beside large ones the small ones have a launch only if they fill the GPU by themselves.
    """
    large = draft.sizes > tiling.small_rows
    for level in range(LEVELS):
        here = draft.levels == level
        small = np.count_nonzero(here & ~large)
        if large[here].any() and small * tiling.kv_heads < tiling.wave:
            large |= here
    return large


def _keys(pieces: Sequence[Piece], spare: Longs, size: int) -> tuple[Ints, Longs]:
    """KV rows of the pieces, `spare` ones behind each, and where those of each piece begin."""
    rows, counts = _kv_rows([part for piece in pieces for part in piece.parts], size)
    sums = np.concatenate([[0], np.cumsum(counts)])
    ends = np.cumsum([len(piece.parts) for piece in pieces])
    sizes = np.diff(sums[ends], prepend=0)
    begins = np.cumsum(sizes + spare) - sizes - spare
    keys = np.zeros(int(sizes.sum() + spare.sum()), np.int32)
    keys[_ranges(begins, sizes)] = rows
    return keys, begins
