"""The contract of a place for chunk files.

A key is the 64 hex digits of a content id.  What is under a key never changes: writing it again
does nothing.  Every method may raise OSError (full, read-only, broken device); FileNotFoundError
means that the key is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forkserve.store.chunks import Buffer

__all__ = ["Blob", "Depot", "Stat"]


@dataclass(frozen=True, slots=True)
class Stat:
    """One stored object.

    bytes: its length.  used: what it takes from the budget (blocks of a file system).  at: when it
    was written, seconds since the epoch.  stamp: changes whenever the bytes may have.  own: False
    for one that other stores may rely on, which nobody deletes (`SharedDepot`).
    """

    key: str
    bytes: int
    used: int
    at: float
    stamp: tuple[int, ...]
    own: bool = True


class Blob(Protocol):
    """An open object.  Its bytes stay readable until `close`, even if the key is deleted."""

    stat: Stat

    @property
    def data(self) -> memoryview:
        """All bytes; mapped where the place allows it."""
        ...

    def close(self) -> None:
        """Let go of it.  Views taken from `data` keep the bytes alive."""
        ...


@runtime_checkable
class Depot(Protocol):
    """A place for immutable objects."""

    place: str  # how the catalog names it

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Write objects, each given in parts; durable and visible, all of them, on return.

        A key that is there with the same length is left alone; one of another length is damaged
        and replaced.  After an error any number of them may be there, each whole.
        """
        ...

    def open(self, key: str) -> Blob:
        """The object.  Raises FileNotFoundError."""
        ...

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Its stat and first `count` bytes, without reading the rest.  FileNotFoundError."""
        ...

    def stat(self, key: str) -> Stat | None:
        """Its length and stamp without reading it, or None."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        ...

    def quarantine(self, key: str, reason: str) -> None:
        """Move a damaged object out of sight, for somebody to look at later."""
        ...

    def entries(self) -> Iterator[Stat]:
        """Every object, in no order."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Remove leftovers of writers that died; returns how many."""
        ...

    def close(self) -> None:
        """Let go of connections and threads.  Idempotent."""
        ...
