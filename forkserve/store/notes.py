"""What a catalog notes beside its chunks: events, totals, settings, digests of weights."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from forkserve.errors import StoreError
from forkserve.store.statements import add_count, add_event
from forkserve.store.transactions import Transactions

__all__ = ["Notes"]


class Notes(Transactions):
    """The part of `Catalog` that keeps notes."""

    def event(self, kind: str, **detail: Any) -> None:
        """Write down that something happened; a database that can't be written is no error here."""
        with suppress(StoreError), self.write() as db:
            add_event(db, self.now(), kind, detail)

    def events(self, kind: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """The latest events, newest first."""
        rows = self.read(
            "SELECT kind, detail, at FROM event WHERE kind = coalesce(?, kind)"
            " ORDER BY id DESC LIMIT ?",
            (kind, limit),
        )
        return [{"kind": k, "at": at, **json.loads(detail)} for k, detail, at in rows]

    def count(self, name: str, by: float = 1) -> None:
        """Add to a total that outlives the process; a catalog that can't be written loses it."""
        with suppress(StoreError), self.write() as db:
            add_count(db, name, by)

    def counters(self) -> dict[str, float]:
        """Totals since the store was made."""
        return dict(self.read("SELECT name, value FROM counter ORDER BY name"))

    def setting(self, key: str) -> str | None:
        """A value of table `meta`."""
        rows = self.read("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_setting(self, key: str, value: str) -> None:
        """Write a value of table `meta`."""
        with self.write() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def get_digest(self, key: tuple[str, int, int, int]) -> str | None:
        """`StatCache`: the digest of a weights file with this path, size, mtime and inode."""
        rows = self.read(
            "SELECT digest FROM weights"
            " WHERE path = ? AND bytes = ? AND mtime_ns = ? AND inode = ?",
            key,
        )
        return str(rows[0][0]) if rows else None

    def put_digest(self, key: tuple[str, int, int, int], hexdigest: str) -> None:
        """`StatCache`: note it; a cache that cannot be written is no reason to stop."""
        with suppress(StoreError), self.write() as db:
            db.execute("INSERT OR REPLACE INTO weights VALUES (?, ?, ?, ?, ?)", (*key, hexdigest))
