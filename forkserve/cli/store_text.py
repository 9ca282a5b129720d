"""Tables, sizes and times as `forkserve store` prints them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

__all__ = ["short", "size", "sound", "table", "when"]


def table(rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], str]], none: str) -> str:
    """Rows in aligned columns; `none` when there is no row."""
    if not rows:
        return none
    cells = [list(columns), *([show(row[c]) for c, show in columns.items()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def when(at: float | None) -> str:
    """A time for people; nothing for None."""
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sound(clean: bool) -> str:
    """What a check found, in a word."""
    return "sound" if clean else "damaged"


def short(chain: str | None) -> str:
    """The beginning of an id."""
    return (chain or "-")[:12]
