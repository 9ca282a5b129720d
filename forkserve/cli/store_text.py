"""Tables, sizes and times as `forkserve store` prints them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from forkserve.cli.words import one_line, shortened
from forkserve.values import counted

if TYPE_CHECKING:
    from forkserve.store.rebuild import Report

__all__ = ["checked", "short", "size", "table", "token_ids", "tree_lines", "when"]

_NAME = 40  # characters of a branch's name


def table(rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], str]], none: str) -> str:
    """Rows in aligned columns; `none` when there is no row."""
    if not rows:
        return none
    cells = [list(columns), *([show(row[c]) for c, show in columns.items()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def token_ids(text: str) -> list[int]:
    """Ids from a JSON list, or from words between commas or spaces.  ValueError for others."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else _words(text)
    except (ValueError, RecursionError):  # lists in lists
        raise ValueError(f"'{shortened(one_line(text), _NAME)}' is no list of token ids") from None
    for one in found:
        if type(one) is not int or not 0 <= one < 2**31:
            raise ValueError(f"{shortened(str(one), _NAME)!r} is no token id")
    return list(found)


def _words(text: str) -> list[int | str]:
    words = re.split(r"\s*,\s*|\s+", text.strip())
    return [int(w) if re.fullmatch("[0-9]{1,10}", w) else w for w in words]


def tree_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A session's nodes, as `admin.tree_rows` gives them: parents first.

    What goes on with a line stands below it on the same level, after the lines that leave it: a
    session is a long chain, and an indent for each commit would leave the screen.
    """
    below: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        below.setdefault(row["parent"], []).append(row)
    lines: list[str] = []
    # What is still to be drawn, the next one last; begins: a line begins here.
    todo = [(row, "", "", True) for row in reversed(below.get(None, []))]
    while todo:
        row, indent, joint, begins = todo.pop()
        lines.append(indent + joint + _node(row))
        if begins:
            deeper = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[joint]
            along = _along(row, below)
            joints = [*["├─ "] * (len(along) - 1), "└─ "]
            found = zip(along, joints, strict=False)
            todo += reversed([(one, deeper, j, new) for (one, new), j in found])
    return lines


def _along(
    first: dict[str, Any], below: dict[int | None, list[dict[str, Any]]]
) -> list[tuple[dict[str, Any], bool]]:
    """The nodes of a line after its first, and before each the lines that leave it there (True)."""
    out: list[tuple[dict[str, Any], bool]] = []
    row: dict[str, Any] | None = first
    while row is not None:
        children = below.get(row["node"], [])
        onward = next((c for c in reversed(children) if c["line"] == row["line"]), None)
        out += [(child, True) for child in children if child is not onward]
        out += [(onward, False)] if onward is not None else []
        row = onward
    return out


def _node(row: dict[str, Any]) -> str:
    name = shortened(one_line(row["branch"]), _NAME) or "-"
    where = f"+{row['tokens']} at {row['start']}"
    tip = " *" if row["tip"] else ""
    return f"{row['node']} {name}  {where}  {row['mode']}, line {row['line']}{tip}"


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


def checked(report: Report) -> list[str]:
    """What a check of stored bytes has found, its own problems apart."""
    found = "sound" if report.clean else "damaged"
    lines = [f"{counted(report.checked, 'chunk')}, {size(report.bytes)}: {found}"]
    lines += [f"damaged: {c[:16]} in {p} ({w})" for p, c, w in report.faults]
    if report.dangling:
        lines.append(f"{counted(report.dangling, 'file')} missing")
    return lines


def short(chain: str | None) -> str:
    """The beginning of an id."""
    return (chain or "-")[:12]
