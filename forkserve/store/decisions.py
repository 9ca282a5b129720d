"""Restore or compute: the choice as a function of numbers, and made again from its record."""

from __future__ import annotations

from typing import Any, Literal

from forkserve.store.catalog import Catalog

__all__ = ["Mode", "choose", "decisions", "repeats"]

Mode = Literal["auto", "always", "never"]
_COLUMNS = ("id", "session", "node", "what", "verdict", "reason", "tokens")
_TIMES = ("gain_ms", "cost_ms", "actual_ms", "at")


def choose(mode: Mode, restore_ms: float, prefill_ms: float) -> tuple[bool, str]:
    """Whether to restore, and the reason, from the predicted time of either way.

    "always" is the reason where the setting overruled the numbers.
    """
    if mode == "never":
        return False, "restore_off"
    if restore_ms < prefill_ms:
        return True, "faster"
    return mode == "always", "always" if mode == "always" else "faster"


def repeats(row: dict[str, Any]) -> bool | None:
    """Whether the choice of a row comes out the same from the numbers in it.

    None for a row that is no single choice of this kind: moves and restores of the memory tier are
    made piece by piece, evictions and speculation look at more than one row holds.
    """
    if row["what"] != "restore" or row["reason"] == "memory" or row["cost_ms"] is None:
        return None
    reason = str(row["reason"])
    mode: Mode = "auto"
    if reason.startswith("always"):
        mode = "always"
    elif reason == "restore_off":
        mode = "never"
    restore, why = choose(mode, row["cost_ms"], row["gain_ms"])
    tried = row["actual_ms"] is not None  # else nothing was read
    return restore == tried and reason.startswith(("always_", "damaged", "no_room", why))


def decisions(
    catalog: Catalog, session: str | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """The latest decisions (all without a limit), newest first, each with `repeats`."""
    keys = (*_COLUMNS, *_TIMES)
    rows = catalog.read(
        f"SELECT {', '.join(keys)} FROM decision WHERE session = coalesce(?, session)"
        " ORDER BY id DESC LIMIT ?",
        (session, -1 if limit is None else limit),
    )
    found = [dict(zip(keys, row, strict=True)) for row in rows]
    return [{**row, "repeats": repeats(row)} for row in found]
