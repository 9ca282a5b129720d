"""Words of any origin on one line of a screen."""

from __future__ import annotations

__all__ = ["one_line", "shortened"]

_JOINER = "\u200d"  # within an emoji of several


def one_line(text: str) -> str:
    """White space as single spaces; what is not to be seen, such as control codes, is left out."""
    seen = (c for c in text if c.isprintable() or c.isspace() or c == _JOINER)
    return " ".join("".join(seen).split())


def shortened(text: str, most: int) -> str:
    """At most `most` characters, with a sign where the rest was."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
