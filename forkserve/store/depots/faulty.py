"""A wrapper that makes any depot fail on purpose, by plan or by seed."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence

from forkserve.store.chunks import Buffer
from forkserve.store.depots.memory import MemoryBlob
from forkserve.store.depots.protocol import Blob, Depot, Stat

__all__ = ["FaultyDepot"]


class FaultyDepot:
    """Passes calls on to `inner`, unless a fault is due.

    fail: name of a method -> errno to raise, until it is taken out again.  rate: share of calls
    that raise EIO, drawn from `seed`.  spoil: changes the bytes that `open` returns (a device that
    lies).  calls: how often each method was asked for.
    """

    def __init__(self, inner: Depot, *, rate: float = 0.0, seed: int = 0) -> None:
        self.inner = inner
        self.place = inner.place
        self.fail: dict[str, int] = {}
        self.rate = rate
        self.spoil: Callable[[bytearray], None] | None = None
        self.calls: dict[str, int] = {}
        self._random = random.Random(seed)

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Write objects, or raise."""
        self._due("put")
        return self.inner.put(items)

    def open(self, key: str) -> Blob:
        """Open an object, perhaps with other bytes, or raise."""
        self._due("open")
        blob = self.inner.open(key)
        if self.spoil is None:
            return blob
        data = bytearray(blob.data)
        blob.close()
        self.spoil(data)
        stamp = (*blob.stat.stamp, self.calls["open"])
        return MemoryBlob(Stat(key, len(data), len(data), blob.stat.at, stamp), data)

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Read the first bytes, or raise."""
        self._due("head")
        return self.inner.head(key, count)

    def stat(self, key: str) -> Stat | None:
        """Look at an object, or raise."""
        self._due("stat")
        return self.inner.stat(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, or raise."""
        self._due("delete")
        self.inner.delete(keys)

    def quarantine(self, key: str, reason: str) -> None:
        """Set an object aside, or raise."""
        self._due("quarantine")
        self.inner.quarantine(key, reason)

    def entries(self) -> Iterator[Stat]:
        """List objects, or raise."""
        self._due("entries")
        return self.inner.entries()

    def sweep(self, older_than_s: float) -> int:
        """Remove leftovers, or raise."""
        self._due("sweep")
        return self.inner.sweep(older_than_s)

    def close(self) -> None:
        """Close the inner depot."""
        self.inner.close()

    def _due(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1
        if what in self.fail:
            raise OSError(self.fail[what], f"injected into {what}")
        if self.rate and self._random.random() < self.rate:
            raise OSError(errno.EIO, f"injected into {what} by chance")
