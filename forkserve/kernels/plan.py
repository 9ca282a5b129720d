"""Turn the works of a batch into attention tasks, once per batch; layers reuse the plan.

A task is (query rows, run of KV rows, causal or not).  Every query row has exactly one *own* task,
which covers at least the row itself, and any number of others, whose results are merged in.

::

    trunk, shared by works 1..k   one task: all rows of the k works stacked, KV read once
    works of one row              their private rows and the row itself, padded, one task for all
    longer works                  fresh rows causally; private context as tasks of its own

Layers with a sliding window of w positions have tasks of their own, which name no row that no query
row sees.  There a long work is cut into tiles [a, b) of at most w rows::

    b-w .. a-1        seen by all rows of the tile, so it can be shared like any context
    a-w+1 .. b-w-1    the band: each row sees a little less of it; a task of its own, masked
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from forkserve.kernels.forest import Use, stretches
from forkserve.types import Span, Work

__all__ = ["Plan", "Task", "plan_attention", "span_rows"]

Rows = npt.NDArray[np.int64]
Where = slice | torch.Tensor
Piece = tuple[int, Rows]

LONG = 256  # rows: a consecutive run this long is used as a view, shorter ones are gathered
FOLD = 256  # rows: a shared run is folded into its works if that copies no more than this
PAD_SLACK = 64  # rows of padding per work that are cheaper than one more task
SPLIT = 2048  # runs are cut at multiples of this absolute position
TILE = 512  # rows: longest tile of a work under a window, cut at multiples of its length


@dataclass(frozen=True, slots=True)
class Task:
    """`groups` equal problems: group g has rows/groups query rows and keys/groups KV rows.

    rows: query rows of the batch.  keys: KV rows, a slice if consecutive, else [groups * T] ids.
    mask: [groups, 1, 1, T], or of a band [1, 1, rows, T], 0 or -inf; or None.
    own: first result of its rows; later tasks are merged into it.
    """

    rows: Where
    n_rows: int
    keys: Where
    n_keys: int
    groups: int = 1
    mask: torch.Tensor | None = None
    causal: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks in order: own tasks first.  slots: KV rows that the batch's fresh K/V go to.

    tasks: of layers that see all positions.  windows: of those with a window, by its length.
    """

    tasks: tuple[Task, ...]
    n_rows: int
    slots: Where
    windows: Mapping[int, tuple[Task, ...]] = field(default_factory=dict)

    def of(self, window: int) -> tuple[Task, ...]:
        """Tasks of layers with this window (0: none)."""
        return self.windows[window] if window else self.tasks

    @property
    def keys_read(self) -> int:
        """KV rows read per layer: what sharing saves shows here."""
        return sum(task.n_keys for task in self.tasks)


@dataclass(slots=True)
class _Item:
    """A work, or a tile of one, while it is planned: its query rows [first, first+n).

    slots: KV rows of the query rows themselves.  private: KV rows that all of them see; band: those
    that only some of them see, under a window; both as (absolute position, KV rows).
    """

    first: int
    n: int
    start: int
    slots: Rows
    private: list[Piece]
    band: list[Piece]


def span_rows(span: Span, page_size: int, length: int | None = None) -> Rows:
    """KV rows of the first `length` (default all) rows of `span`."""
    length = span.length if length is None else length
    at = np.arange(span.offset, span.offset + length)
    pages = np.asarray(span.pages[: -(-(span.offset + length) // page_size)], dtype=np.int64)
    rows: Rows = pages[at // page_size] * page_size + at % page_size
    return rows


def plan_attention(
    works: Sequence[Work], page_size: int, scratch: int, windows: Sequence[int] = (0,)
) -> Plan:
    """Plan `works`.  scratch: first KV row for fresh rows of works without a write span.

    windows: those of the model's layers, 0 for a layer that sees all positions.
    """
    slots: list[Rows] = []
    for work in works:
        n = len(work.tokens)
        if work.write is None:
            slots.append(np.arange(scratch, scratch + n))
            scratch += n
        else:
            slots.append(span_rows(work.write, page_size))
    # A window that hides nothing from any row of this batch is none.
    end = max(work.start + len(work.tokens) for work in works)
    reach = {window: window if window < end else 0 for window in windows}
    tasks = {w: _tasks(works, slots, page_size, w) for w in sorted(set(reach.values()))}
    return Plan(
        tasks.get(0, ()),
        sum(rows.size for rows in slots),
        _where(slots[0] if len(slots) == 1 else np.concatenate(slots)),
        {window: tasks[w] for window, w in reach.items() if window},
    )


def _tasks(
    works: Sequence[Work], slots: Sequence[Rows], page_size: int, window: int
) -> tuple[Task, ...]:
    """The tasks of layers with one window (0: none)."""
    items: list[_Item] = []
    users: dict[Hashable, list[Use]] = {}
    first = 0
    for work, rows in zip(works, slots, strict=True):
        if window:
            for item in _tiles(work, first, rows, window):
                _see(item, work, rows, users, len(items), page_size, window)
                items.append(item)
        else:
            for span in work.context:
                if span.length:
                    use = Use(len(items), span, 0, span.length)
                    users.setdefault(span.key, []).append(use)
            items.append(_Item(first, rows.size, work.start, rows, [], []))
        first += rows.size
    shared = _share(items, users, page_size)
    own, rest = _own_tasks(items)
    bands = [_band_task(item, window) for item in items if item.band]
    return (*own, *shared, *rest, *bands)


def _tiles(work: Work, first: int, slots: Rows, window: int) -> list[_Item]:
    """A work in tiles of at most `window` rows, cut at the same positions however it is chunked."""
    size = min(window, TILE)
    end = work.start + slots.size
    inner = range((work.start // size + 1) * size, end, size)
    return [
        _Item(first + a - work.start, b - a, a, slots[a - work.start : b - work.start], [], [])
        for a, b in pairwise([work.start, *inner, end])
    ]


def _see(
    item: _Item,
    work: Work,
    slots: Rows,
    users: dict[Hashable, list[Use]],
    index: int,
    page_size: int,
    window: int,
) -> None:
    """Note what a tile sees before itself: of its work's context and of the tiles before it."""
    first = max(item.start - window + 1, 0)  # position
    common = max(item.start + item.n - window, first)
    for span in work.context:
        low, middle, high = (
            min(max(position - span.start, 0), span.length)
            for position in (first, common, item.start)
        )
        if middle > low:
            item.band.append((span.start + low, span_rows(span, page_size, middle)[low:]))
        if high > middle:
            users.setdefault(span.key, []).append(Use(index, span, middle, high))
    low, middle, high = (max(position - work.start, 0) for position in (first, common, item.start))
    if middle > low:
        item.band.append((work.start + low, slots[low:middle]))
    if high > middle:
        item.private.append((work.start + middle, slots[middle:high]))


def _band_task(item: _Item, window: int) -> Task:
    """The band of a tile, for all its rows but the last, which sees none of it."""
    rows = np.concatenate([piece for _, piece in item.band])
    at = np.concatenate([np.arange(position, position + p.size) for position, p in item.band])
    count = item.n - 1
    mask = None
    if count > 1:
        positions = np.arange(item.start, item.start + count)[:, None]
        hidden = torch.from_numpy(at <= positions - window)
        mask = torch.zeros(count, at.size).masked_fill_(hidden, float("-inf"))
        mask = mask.view(1, 1, count, at.size)
    queries = slice(item.first, item.first + count)
    return Task(queries, count, _where(rows), rows.size, mask=mask)


def _share(items: list[_Item], users: dict[Hashable, list[Use]], page_size: int) -> list[Task]:
    """Tasks for the runs that several works attend to; the rest becomes private to its work."""
    tasks = []
    for indices, parts in stretches(users).items():
        members = [items[index] for index in indices]
        pieces = [(s.start + low, span_rows(s, page_size, high)[low:]) for s, low, high in parts]
        if (len(members) - 1) * sum(piece.size for _, piece in pieces) <= FOLD:
            for item in members:
                item.private += pieces
            continue
        queries = _where(np.concatenate([_query_rows(item) for item in members]))
        n_rows = sum(item.n for item in members)
        tasks += _context_tasks(queries, n_rows, _runs(pieces))
    return tasks


def _own_tasks(items: list[_Item]) -> tuple[list[Task], list[Task]]:
    """(own tasks, further tasks) over the private context and the fresh rows."""
    own: list[Task] = []
    rest: list[Task] = []
    tails: list[tuple[_Item, Rows]] = []
    for item in items:
        item.private.sort(key=lambda piece: piece[0])
        queries = slice(item.first, item.first + item.n)
        context = _runs(item.private)
        if item.n > 1:
            own.append(Task(queries, item.n, _where(item.slots), item.n, causal=True, own=True))
        else:
            last = item.slots
            # The fresh row ends the last run if it lies right behind it: then one run is all.
            if context and context[-1][-1] + 1 == last[0]:
                last = np.append(context.pop(), last)
            if last.size >= LONG:
                own.append(Task(queries, 1, _where(last), last.size, own=True))
            else:
                short = [run for run in context if run.size < LONG]
                context = [run for run in context if run.size >= LONG]
                tails.append((item, np.concatenate([*short, last])))
        rest += _context_tasks(queries, item.n, context)
    return own + _tail_tasks(tails), rest


def _context_tasks(queries: Where, n_rows: int, runs: list[Rows]) -> list[Task]:
    """Tasks of `queries` over `runs`: long ones as views, the others gathered into one."""
    tasks = [Task(queries, n_rows, _where(r), r.size) for r in runs if r.size >= LONG]
    short = [run for run in runs if run.size < LONG]
    if short:
        keys = np.concatenate(short)
        tasks.append(Task(queries, n_rows, _where(keys), keys.size))
    return tasks


def _tail_tasks(tails: list[tuple[_Item, Rows]]) -> list[Task]:
    """One padded task for works of one row, or a few where their lengths differ much."""
    tails.sort(key=lambda tail: -tail[1].size)
    tasks: list[Task] = []
    while tails:
        longest = tails[0][1].size
        count = 1
        while count < len(tails) and 2 * tails[count][1].size + PAD_SLACK >= longest:
            count += 1
        batch, tails = sorted(tails[:count], key=lambda tail: tail[0].first), tails[count:]
        # A padded place names the work's own last row: valid, finite, and masked.
        keys = np.stack([np.pad(rows, (0, longest - rows.size), "edge") for _, rows in batch])
        lengths = np.array([rows.size for _, rows in batch])
        mask = None
        if (lengths < longest).any():
            hidden = torch.from_numpy(np.arange(longest) >= lengths[:, None])
            mask = torch.zeros(count, longest).masked_fill_(hidden, float("-inf"))
            mask = mask.view(count, 1, 1, longest)
        queries = _where(np.array([item.first for item, _ in batch]))
        where = _where(keys.ravel())
        tasks.append(Task(queries, count, where, keys.size, groups=count, mask=mask, own=True))
    return tasks


def _runs(pieces: list[Piece]) -> list[Rows]:
    """Maximal runs of consecutive KV rows over all (absolute position, rows), cut at SPLIT.

    The cuts depend on absolute positions alone, not on how a prefix came to be.
    """
    if not pieces:
        return []
    rows = np.concatenate([piece for _, piece in pieces])
    at = np.concatenate([np.arange(pos, pos + piece.size) for pos, piece in pieces])
    breaks = np.flatnonzero((np.diff(rows) != 1) | (at[1:] % SPLIT == 0)) + 1
    return [rows[a:b] for a, b in pairwise([0, *breaks.tolist(), rows.size])]


def _query_rows(item: _Item) -> Rows:
    return np.arange(item.first, item.first + item.n)


def _where(rows: Rows) -> Where:
    """A slice if `rows` are consecutive, else their ids as a tensor."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.size and (rows.size < 3 or bool((np.diff(rows) == 1).all())):
        return slice(first, last + 1)
    return torch.from_numpy(np.ascontiguousarray(rows))
