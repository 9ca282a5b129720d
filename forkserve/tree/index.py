"""The prefix index: committed pages found by the hash of what they hold.

Secondary by design.  Inside a session a fork takes pages by reference and never looks here; only
`open` does, to share a prefix with another session.  An entry names one full page, aligned from
position 0, under the chain hash of everything up to its end::

    root   = blake3(tag-root  | len(salt) | salt)
    digest = blake3(tag-page  | parent digest | token count | token ids)

Token ids are compared on a hit, so that a collision cannot serve a wrong page.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from forkserve.tree.pool import PagePool
from forkserve.types import Tokens

__all__ = ["PrefixIndex", "page_digest", "root_digest"]

_ROOT_TAG = b"forkserve/prefix-root/v1"
_PAGE_TAG = b"forkserve/prefix-page/v1"


def root_digest(salt: str) -> bytes:
    """Start of the chain for one salt: two salts never share an entry."""
    raw = salt.encode()
    return blake3(_ROOT_TAG + len(raw).to_bytes(8, "little") + raw).digest()


def page_digest(parent: bytes, tokens: Tokens) -> bytes:
    """Chain hash of one page of `tokens` after `parent`."""
    ids = array("q", tokens)
    return blake3(_PAGE_TAG + parent + len(ids).to_bytes(8, "little") + ids.tobytes()).digest()


@dataclass(slots=True)
class _Entry:
    page: int
    tokens: bytes


class PrefixIndex:
    """Digest -> page, least recently used first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def pages(self) -> list[int]:
        """Every page the index holds a reference to."""
        return [entry.page for entry in self._entries.values()]

    def lookup(
        self, salt: str, tokens: Tokens, skip: int = 0, digest: bytes = b""
    ) -> tuple[list[int], bytes]:
        """Pages of the longest published prefix of `tokens`, and the digest at its end.

        skip: pages at the beginning that are known already, with `digest` at their end.

        At least one token is always left to compute, because a session needs logits.  The caller
        must take its references before it allocates anything.
        """
        size = self._pool.page_size
        digest = digest if skip else root_digest(salt)
        pages: list[int] = []
        used: list[bytes] = []
        for begin in range(skip * size, (len(tokens) - 1) // size * size, size):
            ids = tokens[begin : begin + size]
            following = page_digest(digest, ids)
            entry = self._entries.get(following)
            if entry is None or entry.tokens != array("q", ids).tobytes():
                break
            pages.append(entry.page)
            used.append(following)
            digest = following
        self.touch(used)
        return pages, digest

    def touch(self, digests: Sequence[bytes]) -> None:
        """Mark a chain (root side first) as used now.

        Deeper pages become older than their prefix, so that eviction takes a chain from its end.
        """
        for digest in reversed(digests):
            if digest in self._entries:
                self._entries.move_to_end(digest)

    def publish(self, parent: bytes, tokens: Tokens, page: int) -> tuple[bytes, int]:
        """Enter one full page; returns its digest and the page that now stands for it.

        When the same content is there already the older page is returned: the caller rewrites its
        table and drops its own copy.  A page that another entry names stays as it is.
        """
        digest = page_digest(parent, tokens)
        entry = self._entries.get(digest)
        raw = array("q", tokens).tobytes()
        if entry is not None:
            return digest, entry.page if entry.tokens == raw else page
        if not self._pool.indexed[page]:
            self._pool.index(page)
            self._entries[digest] = _Entry(page, raw)
        return digest, page

    def reclaim(self, wanted: int) -> int:
        """Drop entries that only the index holds, oldest first, until `wanted` pages are free."""
        freed = 0
        for digest, entry in list(self._entries.items()):
            if freed >= wanted:
                break
            if self._pool.refs[entry.page] == 1:
                del self._entries[digest]
                freed += self._pool.unindex(entry.page)
        return freed

    def clear(self) -> None:
        """Forget everything."""
        for entry in self._entries.values():
            self._pool.unindex(entry.page)
        self._entries.clear()
