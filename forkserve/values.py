"""Checks of single values: what is wrong is said with the name of the argument.  And counts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from operator import index
from sys import float_info
from typing import Any

from forkserve.errors import ConfigError

__all__ = [
    "counted",
    "flag",
    "identifier",
    "listed",
    "mapping",
    "nearest",
    "number",
    "positive",
    "require_names",
    "string",
    "text",
    "utf8",
    "whole",
]


def counted(number: int, what: str) -> str:
    """``1 page``, ``2,000 pages``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def whole(name: str, value: Any) -> int:
    """An integer (numpy's too); a bool or a float is none.  Raises ConfigError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} must be an integer") from None


def flag(name: str, value: Any) -> bool:
    """True or False (numpy's too), and nothing that is merely true.  Raises ConfigError."""
    if isinstance(value, bool):
        return value
    import numpy as np  # here, because commands start without it

    if not isinstance(value, np.bool_):
        raise ConfigError(f"{name}={value!r} must be True or False")
    return bool(value)


def listed(name: str, value: Any) -> list[Any]:
    """What a sequence holds, in order; text is none.  Raises ConfigError."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise ConfigError(f"{name}={value!r} must be a sequence; write [{value!r}]")
    try:
        return list(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} must be a sequence, not {_kind(value)}") from None


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """A mapping.  Raises ConfigError."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be a mapping, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__


def number(name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> float:
    """A float in [low, high], never NaN.  Raises ConfigError."""
    try:
        found = float(value) if not isinstance(value, str | bytes | bytearray) else float("nan")
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not low <= found <= high:
        raise ConfigError(f"{name}={value!r} must lie in [{low:g}, {high:g}]")
    return found


def positive(name: str, value: Any, kind: type[int] | type[float]) -> None:
    """Refuse what is no finite number above zero; a whole one for int.  Raises ConfigError."""
    try:
        found = whole(name, value) if kind is int else number(name, value, high=float_info.max)
    except ConfigError:
        found = 0
    if isinstance(value, bool) or not found > 0:
        raise ConfigError(f"{name}={value!r} must be a positive {kind.__name__}, or left out")


def string(name: str, value: object) -> str:
    """A string, whatever it holds.  Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be a string, not {_kind(value)}")
    return str(value)


def text(name: str, value: object) -> str:
    """A string that UTF-8 can hold: no half of a surrogate pair.  Raises ConfigError."""
    value = string(name, value)
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{name}={value!r} holds half of a surrogate pair: it is no text")
    return value


def identifier(name: str, value: Any) -> str:
    """A string that a line of a list can show: 1 to 512 printable characters, and no control codes.

    Raises ConfigError.
    """
    text(name, value)
    if not 0 < len(value) <= 512 or not value.isprintable():
        shown = value if len(value) <= 80 else f"{value[:80]}..."
        raise ConfigError(
            f"{name}={shown!r} is no id: 1 to 512 printable characters ({len(value)} were given)"
        )
    return str(value)


def utf8(text: str) -> bytes:
    """The bytes of a text.  Raises ConfigError for half of a surrogate pair, which is none."""
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is not valid Unicode: {error}; "
            "text.encode('utf-8', 'replace').decode() puts '?' there"
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """What an error about an unknown name ends with: the known one that is most like it, if any."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def require_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse keywords that are not among the known ones.

    what: how the error speaks of one, with {} for its name.  Raises ConfigError.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown {what.format(name)}{nearest(name, known)}")
