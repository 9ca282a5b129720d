"""Turn the works of a batch into attention tasks, once per batch; layers reuse the plan.

A task is (query rows, run of KV rows, causal or not).  Every query row has exactly one *own* task,
which covers at least the row itself, and any number of others, whose results are merged in.

::

    trunk, shared by works 1..k   one task: all rows of the k works stacked, KV read once
    works of one row              their private rows and the row itself, padded, one task for all
    longer works                  fresh rows causally; private context as tasks of its own
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from forkserve.types import Span, Work

__all__ = ["Plan", "Task", "plan_attention", "span_rows"]

Rows = npt.NDArray[np.int64]
Where = slice | torch.Tensor

LONG = 256  # rows: a consecutive run this long is used as a view, shorter ones are gathered
FOLD = 256  # rows: a shared run is folded into its works if that copies no more than this
PAD_SLACK = 64  # rows of padding per work that are cheaper than one more task
SPLIT = 2048  # runs are cut at multiples of this absolute position


@dataclass(frozen=True, slots=True)
class Task:
    """`groups` equal problems: group g has rows/groups query rows and keys/groups KV rows.

    rows: query rows of the batch.  keys: KV rows, a slice if consecutive, else [groups * T] ids.
    mask: [groups, 1, 1, T], 0 or -inf, or None.
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
    """Tasks in order: own tasks first.  slots: KV rows that the batch's fresh K/V go to."""

    tasks: tuple[Task, ...]
    n_rows: int
    slots: Where

    @property
    def keys_read(self) -> int:
        """KV rows read per layer: what sharing saves shows here."""
        return sum(task.n_keys for task in self.tasks)


@dataclass(slots=True)
class _Item:
    """A work while it is planned: its query rows [first, first+n) and private KV rows."""

    first: int
    n: int
    slots: Rows
    private: list[tuple[int, Rows]]  # (absolute position, KV rows)


def span_rows(span: Span, page_size: int, length: int | None = None) -> Rows:
    """KV rows of the first `length` (default all) rows of `span`."""
    length = span.length if length is None else length
    at = np.arange(span.offset, span.offset + length)
    pages = np.asarray(span.pages[: -(-(span.offset + length) // page_size)], dtype=np.int64)
    rows: Rows = pages[at // page_size] * page_size + at % page_size
    return rows


def plan_attention(works: Sequence[Work], page_size: int, scratch: int) -> Plan:
    """Plan `works`.  scratch: first KV row for fresh rows of works without a write span."""
    items: list[_Item] = []
    users: dict[Hashable, list[tuple[int, Span]]] = {}
    first = 0
    for index, work in enumerate(works):
        n = len(work.tokens)
        if work.write is None:
            slots = np.arange(scratch, scratch + n)
            scratch += n
        else:
            slots = span_rows(work.write, page_size)
        items.append(_Item(first, n, slots, []))
        for span in work.context:
            if span.length:
                users.setdefault(span.key, []).append((index, span))
        first += n

    shared = _share(items, users, page_size)
    own, rest = _own_tasks(items)
    every = items[0].slots if len(items) == 1 else np.concatenate([i.slots for i in items])
    return Plan((*own, *shared, *rest), first, _where(every))


def _share(
    items: list[_Item], users: dict[Hashable, list[tuple[int, Span]]], page_size: int
) -> list[Task]:
    """Tasks for the runs that several works attend to; the rest becomes private to its work.

    Spans of one key start at the same row and may end at different ones: [0, shortest) is shared
    by all, the next stretch by those that reach further, and so on.  Stretches with the same
    users, such as the turns of one conversation, are planned together.
    """
    stretches: dict[tuple[int, ...], list[tuple[int, Rows]]] = {}
    for using in users.values():
        using.sort(key=lambda use: use[1].length)
        span = using[-1][1]
        rows = span_rows(span, page_size)
        low = 0
        for rank, (_, shorter) in enumerate(using):
            if shorter.length > low:
                sharing = tuple(sorted(index for index, _ in using[rank:]))
                piece = (span.start + low, rows[low : shorter.length])
                stretches.setdefault(sharing, []).append(piece)
                low = shorter.length
    tasks = []
    for indices, pieces in stretches.items():
        members = [items[index] for index in indices]
        if (len(members) - 1) * sum(piece.size for _, piece in pieces) <= FOLD:
            for item in members:
                item.private += pieces
            continue
        pieces.sort(key=lambda piece: piece[0])
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


def _runs(pieces: list[tuple[int, Rows]]) -> list[Rows]:
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
