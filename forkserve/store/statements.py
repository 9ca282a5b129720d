"""Statements of the catalog that stand alone: events, totals, what a digest means."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkserve.errors import StoreError
from forkserve.store.identity import Fingerprint

__all__ = [
    "ADD_COUNT",
    "CAP_DECISIONS",
    "add_count",
    "add_event",
    "file_identity",
    "require_equal",
]

ADD_COUNT = (
    "INSERT INTO counter VALUES (?, ?)"
    " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
)
# The latest 100,000 stay: some 10 MB.  Those of a session go with it (`collect`).
CAP_DECISIONS = "DELETE FROM decision WHERE id <= (SELECT max(id) FROM decision) - 100000"


def require_equal(made: Fingerprint, fields: str) -> None:
    """The first who registers a digest says what it means; who means another writes nothing."""
    if fields != made.text:
        raise StoreError(
            f"fingerprint {made.digest.hex()[:16]} stands for other fields in this store: "
            "nothing is shared under it"
        )


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def add_event(db: sqlite3.Connection, at: float, kind: str, detail: Mapping[str, Any]) -> None:
    """Write an event inside a transaction; the latest 10,000 stay."""
    db.execute(
        "INSERT INTO event (kind, detail, at) VALUES (?, ?, ?)", (kind, json.dumps(detail), at)
    )
    db.execute("DELETE FROM event WHERE id <= (SELECT max(id) FROM event) - 10000")


def add_count(db: sqlite3.Connection, name: str, by: float) -> None:
    """Add to a total inside a transaction."""
    db.execute(ADD_COUNT, (name, by))
