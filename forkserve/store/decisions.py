"""Choices as functions of numbers, and made again from their record.

Restore or compute; and, of the tier in memory, whether a piece that comes is worth what has to go.
"""

from __future__ import annotations

from typing import Any, Literal

from forkserve.store.catalog import Catalog

__all__ = ["Mode", "admit", "choose", "decisions", "repeats"]

Mode = Literal["auto", "always", "never"]
_COLUMNS = ("id", "session", "node", "what", "verdict", "reason", "tokens")
_NUMBERS = ("gain_ms", "cost_ms", "actual_ms", "worth", "against", "at")


def choose(mode: Mode, restore_ms: float, prefill_ms: float) -> tuple[bool, str]:
    """Whether to restore, and the reason, from the predicted time of either way.

    "always" is the reason where the setting overruled the numbers.
    """
    if mode == "never":
        return False, "restore_off"
    if restore_ms < prefill_ms:
        return True, "faster"
    return mode == "always", "always" if mode == "always" else "faster"


def admit(worth: float, against: float | None) -> bool:
    """Whether memory takes a piece in for which something has to go that is worth `against`."""
    return against is None or against <= worth


def repeats(row: dict[str, Any]) -> bool | None:
    """Whether the choice of a row comes out the same from the numbers in it.

    None for a row that is no single choice of this kind: evictions and speculation look at more
    than one row holds.
    """
    if row["what"] == "move" and row["worth"] is not None:
        if row["reason"] == "too_large":  # nothing that may go makes enough room
            return bool(row["verdict"] == "refused" and row["against"] is None)
        return admit(row["worth"], row["against"]) is (row["verdict"] == "memory")
    if row["what"] != "restore" or row["cost_ms"] is None:
        return None
    reason = str(row["reason"])
    mode: Mode = "auto"
    if "always" in reason:
        mode = "always"
    elif reason == "restore_off":
        mode = "never"
    restore, why = choose(mode, row["cost_ms"], row["gain_ms"])
    tried = row["actual_ms"] is not None  # else nothing was read
    said = ("always_", "damaged", "no_room", "memory", why)
    return restore == tried and reason.startswith(said)


def decisions(
    catalog: Catalog, session: str | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """The latest decisions (all without a limit), newest first, each with `repeats`."""
    keys = (*_COLUMNS, *_NUMBERS)
    rows = catalog.read(
        f"SELECT {', '.join(keys)} FROM decision WHERE session = coalesce(?, session)"
        " ORDER BY id DESC LIMIT ?",
        (session, -1 if limit is None else limit),
    )
    found = [dict(zip(keys, row, strict=True)) for row in rows]
    return [{**row, "repeats": repeats(row)} for row in found]
