"""What a search cost in tokens, and what it would have cost without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PrefixCache", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a search.

    requests: replies of the model.  prompt: tokens before them, each counted whole, which is what
    would be prefilled without any reuse (a clone of the text for every request).
    prefilled: rows that the search really had computed for its prompts; reused: the others.
    decoded: tokens that the model wrote.  cached: evaluations taken from the value cache.
    prefix_cache: rows that would be prefilled by a server that keeps every full page of every
    earlier prompt and reply for ever, and works on one request at a time: the best that such a
    cache can do.  Prefill that an eviction made necessary is not counted.
    """

    requests: int = 0
    prompt: int = 0
    prefilled: int = 0
    decoded: int = 0
    cached: int = 0
    prefix_cache: int = 0

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.prompt - self.prefilled


class PrefixCache:
    """A prefix cache without limits, which knows only what full pages of tokens look like."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._known: set[int] = set()

    def lookup(self, tokens: Sequence[int]) -> int:
        """Leading tokens that are there, in whole pages; the last token is always computed."""
        found = 0
        for link in self._chain(tokens[:-1]):
            if link not in self._known:
                break
            found += self._size
        return found

    def add(self, tokens: Sequence[int]) -> None:
        """Keep the full pages of a sequence."""
        self._known.update(self._chain(tokens))

    def _chain(self, tokens: Sequence[int]) -> list[int]:
        """One hash for each full page, over it and all before it."""
        links, above = [], 0
        for end in range(self._size, len(tokens) + 1, self._size):
            above = hash((above, tuple(tokens[end - self._size : end])))
            links.append(above)
        return links
