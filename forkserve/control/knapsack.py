"""Choosing what to admit: a knapsack over pages and time.

Items run one after another in the order of the answer, so each must end before its own deadline.
Value is gain - cost, both in ms.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Item", "exact", "greedy"]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to admit or not.

    gain, cost: ms.  pages: KV pages it takes.  ms: time it runs.  deadline_ms: when it must have
    ended, on the axis of `start_ms`.  group: shares a limit on the number of items.
    """

    gain: float
    cost: float
    pages: int
    ms: float
    deadline_ms: float = inf
    group: Hashable | None = None

    @property
    def net(self) -> float:
        """Value of admitting it, ms."""
        return self.gain - self.cost

    @property
    def density(self) -> tuple[float, float]:
        """G/C, and for equal ones (a free pool costs nothing) gain per ms of running."""
        return (
            self.gain / self.cost if self.cost > 0 else inf,
            self.gain / self.ms if self.ms > 0 else inf,
        )


class _Sack:
    """What is still free while items are put in and taken out."""

    def __init__(self, pages: int, start_ms: float, rooms: Mapping[Hashable | None, int]) -> None:
        self.pages = pages
        self.ms = start_ms
        self.rooms = dict(rooms)

    def fits(self, item: Item) -> bool:
        return (
            item.pages <= self.pages
            and self.ms + item.ms <= item.deadline_ms
            and self.rooms.get(item.group, 1) > 0
        )

    def move(self, item: Item, sign: int) -> None:
        """Put the item in (+1) or take it out (-1)."""
        self.pages -= sign * item.pages
        self.ms += sign * item.ms
        if item.group in self.rooms:
            self.rooms[item.group] -= sign


def exact(
    items: Sequence[Item],
    pages: int,
    start_ms: float = 0.0,
    rooms: Mapping[Hashable | None, int] | None = None,
) -> tuple[int, ...]:
    """Indices of the best set of items that run in the given order.

    rooms: items that each group may still take; a group that is not named has no limit.
    Depth first, bounded by the value of all that is left: up to 2^n steps, so for a dozen items.
    """
    sack = _Sack(pages, start_ms, rooms or {})
    left = [0.0] * (len(items) + 1)
    for i in range(len(items) - 1, -1, -1):
        left[i] = left[i + 1] + max(0.0, items[i].net)
    best_value = 0.0
    best: tuple[int, ...] = ()
    taken: list[int] = []

    def search(i: int, value: float) -> None:
        nonlocal best_value, best
        if value > best_value:
            best_value, best = value, tuple(taken)
        if i == len(items) or value + left[i] <= best_value:
            return
        item = items[i]
        if item.net > 0 and sack.fits(item):
            before = sack.ms
            sack.move(item, 1)
            taken.append(i)
            search(i + 1, value + item.net)
            taken.pop()
            sack.move(item, -1)
            sack.ms = before  # a sum undone in floating point need not give the old value
        search(i + 1, value)

    search(0, 0.0)
    return best


def greedy(
    items: Sequence[Item],
    pages: int,
    start_ms: float = 0.0,
    rooms: Mapping[Hashable | None, int] | None = None,
) -> tuple[int, ...]:
    """Indices of a good set, in the order they should run.

    The best of three: by G/C; by value per share of the capacity used; the best item alone.  The
    last two together reach at least 1/2 of the optimum when one resource (pages, or one common
    deadline) is scarce, and 1/4 when both are.  O(n log n).
    """
    sack = _Sack(pages, start_ms, rooms or {})
    open_items = [i for i, item in enumerate(items) if item.net > 0 and sack.fits(item)]
    if not open_items:
        return ()

    def share(item: Item) -> float:
        used = item.pages / pages if item.pages else 0.0
        room_ms = item.deadline_ms - start_ms
        return used + (item.ms / room_ms if item.ms > 0 else 0.0)

    def per_share(i: int) -> float:
        used = share(items[i])
        return items[i].net / used if used > 0 else inf

    answers = [
        _fill(items, sorted(open_items, key=lambda i: items[i].density, reverse=True), sack),
        _fill(items, sorted(open_items, key=per_share, reverse=True), sack),
        (max(open_items, key=lambda i: items[i].net),),
    ]
    return max(answers, key=lambda answer: sum(items[i].net for i in answer))


def _fill(items: Sequence[Item], order: Sequence[int], free: _Sack) -> tuple[int, ...]:
    """Take what fits, in order, from a copy of `free`."""
    sack = _Sack(free.pages, free.ms, free.rooms)
    taken: list[int] = []
    for i in order:
        if sack.fits(items[i]):
            sack.move(items[i], 1)
            taken.append(i)
    return tuple(taken)
