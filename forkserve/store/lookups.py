"""What a look-up reads of the catalog, and which of several parts of a chunk it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forkserve.store.chunks import LOSSY
from forkserve.store.identity import Fingerprint, Link

__all__ = ["LOOKUP", "Found", "choose", "fitting"]


class Found(NamedTuple):
    """A catalogued chunk that a look-up hit.

    places: where its bytes lie.  made: whose rows it has.  key: see `Header.key`; None if an older
    version has noted the part, which did not say.

    A tuple, since a look-up makes one a chunk: a frozen dataclass takes five times as long.
    """

    chunk: int
    link: Link
    content: str
    format: str
    bytes: int
    places: tuple[str, ...]
    made: Fingerprint
    key: str | None


# ?1: chain ids as a JSON list, ?2: row of the fingerprint, ?3: key, or NULL for any.
# CROSS JOIN keeps this order of loops: one descent a link, and no table sorted on the way.
LOOKUP = """
SELECT w.key, c.id, c.parent, c.start, c.tokens, p.content, p.format, p.bytes, p.places, p.key
FROM json_each(?1) AS w
CROSS JOIN chunk AS c ON c.fingerprint = ?2 AND c.chain = w.value
CROSS JOIN part AS p ON p.chunk = c.id
WHERE p.places != '' AND (?3 IS NULL OR p.key IS NULL OR p.key = ?3)
"""


def fitting(
    made: Fingerprint, links: Sequence[Link], rows: Iterable[Sequence[Any]]
) -> list[list[Found]]:
    """Of each link the parts among rows of `LOOKUP` whose parent, start and count are its own."""
    out: list[list[Found]] = [[] for _ in links]
    split: dict[str, tuple[str, ...]] = {}  # the same few lists of places, again and again
    for at, chunk, parent, start, count, content, form, size, text, key in rows:
        link = links[at]
        if start == link.start and count == link.count and parent == link.parent.hex():
            places = split.get(text) or split.setdefault(text, tuple(text.split(",")))
            out[at].append(Found(chunk, link, content, form, size, places, made, key))
    return out


def choose(listed: Sequence[Sequence[Sequence[Found]]], lossy: bool) -> list[Found]:
    """The longest prefix of a chain, from the parts of each link under one fingerprint or several.

    Each chunk is of the first fingerprint that has it in an exact format, else (lossy) of the first
    that has it at all.
    """
    found: list[Found] = []
    for link in zip(*listed, strict=True):
        best = None
        for parts in link:
            usable = [part for part in parts if part.format not in LOSSY]
            if usable:
                best = usable[0] if len(usable) == 1 else min(usable, key=_rank)
                break
        if best is None and lossy:
            best = next((parts[0] for parts in link if parts), None)
        if best is None:
            break
        found.append(best)
    return found


def _rank(found: Found) -> tuple[bool, bool]:
    """What certainly opens goes first, then what needs no decoding."""
    return found.key is None, found.format != "raw"
