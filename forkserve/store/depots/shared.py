"""A further place that several stores use: each has a folder of its own there, named by its id.

What a store deletes lies in its folder, and what it has a receipt for as well; so no collection and
no budget of one store can take an object that another relies on.  The price is that two stores with
equal chunks keep two copies.  Objects right below the place, outside of every folder, are from
versions that had no folders: they are read, and nobody deletes them, since it cannot be known whose
they are (`SharedDepot.sources` and `rebuild` copy them over).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from forkserve.errors import StoreError
from forkserve.store.chunks import Buffer
from forkserve.store.depots.local import LocalDepot
from forkserve.store.depots.protocol import Blob, Depot, Stat

__all__ = ["ALL", "Foldered", "SharedDepot", "is_store_id", "local_part"]

ALL = "all"  # in place of a store's id: every folder, and what lies outside of them
_STORE = re.compile(r"[0-9a-f]{32}\Z")


def is_store_id(text: str) -> bool:
    """True for what a store calls itself: 32 hex digits."""
    return _STORE.match(text) is not None


@runtime_checkable
class Foldered(Protocol):
    """A depot that can be divided.  One that can't belongs to a single store."""

    def below(self, folder: str) -> Depot:
        """The folder of that name in it, as a depot of the same `place`; made when it is needed."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders in it that hold no chunks directly.  Raises OSError."""
        ...


class SharedDepot:
    """The place `whole` as the store with the id `store` sees it: see this module.

    Raises StoreError when `whole` cannot be divided.
    """

    def __init__(self, whole: Depot, store: str) -> None:
        if not isinstance(whole, Foldered):
            raise StoreError(f"the place '{whole.place}' cannot be divided between stores")
        self.place = whole.place
        self.store = store
        self.whole = whole
        self.own: Depot = whole.below(store)

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Write objects into the store's folder, whatever lies outside of it."""
        return self.own.put(items)

    def open(self, key: str) -> Blob:
        """The object; outside of the folder only if it is not in there."""
        try:
            return self.own.open(key)
        except FileNotFoundError:
            return self.whole.open(key)

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Its stat and first bytes, as `open` finds it."""
        try:
            return self.own.head(key, count)
        except FileNotFoundError:
            found, data = self.whole.head(key, count)
            return replace(found, own=False), data

    def stat(self, key: str) -> Stat | None:
        """Its length and stamp, as `open` finds it."""
        found = self.own.stat(key)
        if found is None and (old := self.whole.stat(key)) is not None:
            found = replace(old, own=False)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects of the folder; those outside of it stay."""
        self.own.delete(keys)

    def quarantine(self, key: str, reason: str) -> None:
        """Set an object of the folder aside; one outside of it stays where it is."""
        self.own.quarantine(key, reason)

    def entries(self) -> Iterator[Stat]:
        """Objects of the folder, then others that can be read (`Stat.own` is False)."""
        mine = set()
        for stat in self.own.entries():
            mine.add(stat.key)
            yield stat
        for stat in self.whole.entries():
            if stat.key not in mine:
                yield replace(stat, own=False)

    def sweep(self, older_than_s: float) -> int:
        """Remove leftovers in the folder."""
        return self.own.sweep(older_than_s)

    def close(self) -> None:
        """Close both."""
        self.own.close()
        self.whole.close()

    def stores(self) -> list[str]:
        """Ids of other stores that have a folder there.  Raises OSError."""
        assert isinstance(self.whole, Foldered)
        return sorted({f for f in self.whole.folders() if is_store_id(f)} - {self.store})

    def sources(self, wanted: Sequence[str]) -> list[Depot]:
        """Where objects of others lie: of the stores `wanted`, or of all (`ALL`).

        Raises StoreError for a store that has no folder there, OSError.
        """
        assert isinstance(self.whole, Foldered)
        there = self.stores()
        unknown = [one for one in wanted if one != ALL and one not in there]
        if unknown:
            raise StoreError(
                f"no store {', '.join(unknown)} has a folder in '{self.place}'; "
                f"there {'are ' + ', '.join(there) if there else 'is none'}"
            )
        if ALL in wanted:
            return [self.whole, *(self.whole.below(one) for one in there)]
        return [self.whole.below(one) for one in dict.fromkeys(wanted)]


def local_part(depot: Depot) -> LocalDepot | None:
    """The directory that a depot writes to, where it is one."""
    own = depot.own if isinstance(depot, SharedDepot) else depot
    return own if isinstance(own, LocalDepot) else None
