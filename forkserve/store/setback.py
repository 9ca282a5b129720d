"""Noticing that the wall clock was set back: ages, graces and ends of leases go by it."""

from __future__ import annotations

import sqlite3

from forkserve.store.statements import add_event

__all__ = ["Setback"]

_BACK_S = 1.0  # s that the clock may go back without a word: it is kept right by small steps


class Setback:
    """Compares the wall clock with that of the last write, of this process or an earlier one.

    Raises sqlite3.Error when the catalog cannot be read.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._latest = _latest(db)

    def look(self, db: sqlite3.Connection, now: float) -> None:
        """Write an event, in the open transaction, if the clock went back since the last look."""
        before, self._latest = self._latest, now
        if now < before - _BACK_S:
            add_event(db, now, "clock", {"back_s": round(before - now, 3), "from": before})


def _latest(db: sqlite3.Connection) -> float:
    """The latest time that a catalog knows of; after a clock that went back, what it has said then.

    Wall clock in seconds; 0 for an empty catalog.
    """
    event = db.execute("SELECT kind, at FROM event ORDER BY id DESC LIMIT 1").fetchone()
    if event is not None and event[0] == "clock":
        return float(event[1])
    (rest,) = db.execute(
        "SELECT max(coalesce((SELECT max(updated_at) FROM session), 0),"
        " coalesce((SELECT created_at FROM chunk ORDER BY id DESC LIMIT 1), 0))"
    ).fetchone()
    return max(float(rest), float(event[1]) if event is not None else 0.0)
