"""Which keys a batch's rows read together: the forest of a batch, cut into pieces.

A *cell* is SPLIT positions from a multiple of SPLIT on, a *block* BLOCK of them.  A row folds the
blocks of a cell in ascending order and then its cells, so its sums have one order, whatever the
batch.  A *piece* is keys of one cell that a set of works sees, whole blocks but at the end of a
path.  Where a path leaves a shared piece within a cell, the rows behind it go on from the state
(maximum, sum, values) that the shared piece left, which is the same as never having stopped::

    cell      | 0 ............................................ 511 |
    shared    [0 ......... 287]                                      read once, leaves a state
    branch 1                   [288 .... 301 | fresh]                goes on from it
    branch 2                   [288 .... 301 | fresh]                rows 288..301 are read again
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from forkserve.kernels.forest import Part, Use, stretches
from forkserve.kernels.jit import ceil_div, next_power
from forkserve.types import Span, Work

__all__ = ["BLOCK", "LARGE", "LEVELS", "SMALL", "SPLIT", "Piece", "Tiling", "block_rows"]
__all__ += ["cheaper_folded", "pieces_of"]

# Lines (rows x stacked heads) of the two kinds of tile.  From 64 on Hopper takes another matrix
# instruction, which nobody promises to round like the one of small tiles.
SMALL, LARGE = 16, 32
SPLIT = 512  # cells begin at multiples of this absolute position
BLOCK = 32  # keys of one step of the kernel
LEVELS = 3  # pieces that a row folds one after the other in a cell, each in a launch of its own
SPARE = 4  # pages that a growing row may add before its plan is made anew
# In keys of one KV head: what takes as long as reading so many of them.
TILE_COST = 32  # starting a tile
# A launch that waits for the one before: its start, the last tiles of that one, and the way to its
# own first keys take some 4 microseconds, in which an H200 reads 16 MB, the keys of all heads.
LEVEL_COST = 32768
WAVE = 512  # tiles, each under one KV head, that an H200 works on at a time: 4 in a multiprocessor


def block_rows(group: int, lines: int) -> int:
    """Lines of a tile's block: at least the stacked heads of one row."""
    return max(lines, next_power(group))


@dataclass(frozen=True)
class Tiling:
    """What a plan depends on besides the works.  group: query heads of one KV head.

    split and block belong to what a row's bits are; the costs only to how fast they come.
    level_cost: in keys, those of `kv_heads` heads together.  wave: see `WAVE`.
    """

    page_size: int
    group: int
    window: int = 0
    split: int = SPLIT
    block: int = BLOCK
    level_cost: int = LEVEL_COST
    kv_heads: int = 8
    wave: int = WAVE

    @cached_property
    def small_rows(self) -> int:
        """Query rows of a small tile."""
        return block_rows(self.group, SMALL) // self.group

    @cached_property
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
    a piece is read once per tile, starts its tiles, and writes and reads a float32 state of D
    elements per line: two keys' worth of 16-bit elements.  Folded, each tile of a child reads it.
    """
    own = tiling.tiles(rows)
    again = sum(map(tiling.tiles, children))
    return keys * (again - own) <= TILE_COST * own + 2 * rows * tiling.group


@dataclass(slots=True, eq=False)
class Piece:
    """Keys of one cell at positions [low, high), without a gap; `users` (works) see them all.

    before: the piece of the same cell whose state its rows go on from.  behind: those that go on
    from its own; a piece without any ends the cell for its rows.  level: pieces before it.
    rows: query rows of its users.
    """

    users: tuple[int, ...]
    parts: list[Part]
    low: int
    high: int
    before: Piece | None = None
    behind: list[Piece] = field(default_factory=list)
    level: int = 0
    rows: int = 0
    gone: bool = False  # read by those behind it instead


def pieces_of(works: Sequence[Work], fresh: Sequence[Span], tiling: Tiling) -> list[Piece]:
    """The pieces of `works` in ascending position; those before others come before them.

    fresh: where each work's own rows go.
    """
    counts = [len(work.tokens) for work in works]
    pieces = _chained(_cut(_seen(works, fresh), works, tiling), tiling)
    for piece in pieces:
        piece.rows = sum([counts[user] for user in piece.users])
    for piece in pieces:
        if piece.behind:
            _settle(piece, tiling)
    return _limit([piece for piece in pieces if not piece.gone], tiling)


def _seen(works: Sequence[Work], fresh: Sequence[Span]) -> dict[tuple[int, ...], list[Part]]:
    """Each set of works, and what exactly they see."""
    users: dict[Hashable, list[Use]] = {}
    for index, work in enumerate(works):
        for span in work.context:
            if span.length:
                users.setdefault(span.key, []).append(Use(index, span, 0, span.length))
    seen = stretches(users)
    for index, span in enumerate(fresh):
        seen.setdefault((index,), []).append((span, 0, span.length))
    return seen


def _cut(
    seen: dict[tuple[int, ...], list[Part]], works: Sequence[Work], tiling: Tiling
) -> list[Piece]:
    """Parts as pieces: cut where a cell or a run of positions ends; what no window sees is left."""
    split, window, pieces = tiling.split, tiling.window, []
    for users, parts in seen.items():
        lowest = min(works[user].start for user in users) - window + 1 if window else 0
        last: Piece | None = None
        for span, low, high in parts:
            low = max(low, lowest - span.start)
            while low < high:
                at = span.start + low
                end = min(high, low + split - at % split)
                if last is None or last.high != at or at % split == 0:
                    last = Piece(users, [], at, at)
                    pieces.append(last)
                last.parts.append((span, low, end))
                last.high = span.start + end
                low = end
    pieces.sort(key=lambda piece: piece.low)
    return pieces


def _chained(pieces: list[Piece], tiling: Tiling) -> list[Piece]:
    """Join pieces of a cell to chains: all rows of a piece come from the same one before it."""
    split = tiling.split
    tips: dict[int, Piece] = {}  # of each work, its last piece so far that ends within a cell
    found = []
    for piece in pieces:
        ways: dict[int, tuple[Piece | None, list[int]]] = {}
        if piece.low % split == 0:
            ways[0] = (None, list(piece.users))
        else:
            for user in piece.users:
                tip = tips.get(user)
                if tip is not None and tip.high != piece.low:
                    tip = None  # of an earlier cell, or hidden by this work's window
                ways.setdefault(id(tip), (tip, []))[1].append(user)
        for tip, users in ways.values():
            one = piece
            if len(ways) > 1:
                one = Piece(tuple(users), list(piece.parts), piece.low, piece.high)
            if tip is not None:
                one.before = tip
                tip.behind.append(one)
            if one.high % split:
                tips.update(dict.fromkeys(one.users, one))
            found.append(one)
    return found


def _settle(piece: Piece, tiling: Tiling) -> None:
    """Give those behind `piece` the keys that it does not read itself: an open block, or all."""
    end = piece.high - piece.high % tiling.block
    behind = [below.rows for below in piece.behind]
    if end <= piece.low or cheaper_folded(end - piece.low, piece.rows, behind, tiling):
        _fold(piece)
    elif end < piece.high:
        kept, tail = _divide(piece.parts, end)
        piece.parts, piece.high = kept, end
        for below in piece.behind:
            below.parts, below.low = tail + below.parts, end


def _divide(parts: list[Part], end: int) -> tuple[list[Part], list[Part]]:
    """What lies before position `end`, and what does not."""
    kept: list[Part] = []
    tail: list[Part] = []
    for span, low, high in parts:
        middle = min(max(end - span.start, low), high)
        if low < middle:
            kept.append((span, low, middle))
        if middle < high:
            tail.append((span, middle, high))
    return kept, tail


def _fold(piece: Piece) -> None:
    """Those behind `piece` read it again, each for itself."""
    piece.gone = True
    for below in piece.behind:
        below.parts, below.low, below.before = piece.parts + below.parts, piece.low, piece.before
    if piece.before is not None:
        at = piece.before.behind.index(piece)
        piece.before.behind[at : at + 1] = piece.behind


def _limit(pieces: list[Piece], tiling: Tiling) -> list[Piece]:
    """Fold whole levels until there are few enough and each is worth its launch."""
    while True:
        saved: dict[int, int] = {}
        for piece in pieces:
            piece.level = piece.before.level + 1 if piece.before is not None else 0
            if piece.behind:
                again = sum(tiling.tiles(below.rows) for below in piece.behind)
                keys = (piece.high - piece.low) * (again - tiling.tiles(piece.rows))
                saved[piece.level] = saved.get(piece.level, 0) + keys
        if not saved:
            return pieces
        least = min(saved, key=lambda level: saved[level])
        if len(saved) < LEVELS and saved[least] * tiling.kv_heads >= tiling.level_cost:
            return pieces
        for piece in pieces:
            if piece.behind and piece.level == least:
                _fold(piece)
        pieces = [piece for piece in pieces if not piece.gone]
