"""Leases: who reads a chain keeps gc and eviction away from it until it is done.

A lease ends when its holder says so or closes its store, when the holder's process is dead, or
after its time.  A lease that seems to begin in the future (the clock was set back) begins anew at
that moment: it neither vanishes under its reader nor outlives the clock's jump.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from forkserve.errors import StoreError
from forkserve.store import owner
from forkserve.store.catalog import INTENT, Catalog

__all__ = ["TTL_S", "hold", "lease", "let_go", "tidy"]

TTL_S = 600.0  # s that a reader may take; a restore of a long trunk takes seconds


@contextmanager
def lease(catalog: Catalog, chains: Sequence[str], ttl_s: float = TTL_S) -> Iterator[bool]:
    """Hold chains (hex ids of their ends) for the time of the block; True if that is on record.

    A reader of a read-only store, or of a catalog that cannot be written, goes on without one: what
    it has opened stays readable, what it has not may turn out to be gone and is computed.
    """
    token = ""
    if catalog.role != "reader" and chains:
        with suppress(StoreError), catalog.write() as db:
            token = hold(db, chains, catalog.now(), ttl_s)
            catalog.leases.add(token)
    try:
        yield bool(token)
    finally:
        let_go(catalog, token)
        catalog.leases.discard(token)


def hold(db: sqlite3.Connection, what: Sequence[str], now: float, ttl_s: float) -> str:
    """Begin a lease inside a transaction; returns its token, for `let_go`."""
    token, holder = uuid.uuid4().hex, owner.who()
    rows = [(one, token, holder, now, ttl_s) for one in what]
    db.executemany("INSERT INTO lease VALUES (?, ?, ?, ?, ?)", rows)
    return token


def let_go(catalog: Catalog, token: str) -> None:
    """End a lease; one that cannot be struck now ends with its time or its process."""
    if token:
        with suppress(StoreError), catalog.write() as db:
            db.execute("DELETE FROM lease WHERE token = ?", (token,))


def tidy(db: sqlite3.Connection, now: float) -> int:
    """Drop leases whose time or process has ended; returns how many.  Call before marking."""
    db.execute("UPDATE lease SET at = ?1 WHERE at > ?1", (now,))
    gone = db.execute("DELETE FROM lease WHERE at + ttl <= ?", (now,)).rowcount
    for (holder,) in db.execute("SELECT DISTINCT holder FROM lease").fetchall():
        if owner.is_dead(holder):
            gone += db.execute("DELETE FROM lease WHERE holder = ?", (holder,)).rowcount
    for (holder,) in db.execute(
        "SELECT DISTINCT taken_by FROM outbox WHERE due_at = ?", (INTENT,)
    ).fetchall():  # copies that were under way when their process died
        if owner.is_dead(holder):
            db.execute("DELETE FROM outbox WHERE due_at = ? AND taken_by = ?", (INTENT, holder))
    return gone
