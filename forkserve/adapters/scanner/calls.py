"""What a scanner reports, and when a JSON object is a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forkserve.errors import AdapterError

__all__ = ["ParsedToolCall", "Reason", "ScanError", "ScanFault", "is_place_of_call", "read_call"]

Reason = Literal["malformed", "arguments", "truncated", "too_long"]

_NAMES = ("name", "tool", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_PLACES = ((), ("tool_calls", None), ("function_call",))


class ScanError(AdapterError):
    """Text that was marked as a tool call is none."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call.  id: as the model wrote it, or None.  span: its characters [begin, end).

    source: the text of that span.  text: an argument that is plain text (Action Input), and
    `arguments` is empty then.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    span: tuple[int, int] = (0, 0)
    source: str = field(default="", repr=False, compare=False)
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ScanFault:
    """Something between call markers that is no call.  span: characters [begin, end)."""

    reason: Reason
    span: tuple[int, int]
    message: str

    def error(self) -> ScanError:
        """The fault as an exception."""
        return ScanError(f"{self.message} (characters {self.span[0]} to {self.span[1]})")


def is_place_of_call(path: Sequence[str | None]) -> bool:
    """Whether an object at this path of a JSON text may be a call: keys, None for a list."""
    return tuple(path) in _PLACES


def read_call(
    value: Mapping[str, Any], *, lenient: bool
) -> tuple[str, dict[str, Any] | None] | None:
    """Name and arguments of a JSON object, or None if it is no call.

    Arguments that cannot be read come back as None.  lenient: the text is marked as a call, so that
    one without arguments counts.
    """
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = next((value[k] for k in _NAMES if isinstance(value.get(k), str)), None)
    if not name:
        return None
    key = next((k for k in _ARGUMENTS if k in value), None)
    if key is None:
        return (name, {}) if lenient else None
    given = value[key]
    if isinstance(given, Mapping):
        if key == "parameters" and given.get("type") == "object" and "properties" in given:
            return None  # the description of a tool, not a call of it
        return name, dict(given)
    if given is None or given == "":
        return name, {}
    if isinstance(given, str):
        try:
            decoded = json.loads(given, strict=False)
        except ValueError:
            return name, None
        return name, decoded if isinstance(decoded, dict) else None
    return name, None
