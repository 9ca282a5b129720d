"""Text of which some spans are content: no control token is read out of them.

A tokenizer takes ``<|im_end|>`` in a text for the control token of that name.  That is right for
what a chat template or a program writes, and wrong for what a user or a tool says: it could end
its own turn and begin another one.  So the two are told apart by the text itself::

    PromptText("<|im_start|>user\\n") + plain(question) + "<|im_end|>\\n"

`plain` marks content; an ordinary `str` that is added counts as the program's.  Everything that
encodes text (`Tokenizer.encode`, and so every verb that takes text) reads the marks.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, SupportsIndex

__all__ = ["Piece", "PromptText", "content", "joined", "occurrences", "pattern_of", "plain"]

Piece = tuple[int, int]


class PromptText(str):
    """A string with marks; wherever a `str` will do it is one, and prints and compares as one.

    plain: (begin, end) of its spans of content, in order and apart.  Adding and slicing keep the
    marks; any other method gives an ordinary `str`, without them.
    """

    plain: tuple[Piece, ...]

    def __new__(cls, text: str = "", plain: Iterable[Piece] | None = None) -> PromptText:
        """plain: None takes over those of `text`.  Raises TypeError for bytes and the like."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        made = super().__new__(cls, text)
        made.plain = getattr(text, "plain", ()) if plain is None else _merged(plain)
        return made

    def __reduce__(self) -> tuple[type[PromptText], tuple[str, tuple[Piece, ...]]]:
        return type(self), (str(self), self.plain)

    def __add__(self, other: str) -> PromptText:
        return joined((self, other))

    def __radd__(self, other: str) -> PromptText:
        return joined((other, self))

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        part = super().__getitem__(key)
        if not isinstance(key, slice) or key.step not in (None, 1):
            return part
        begin, end, _ = key.indices(len(self))
        first = bisect_right(self.plain, begin, key=itemgetter(1))
        last = bisect_left(self.plain, end, lo=first, key=itemgetter(0))
        kept = self.plain[first:last]  # whoever encodes a long conversation slices it span by span
        return PromptText(part, [(max(a, begin) - begin, min(b, end) - begin) for a, b in kept])

    def control(self, marker: str, start: int = 0) -> int:
        """Where a control token of this name stands first from `start` on; -1 if nowhere."""
        at = self.find(marker, start)
        while at >= 0 and not _free(at, at + len(marker), self.plain):
            at = self.find(marker, at + 1)
        return at


def joined(parts: Iterable[str]) -> PromptText:
    """Parts in order, with their marks."""
    texts, spans, at = [], [], 0
    for part in parts:
        texts.append(str(part))
        spans += [(a + at, b + at) for a, b in getattr(part, "plain", ())]
        at += len(part)
    return PromptText("".join(texts), spans)


def plain(text: str) -> PromptText:
    """Text that is content from end to end: what a user said, what a tool returned."""
    return PromptText(text, [(0, len(text))])


def content(text: str) -> PromptText:
    """`plain`, unless the text says itself what of it is content."""
    return text if isinstance(text, PromptText) else plain(text)


def pattern_of(markers: Iterable[str]) -> re.Pattern[str] | None:
    """Finds control tokens by name, of several at one place the longest; None without any."""
    names = sorted({name for name in markers if name}, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, names))) if names else None


def occurrences(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[Piece, bool]]:
    """Where markers stand in a text, and whether each is a control token or touches content.

    What touches content is passed by, so that one which begins inside of it is found as well.
    """
    spans: tuple[Piece, ...] = getattr(text, "plain", ())
    found = pattern.search(text)
    while found is not None:
        begin, end = found.span()
        own = _free(begin, end, spans)
        yield (begin, end), own
        found = pattern.search(text, end if own else begin + 1)


def _free(begin: int, end: int, spans: tuple[Piece, ...]) -> bool:
    """Whether a span touches no other: the last one that begins before its end, if any."""
    before = bisect_left(spans, end, key=itemgetter(0))
    return not before or spans[before - 1][1] <= begin


def _merged(spans: Iterable[Piece]) -> tuple[Piece, ...]:
    merged: list[Piece] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)
