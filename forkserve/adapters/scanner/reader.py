"""One JSON object, read as it comes."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

__all__ = ["JsonReader", "Status"]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_LONGEST_WORD = 400  # characters of a number
_DEEPEST = 64


class Status(Enum):
    """How far the reader has come."""

    OPEN = 0  # the object goes on after the text so far
    CLOSED = 1  # some object inside has just ended
    DONE = 2  # the whole object has
    FAILED = 3  # the next character cannot belong to it


class _Want(Enum):
    KEY = 0
    KEY_OR_END = 1
    COLON = 2
    VALUE = 3
    VALUE_OR_END = 4
    COMMA_OR_END = 5


class JsonReader:
    """A push-down reader of one JSON object; no character is looked at twice.

    Raw line breaks inside strings are let through: models write them.  value, path, begin: of the
    object that ended last, where it stands (keys, None for a list) and where it began.
    retry: where the first brace inside a string is; broken text is read again from there.
    """

    def __init__(self, begin: int) -> None:
        self.at = begin  # position of the next character
        self.value: dict[str, Any] = {}
        self.path: tuple[str | None, ...] = ()
        self.begin = begin
        self.retry: int | None = None
        self._stack: list[tuple[dict[str, Any] | list[Any], int]] = []
        self._keys: list[str | None] = []  # in the container of the same depth
        self._want = _Want.VALUE
        self._text: list[str] | None = None  # pieces of the string that is open
        self._escaped = False
        self._word = ""

    def feed(self, text: str, index: int, stop: int) -> tuple[int, Status]:
        """Read ``text[index:stop]``; returns where it ended, and why."""
        offset = self.at - index
        status = Status.OPEN
        while index < stop and status is Status.OPEN:
            if self._text is not None:
                index, status = self._string(text, index, stop, offset)
            elif self._word:
                index, status = self._literal(text, index, stop)
            else:
                index = _end(_SPACE, text, index, stop)
                if index < stop:
                    index, status = self._mark(text, index, offset)
        self.at = index + offset
        return index, status

    # ---------------------------------------------------------------- pieces

    def _mark(self, text: str, index: int, offset: int) -> tuple[int, Status]:
        """One structural character, or the first one of a value."""
        char, want = text[index], self._want
        value_may_come = want is _Want.VALUE or want is _Want.VALUE_OR_END
        if char == '"' and (value_may_come or want in (_Want.KEY, _Want.KEY_OR_END)):
            self._text = []
        elif char in "{[" and value_may_come:
            if len(self._stack) == _DEEPEST:
                return index, Status.FAILED
            self._stack.append(({} if char == "{" else [], index + offset))
            self._keys.append(None)
            self._want = _Want.KEY_OR_END if char == "{" else _Want.VALUE_OR_END
        elif char in "}]":
            return self._close(char, index)
        elif char == ":" and want is _Want.COLON:
            self._want = _Want.VALUE
        elif char == "," and want is _Want.COMMA_OR_END:
            in_object = isinstance(self._stack[-1][0], dict)
            self._want = _Want.KEY if in_object else _Want.VALUE
        elif value_may_come and (char.isalnum() or char == "-"):
            self._word = char
        else:
            return index, Status.FAILED
        return index + 1, Status.OPEN

    def _close(self, char: str, index: int) -> tuple[int, Status]:
        container, begin = self._stack[-1]
        end = _Want.KEY_OR_END if isinstance(container, dict) else _Want.VALUE_OR_END
        fits = isinstance(container, dict) == (char == "}")
        if not fits or self._want not in (_Want.COMMA_OR_END, end):
            return index, Status.FAILED
        self._stack.pop()
        self._keys.pop()
        if isinstance(container, dict):
            self.value, self.begin, self.path = container, begin, tuple(self._keys)
        if not self._stack:
            return index + 1, Status.DONE
        self._put(container)
        return index + 1, Status.CLOSED if isinstance(container, dict) else Status.OPEN

    def _string(self, text: str, index: int, end: int, offset: int) -> tuple[int, Status]:
        assert self._text is not None
        if self._escaped:
            self._escaped = False
            self._text.append(text[index])
            return index + 1, Status.OPEN
        stop = _end(_PLAIN, text, index, end)
        if self.retry is None and (brace := text.find("{", index, stop)) >= 0:
            self.retry = brace + offset
        self._text.append(text[index:stop])
        if stop == end:
            return stop, Status.OPEN
        if text[stop] == "\\":
            self._text.append("\\")
            self._escaped = True
            return stop + 1, Status.OPEN
        raw, self._text = "".join(self._text), None
        if "\\" in raw:
            try:
                raw = _whole(json.loads(f'"{raw}"', strict=False))
            except ValueError:
                return stop, Status.FAILED
        if self._want in (_Want.KEY, _Want.KEY_OR_END):
            self._keys[-1] = raw
            self._want = _Want.COLON
        else:
            self._put(raw)
        return stop + 1, Status.OPEN

    def _literal(self, text: str, index: int, end: int) -> tuple[int, Status]:
        room = _LONGEST_WORD + 1 - len(self._word)
        stop = _end(_WORD, text, index, min(end, index + room))
        self._word += text[index:stop]
        if len(self._word) > _LONGEST_WORD:
            return stop, Status.FAILED
        if stop == end:
            return stop, Status.OPEN
        word, self._word = self._word, ""
        if word in _WORDS:
            self._put(_WORDS[word])
        elif (number := _NUMBER.fullmatch(word)) is not None:
            self._put(float(word) if number[1] or number[2] else int(word))
        else:
            return stop, Status.FAILED
        return stop, Status.OPEN

    def _put(self, value: Any) -> None:
        container = self._stack[-1][0]
        if isinstance(container, dict):
            key = self._keys[-1]
            assert key is not None
            container[key] = value
        else:
            container.append(value)
        self._want = _Want.COMMA_OR_END


def _end(pattern: re.Pattern[str], text: str, index: int, stop: int) -> int:
    """Where a run of such characters ends."""
    found = pattern.match(text, index, stop)
    return found.end() if found is not None else index


def _whole(text: str) -> str:
    """Half a surrogate pair cannot be written as UTF-8: show it as a replacement character."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
