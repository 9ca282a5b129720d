"""Which works of a batch see which rows: the forest that a batch's spans describe."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from operator import is_
from typing import NamedTuple

from forkserve.types import Span

__all__ = ["Part", "Use", "alike", "stretches"]

Part = tuple[Span, int, int]  # rows [low, high) of a span


class Use(NamedTuple):
    """An item, by its number, sees rows [low, high) of a span."""

    item: int
    span: Span
    low: int
    high: int


def alike(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether these spans are equal, one by one, and hold the very same lists of pages.

    The pages are not looked at: comparing them takes as long as planning does, and whoever holds
    the lists can watch them.
    """
    return len(spans) == len(others) and (
        all(map(is_, spans, others))
        or all(a.pages is b.pages and a == b for a, b in zip(spans, others, strict=True))
    )


def stretches(users: Mapping[Hashable, Sequence[Use]]) -> dict[tuple[int, ...], list[Part]]:
    """Uses of spans by key -> the parts that each set of items sees, in ascending position.

    Spans of one key start at the same row and may end at different ones: [0, shortest) is shared
    by all, the next stretch by those that reach further, and so on; windows cut the other end in
    the same way.  Stretches with the same users, such as the turns of one conversation, are given
    together.
    """
    found: dict[tuple[int, ...], list[Part]] = {}
    for using in users.values():
        edges = sorted({use.low for use in using} | {use.high for use in using})
        if len(edges) == 2:
            sharing = tuple([use.item for use in using])
            found.setdefault(sharing, []).append((using[0].span, edges[0], edges[1]))
            continue
        span = max(using, key=lambda use: use.high).span
        for low, high in pairwise(edges):
            sharing = tuple(u.item for u in using if u.low <= low and u.high >= high)
            if sharing:
                found.setdefault(sharing, []).append((span, low, high))
    for parts in found.values():
        parts.sort(key=lambda part: part[0].start + part[1])
    return found
