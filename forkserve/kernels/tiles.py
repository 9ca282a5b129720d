"""Turn the forest of a batch into tiles for the attention kernel.

A node of the forest is the rows that one set of works sees.  Its keys are listed as page entries
(page, position of its slot 0, valid slots), so a ragged or frozen tail is one entry with fewer
slots.  A tile is up to a block of query rows over a run of entries::

    shared node    cut at multiples of SPLIT positions; each piece once per tile of all its rows
    short node     folded into its children where that reads less than a part of its own costs
    own rows       private context and fresh rows, cut at the same positions, causal by position

A row with several tiles has a part in each; they are merged by log-sum-exp.  A row with one tile is
written directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forkserve.kernels.forest import Part, Use, stretches
from forkserve.kernels.jit import ceil_div, next_power
from forkserve.types import Span, Work

__all__ = [
    "LARGE",
    "SMALL",
    "SPLIT",
    "TilePlan",
    "Tiling",
    "block_rows",
    "cheaper_folded",
    "plan_tiles",
]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

SMALL, LARGE = 16, 64  # lines (rows x stacked heads) of the two kinds of tile
SPLIT = 512  # nodes are cut at multiples of this absolute position
TILE_COST = 32  # reading this many keys takes as long as starting a tile
SPARE = 4  # pages that a growing row may add before its plan is made anew


def block_rows(group: int, lines: int) -> int:
    """Lines of a tile's block: at least the stacked heads of one row."""
    return max(lines, next_power(group))


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a plan depends on besides the works.  group: query heads of one KV head."""

    page_size: int
    group: int
    window: int = 0
    split: int = SPLIT

    @property
    def small_rows(self) -> int:
        """Query rows of a small tile."""
        return block_rows(self.group, SMALL) // self.group

    @property
    def large_rows(self) -> int:
        """Query rows of a large tile."""
        return block_rows(self.group, LARGE) // self.group

    @property
    def room(self) -> int:
        """Rows that a decoding work may grow by before its plan is made anew."""
        return min(SPARE * self.page_size, self.split)

    def tiles(self, rows: int) -> int:
        """How many tiles `rows` query rows make."""
        return 1 if rows <= self.small_rows else ceil_div(rows, self.large_rows)


def cheaper_folded(keys: int, rows: int, children: Sequence[int], tiling: Tiling) -> bool:
    """Whether `keys` keys that `rows` rows share are better read again by each child.

    children: query rows of each.  Costs are in keys of one KV head, 2*D elements each.  On its own
    a node is read once per tile, starts its tiles, and writes and reads a float32 part of D
    elements per line: two keys' worth of 16-bit elements.  Folded, each tile of a child reads it.
    """
    own = tiling.tiles(rows)
    again = sum(map(tiling.tiles, children))
    return keys * (again - own) <= TILE_COST * own + 2 * rows * tiling.group


@dataclass(slots=True)
class TilePlan:
    """Tables of one batch.  n rows, T tiles (small ones first), E entries, S parts.

    tiles [T, 5]: first and end entry, first row in `rows` (also its first part), rows, and 1 if the
    result is written directly.  rows [S]: query rows, tile by tile.  pages, firsts, bounds [E]:
    page, position of slot 0, valid slots low | high << 16.  begins [n+1], parts [S']: the parts of
    a row.  positions, slots [n]: of the fresh rows.
    """

    tiles: Ints
    small: int
    rows: Ints
    pages: Ints
    firsts: Ints
    bounds: Ints
    begins: Ints
    parts: Ints
    positions: Longs
    slots: Longs

    @property
    def keys_read(self) -> int:
        """Valid KV rows read per KV head: what sharing saves shows here."""
        sizes = (self.bounds >> 16) - (self.bounds & 0xFFFF)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return int((ends[self.tiles[:, 1]] - ends[self.tiles[:, 0]]).sum())


@dataclass(slots=True)
class Node:
    """Rows that `users` see.  own: the one work that they and its fresh rows belong to."""

    users: tuple[int, ...]
    parts: list[Part]
    own: int | None = None

    @property
    def keys(self) -> int:
        """How many rows."""
        return sum(high - low for _, low, high in self.parts)


@dataclass(slots=True)
class Draft:
    """Tiles while they are collected.  A run, parts[first:end], is one list of keys."""

    parts: list[Part] = field(default_factory=list)
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # first, end, spare entries
    tiles: list[tuple[int, Longs, int]] = field(default_factory=list)  # run, rows, last position


def plan_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> TilePlan:
    """Plan `works`.  scratch: first KV row for fresh rows of works without a write span."""
    return draft_tiles(works, tiling, scratch)[0]


def draft_tiles(works: Sequence[Work], tiling: Tiling, scratch: int) -> tuple[TilePlan, Longs]:
    """The plan, and [works, 2]: each work's tile that holds its last row, and the one to grow into.

    The second is the first but for a single row close to a cut.
    """
    counts = [len(work.tokens) for work in works]
    starts = np.cumsum([0, *counts])
    fresh = _fresh(works, counts, tiling.page_size, scratch)
    shared, own = _forest(works, counts, fresh, tiling)
    draft = Draft()
    positions = np.concatenate(
        [np.arange(work.start, work.start + n) for work, n in zip(works, counts, strict=True)]
    )
    for node in shared:
        rows = np.concatenate([np.arange(starts[u], starts[u + 1]) for u in node.users])
        _shared_tiles(draft, node.parts, rows, positions, tiling)
    last = []
    for index, node in enumerate(own):
        last.append(_own_tiles(draft, node.parts, int(starts[index]), works[index], tiling))
    plan, place = _tables(draft, positions, _slots(fresh, tiling.page_size), tiling)
    return plan, place[np.array(last)]


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


# -- the forest ------------------------------------------------------------------------------------


def _forest(
    works: Sequence[Work], counts: list[int], fresh: list[Span], tiling: Tiling
) -> tuple[list[Node], list[Node]]:
    """Shared nodes that are worth tiles of their own, and every work's own node."""
    users: dict[Hashable, list[Use]] = {}
    for index, work in enumerate(works):
        lowest = max(work.start - tiling.window + 1, 0) if tiling.window else 0
        for span in work.context:
            low = max(lowest - span.start, 0)
            if low < span.length:
                users.setdefault(span.key, []).append(Use(index, span, low, span.length))
    own = [Node((index,), [], index) for index in range(len(works))]
    shared: list[Node] = []
    for indices, parts in stretches(users).items():
        if len(indices) == 1:
            own[indices[0]].parts += parts
        else:
            shared.append(Node(indices, list(parts)))
    shared.sort(key=_position)
    kept = _fold(shared, own, counts, tiling)
    for node, span in zip(own, fresh, strict=True):
        node.parts.sort(key=_start)
        node.parts.append((span, 0, span.length))
    return kept, own


def _fold(shared: list[Node], own: list[Node], counts: list[int], tiling: Tiling) -> list[Node]:
    """Move short nodes into what comes next on the paths of their users, from the root down."""
    path: list[list[Node]] = [[node] for node in own]  # of each work, its leaf first
    for node in reversed(shared):
        for user in node.users:
            path[user].append(node)
    kept = []
    for node in shared:
        members = set(node.users)
        children: dict[int, Node] = {}
        for user in node.users:
            path[user].pop()
            below = path[user][-1]
            if not members.issuperset(below.users):  # seen by others too: it can't take this in
                below = own[user]
            children[id(below)] = below
        sizes = [sum(counts[user] for user in child.users) for child in children.values()]
        rows = sum(counts[user] for user in node.users)
        if cheaper_folded(node.keys, rows, sizes, tiling):
            for child in children.values():
                child.parts[:0] = node.parts
        else:
            kept.append(node)
    return kept


def _start(part: Part) -> int:
    return part[0].start + part[1]


def _position(node: Node) -> int:
    return _start(node.parts[0])


# -- tiles -----------------------------------------------------------------------------------------


def _cut(parts: list[Part], split: int) -> list[list[Part]]:
    """`parts`, in ascending position, cut at multiples of `split`."""
    pieces: list[list[Part]] = []
    cell = -1
    for span, low, high in parts:
        while low < high:
            at = span.start + low
            end = min(high, low + split - at % split)
            if at // split != cell:
                cell = at // split
                pieces.append([])
            pieces[-1].append((span, low, end))
            low = end
    return pieces


def _add_run(draft: Draft, parts: list[Part], spare: int = 0) -> int:
    first = len(draft.parts)
    draft.parts += parts
    draft.runs.append((first, len(draft.parts), spare))
    return len(draft.runs) - 1


def _shared_tiles(
    draft: Draft, parts: list[Part], rows: Longs, positions: Longs, tiling: Tiling
) -> None:
    """Every piece once per tile of all the rows."""
    step = tiling.large_rows if rows.size > tiling.small_rows else tiling.small_rows
    for piece in _cut(parts, tiling.split):
        run = _add_run(draft, piece)
        for low in range(0, rows.size, step):
            draft.tiles.append((run, rows[low : low + step], -1))


def _own_tiles(
    draft: Draft, parts: list[Part], first: int, work: Work, tiling: Tiling
) -> tuple[int, int]:
    """The work's own keys; a tile sees those up to its last row.

    A single row that is about to grow over a cut also gets the tile behind it, still empty.
    Returns the tile of the last row, and that one.
    """
    n = len(work.tokens)
    step = tiling.large_rows if n > tiling.small_rows else tiling.small_rows
    pieces = _cut(parts, tiling.split)
    for piece in pieces:
        grows = n == 1 and piece is pieces[-1]
        run = _add_run(draft, piece, SPARE if grows else 0)
        begin = _start(piece[0])
        end = piece[-1][0].start + piece[-1][2]
        for low in range(0, n, step):
            size = min(step, n - low)
            last = work.start + low + size - 1
            hidden = tiling.window and end <= work.start + low - tiling.window + 1
            if begin <= last and not hidden:
                rows = np.arange(first + low, first + low + size)
                draft.tiles.append((run, rows, -1 if last >= end - 1 else last))
    last_tile = len(draft.tiles) - 1
    ahead = tiling.split - 1 - work.start % tiling.split  # rows until the next cut
    if n == 1 and ahead < tiling.room:
        run = _add_run(draft, [], SPARE + 1)
        draft.tiles.append((run, np.array([first]), -1))
    return last_tile, len(draft.tiles) - 1


def _tables(draft: Draft, positions: Longs, slots: Longs, tiling: Tiling) -> tuple[TilePlan, Longs]:
    """The draft as arrays, and where each of its tiles went."""
    pages, firsts, bounds, begins, ends = _entries(draft, tiling.page_size)
    runs = np.array([run for run, _, _ in draft.tiles])
    sizes = np.array([rows.size for _, rows, _ in draft.tiles])
    tiles = np.empty((runs.size, 5), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 3] = begins[runs], ends[runs], sizes
    for index, (_, _, last) in enumerate(draft.tiles):
        if last >= 0:  # causal: entries that begin behind the tile's last row are left out
            low, high = tiles[index, :2]
            seen = firsts[low:high] + (bounds[low:high] & 0xFFFF) <= last
            tiles[index, 1] = low + np.count_nonzero(seen)
    # Small tiles first; within a kind the longest first, so that none is left to run alone.
    large = sizes > tiling.small_rows
    order = np.lexsort((tiles[:, 0] - tiles[:, 1], large))
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    tiles = tiles[order]
    rows = np.concatenate([draft.tiles[i][1] for i in order])
    tiles[:, 2] = np.cumsum(tiles[:, 3]) - tiles[:, 3]
    seen_by = np.bincount(rows, minlength=positions.size)
    tiles[:, 4] = np.maximum.reduceat(seen_by[rows], tiles[:, 2]) == 1
    # Parts of a row in the order in which its tiles were drafted: root first.
    drafted = np.repeat(order, tiles[:, 3])
    parts = np.lexsort((drafted, rows))
    parts = parts[np.repeat(tiles[:, 4] == 0, tiles[:, 3])[parts]]
    merged = np.bincount(rows[parts], minlength=positions.size)
    plan = TilePlan(
        tiles=tiles,
        small=int(np.count_nonzero(~large)),
        rows=rows.astype(np.int32),
        pages=pages,
        firsts=firsts,
        bounds=bounds,
        begins=np.concatenate([[0], np.cumsum(merged)]).astype(np.int32),
        parts=parts.astype(np.int32),
        positions=positions.astype(np.int64),
        slots=slots,
    )
    return plan, place


def _entries(draft: Draft, size: int) -> tuple[Ints, Ints, Ints, Longs, Longs]:
    """Page entries of all runs, and the first and end entry of each run (spare ones excluded)."""
    starts = np.array([span.start for span, _, _ in draft.parts])
    offsets = np.array([span.offset for span, _, _ in draft.parts])
    lows = offsets + np.array([low for _, low, _ in draft.parts])
    highs = offsets + np.array([high for _, _, high in draft.parts])
    first, end = lows // size, -(-highs // size)
    counts = end - first
    flat: list[int] = []
    for (span, _, _), a, b in zip(draft.parts, first.tolist(), end.tolist(), strict=True):
        flat += span.pages[a:b]
    # Where the entries of each part go: run by run, spare ones behind each run.
    sums = np.concatenate([[0], np.cumsum(counts)])
    runs = np.array(draft.runs).T  # first part, end part, spare
    sizes = sums[runs[1]] - sums[runs[0]]
    begins = np.cumsum(sizes + runs[2]) - sizes - runs[2]
    places = sums[:-1] + np.repeat(begins - sums[runs[0]], runs[1] - runs[0])
    before, total = sums[:-1], int(sizes.sum() + runs[2].sum())
    index = np.arange(counts.sum()) - np.repeat(before, counts)  # within its part
    number = np.repeat(first, counts) + index  # page of the span
    base = number * size
    at = np.repeat(places, counts) + index
    pages, firsts, bounds = (np.zeros(total, np.int32) for _ in range(3))
    pages[at] = flat
    firsts[at] = np.repeat(starts - offsets, counts) + base
    low = np.maximum(np.repeat(lows, counts) - base, 0)
    high = np.minimum(np.repeat(highs, counts) - base, size)
    bounds[at] = low | high << 16
    return pages, firsts, bounds, begins, begins + sizes
