"""Chunks in this process's memory: for tests, and as a tier above the disk."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forkserve.store.chunks import Buffer
from forkserve.store.depots.protocol import Stat

__all__ = ["MemoryBlob", "MemoryDepot"]


@dataclass(slots=True)
class MemoryBlob:
    """An open object that lies in memory."""

    stat: Stat
    held: bytearray

    @property
    def data(self) -> memoryview:
        return memoryview(self.held)

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryDepot:
    """A dictionary of objects.  Safe to use from several threads."""

    def __init__(self, *, place: str = "memory") -> None:
        self.place = place
        self.quarantined: dict[str, str] = {}
        self._objects: dict[str, MemoryBlob] = {}
        self._lock = threading.Lock()
        self._serial = itertools.count(1)

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Copy objects in."""
        out = []
        for key, parts in items:
            data = bytearray().join(parts)
            with self._lock:
                known = self._objects.get(key)
                if known is None or known.stat.bytes != len(data):
                    stat = Stat(key, len(data), len(data), time.time(), (next(self._serial),))
                    known = self._objects[key] = MemoryBlob(stat, data)
                out.append(known.stat)
        return out

    def open(self, key: str) -> MemoryBlob:
        """The object.  Raises FileNotFoundError."""
        with self._lock:
            blob = self._objects.get(key)
        if blob is None:
            raise FileNotFoundError(f"no object {key[:16]} in memory")
        return blob

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Stat and first bytes.  Raises FileNotFoundError."""
        blob = self.open(key)
        return blob.stat, bytes(blob.held[:count])

    def stat(self, key: str) -> Stat | None:
        """Its length and stamp, or None."""
        with self._lock:
            blob = self._objects.get(key)
        return blob.stat if blob is not None else None

    def delete(self, keys: Sequence[str]) -> None:
        """Forget objects."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def quarantine(self, key: str, reason: str) -> None:
        """Forget an object and remember why."""
        with self._lock:
            self._objects.pop(key, None)
            self.quarantined[key] = reason

    def entries(self) -> Iterator[Stat]:
        """Every object."""
        with self._lock:
            stats = [blob.stat for blob in self._objects.values()]
        return iter(stats)

    def sweep(self, older_than_s: float) -> int:
        """A dictionary has no leftovers."""
        return 0

    def close(self) -> None:
        """Nothing is held open."""
