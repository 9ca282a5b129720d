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
from dataclasses import dataclass, field

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
class Tile:
    """A tile while they are collected.  rows, carried: in the order of the draft."""

    run: int
    low: int
    end: int
    rows: Longs
    carried: Longs
    level: int
    state: bool


@dataclass(slots=True)
class Draft:
    """Tiles while they are collected.  A run, parts[first:end], is one list of keys."""

    parts: list[Part] = field(default_factory=list)
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # first, end, spare keys
    tiles: list[Tile] = field(default_factory=list)
    results: int = 0  # of all tiles


def plan_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> TilePlan:
    """Plan `works`.  scratch: first KV row for fresh rows of works without a write span."""
    return draft_tiles(works, tiling, scratch)[0]


def draft_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> tuple[TilePlan, Longs]:
    """The plan, and [works, 2]: each work's tile that holds its last row, and the one to grow into.

    The second is the first but for a single row close to the end of a cell.
    """
    counts = [len(work.tokens) for work in works]
    starts = np.cumsum([0, *counts])
    fresh = _fresh(works, counts, tiling.page_size, scratch)
    positions = np.concatenate(
        [np.arange(work.start, work.start + n) for work, n in zip(works, counts, strict=True)]
    )
    draft = Draft()
    carried = np.full(positions.size, -1)
    tips: dict[int, int] = {}  # of each work, the tile of its last row
    for piece in pieces_of(works, fresh, tiling):
        rows = np.concatenate([np.arange(starts[u], starts[u + 1]) for u in piece.users])
        spare = 0
        if len(piece.users) == 1:
            user = piece.users[0]
            if counts[user] == 1 and piece.high == works[user].start + 1:
                spare = min(tiling.room, -piece.high % tiling.split)
            tips[user] = _add(draft, piece, rows, positions, carried, tiling, spare)
        else:
            _add(draft, piece, rows, positions, carried, tiling)
    grows = [tips[user] for user in range(len(works))]
    for user, work in enumerate(works):
        ahead = tiling.split - 1 - work.start % tiling.split  # rows until the next cell
        if counts[user] == 1 and ahead < tiling.room:
            empty = Piece((user,), [], work.start + 1 + ahead, work.start + 1 + ahead)
            draft.runs.append((len(draft.parts), len(draft.parts), tiling.room))
            grows[user] = _tile(draft, empty, starts[user : user + 1], -1, empty.low)
    plan, place = _tables(draft, positions, _slots(fresh, tiling.page_size), tiling)
    return plan, place[np.array([[tips[user], grow] for user, grow in enumerate(grows)])]


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


def _slots(spans: Sequence[Span], size: int) -> Longs:
    """KV rows of whole spans."""
    found = []
    for span in spans:
        at = np.arange(span.offset, span.offset + span.length)
        if span.length == 1:
            found.append(span.pages[span.offset // size] * size + at % size)
        else:
            pages = np.asarray(span.pages[: ceil_div(span.offset + span.length, size)])
            found.append(pages[at // size] * size + at % size)
    return np.concatenate(found).astype(np.int64)


# -- tiles -----------------------------------------------------------------------------------------


def _add(
    draft: Draft,
    piece: Piece,
    rows: Longs,
    positions: Longs,
    carried: Longs,
    tiling: Tiling,
    spare: int = 0,
) -> int:
    """A tile for every block of the piece's rows that sees any of it; the last of them.

    carried: of each row the state to go on from; a piece with others behind it leaves its own.
    """
    first = len(draft.parts)
    draft.parts += piece.parts
    draft.runs.append((first, len(draft.parts), spare))
    step = tiling.large_rows if rows.size > tiling.small_rows else tiling.small_rows
    for low in range(0, rows.size, step):
        some = rows[low : low + step]
        at = positions[some]
        end = min(piece.high, int(at.max()) + 1)
        hidden = tiling.window and piece.high <= int(at.min()) - tiling.window + 1
        if end <= piece.low or hidden:
            carried[some] = -1
            continue
        before = draft.results
        _tile(draft, piece, some, carried[some] if piece.before else -1, end)
        if piece.behind:
            carried[some] = np.arange(before, draft.results)
    return len(draft.tiles) - 1


def _tile(draft: Draft, piece: Piece, rows: Longs, carried: Longs | int, end: int) -> int:
    """One tile over the last run."""
    draft.results += rows.size
    states = np.broadcast_to(carried, rows.shape)
    run, state = len(draft.runs) - 1, bool(piece.behind)
    draft.tiles.append(Tile(run, piece.low, end, rows, states, piece.level, state))
    return len(draft.tiles) - 1


def _tables(draft: Draft, positions: Longs, slots: Longs, tiling: Tiling) -> tuple[TilePlan, Longs]:
    """The draft as arrays, and where each of its tiles went."""
    keys, begins = _keys(draft, tiling.page_size)
    made = draft.tiles
    sizes = np.array([tile.rows.size for tile in made])
    levels = np.array([tile.level for tile in made])
    states = np.array([tile.state for tile in made])
    tiles = np.empty((len(made), 6), np.int32)
    tiles[:, 0] = begins[[tile.run for tile in made]]
    tiles[:, 1] = [tile.low for tile in made]
    tiles[:, 2] = [tile.end for tile in made]
    tiles[:, 4] = sizes
    # Level by level; in each small tiles first, the longest of a kind before the others.
    large = sizes > tiling.small_rows
    order = np.lexsort((tiles[:, 1] - tiles[:, 2], large, levels))
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    tiles, sizes, states = tiles[order], sizes[order], states[order]
    ends = np.cumsum(sizes)
    tiles[:, 3] = ends - sizes
    moved = _moved(np.array([tile.rows.size for tile in made]), tiles[place, 3])
    rows = np.concatenate([made[i].rows for i in order])
    carried = np.concatenate([made[i].carried for i in order])
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
                [np.count_nonzero((levels == level) & (large == kind)) for kind in (False, True)]
                for level in range(LEVELS)
            ],
            np.int32,
        ),
        keys=keys,
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


def _moved(sizes: Longs, firsts: Ints) -> Longs:
    """Where each result of the draft went.  firsts: of each of its tiles, the first result now."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(firsts - before, sizes) + np.arange(sizes.sum())


def _keys(draft: Draft, size: int) -> tuple[Ints, Longs]:
    """KV rows of all runs, spare ones behind each, and where each run begins."""
    starts = np.array([span.offset + low for span, low, _ in draft.parts])
    ends = np.array([span.offset + high for span, _, high in draft.parts])
    first, last = starts // size, -(-ends // size)
    flat: list[int] = []
    for (span, _, _), a, b in zip(draft.parts, first.tolist(), last.tolist(), strict=True):
        flat += span.pages[a:b]
    pages = last - first
    shift = np.cumsum(pages) - pages - first  # from a page of the span to its place in `flat`
    counts = ends - starts
    sums = np.concatenate([[0], np.cumsum(counts)])
    slot = np.arange(sums[-1]) + np.repeat(starts - sums[:-1], counts)
    rows = np.array(flat, np.int64)[np.repeat(shift, counts) + slot // size] * size + slot % size
    runs = np.array(draft.runs).T  # first part, end part, spare
    sizes = sums[runs[1]] - sums[runs[0]]
    begins = np.cumsum(sizes + runs[2]) - sizes - runs[2]
    keys = np.zeros(int(sizes.sum() + runs[2].sum()), np.int32)
    keys[np.arange(sums[-1]) + np.repeat(begins - sums[runs[0]], sizes)] = rows
    return keys, begins
