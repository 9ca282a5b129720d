"""What is said of a database that SQLite finds damaged, and what to do about it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from forkserve.errors import StoreError

__all__ = ["ADVICE", "advice", "cannot_open"]

ADVICE = (
    "move catalog.db, catalog.db-wal and catalog.db-shm aside; put a copy of them there if you "
    "have one, or else run `forkserve store rebuild`, which lists the stored chunks again "
    "(sessions and names are in the database alone)"
)


def advice(error: Exception) -> str:
    """What to do, after a semicolon; nothing for a file that is busy, away or full."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of it says where
    broken = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return f"; {ADVICE}" if broken else ""


def cannot_open(path: Path, error: Exception) -> StoreError:
    """What is raised for a file that cannot be opened."""
    return StoreError(f"cannot open the catalog {path}: {error}{advice(error)}")
