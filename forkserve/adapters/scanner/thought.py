"""Calls in the text form of ReAct.

::

    Thought: I need the weather.
    Action: weather
    Action Input: {"city": "Oslo"}
    Observation: (the harness writes on from here)
"""

from __future__ import annotations

import re

from forkserve.adapters.scanner.calls import ParsedToolCall, Reason, ScanFault
from forkserve.adapters.scanner.reader import JsonReader, Status

__all__ = ["TextScanner"]

_ACTION = re.compile(r"\s*Action\s*:\s*(.+?)\s*")
_INPUT = re.compile(r"\s*Action Input\s*:\s*")
_STOP = re.compile(r"\s*(?:Observation|Thought|Final Answer|Action)\s*:")
_HEAD = 4096  # characters of a line that are looked at


class TextScanner:
    """Finds Action / Action Input pairs; see `Scanner` for the rest of the interface.

    An input that is a JSON object ends with it; any other goes on to the next Observation, Thought,
    Action or Final Answer line, or to the end of the text, and is reported as plain `text`.
    """

    def __init__(self, *, limit: int = 1 << 20) -> None:
        self.faults: list[ScanFault] = []
        self.steps = 0
        self._limit = limit
        self._base = 0
        self._line: list[str] = []  # of the present line, as far as it is of use
        self._length = 0  # of the whole present line
        self._braced = False  # the line has had a brace
        self._name: str | None = None
        self._begin = 0
        self._awaited = False  # "Action Input:" was a line of its own
        self._input: list[str] | None = None  # of an input that is plain text
        self._size = 0
        self._reader: JsonReader | None = None
        self._calls: list[ParsedToolCall] = []

    def feed(self, text: str) -> list[ParsedToolCall]:
        """The calls that this piece completes, in order."""
        index = 0
        while index < len(text):
            before = index
            index = self._plain(text, index) if self._reader is None else self._json(text, index)
            self.steps += index - before
            self._base += index - before
        return self._take()

    def finish(self) -> list[ParsedToolCall]:
        """Call once at the end of the text; an open input ends here."""
        if self._reader is not None:
            self._reader = None
            self._fault("truncated", self._base, "the text ends inside an action input")
        elif self._length:
            self._end_line(self._base, last=True)
        self._flush(self._base)
        if self._name is not None:
            self._fault("malformed", self._base, f"the action '{self._name}' has no input")
        return self._take()

    def content(self, text: str) -> str:
        """In this form the calls are part of the text."""
        return text

    def check(self) -> None:
        """Raise ScanError for the first fault, if there is one."""
        if self.faults:
            raise self.faults[0].error()

    # ---------------------------------------------------------------- lines

    def _plain(self, text: str, index: int) -> int:
        """Up to the end of the line, or to a brace that begins an input."""
        stop = text.find("\n", index) + 1 or len(text)
        if self._name is not None and self._input is None and not self._braced:
            brace = text.find("{", index, stop)
            if brace >= 0:
                self._braced = True
                head = "".join([*self._line, text[index:brace]])
                if _INPUT.fullmatch(head) or (self._awaited and not head.strip()):
                    self._reader = JsonReader(self._base + brace - index)
                    self._line, self._length, self._size = [], 0, 0
                    return brace
        self._keep(text[index:stop])
        if text[stop - 1] == "\n":
            self._end_line(self._base + stop - index)
        return stop

    def _keep(self, piece: str) -> None:
        room = (_HEAD if self._input is None else self._limit) - self._length
        if room > 0 and piece:
            self._line.append(piece[:room])
        self._length += len(piece)

    def _end_line(self, end: int, *, last: bool = False) -> None:
        line, begin = "".join(self._line), end - self._length
        size, self._line, self._length, self._braced = self._length, [], 0, False
        if self._input is not None and not _STOP.match(line[:_HEAD]):
            self._grow(line, size)
            return
        self._flush(begin)
        found = _INPUT.match(line)
        if self._name is not None and (found is not None or self._awaited):
            rest = line[found.end() :] if found is not None else line
            self._awaited = True
            if rest.strip() or last:
                self._input, self._size = [], 0
                self._grow(rest, size)
        elif (action := _ACTION.fullmatch(line.rstrip("\n"))) is not None:
            if self._name is not None:
                self._fault("malformed", begin, f"the action '{self._name}' has no input")
            self._name, self._begin = action[1].strip("`*\"' "), begin

    def _grow(self, line: str, size: int) -> None:
        assert self._input is not None
        self._size += size
        if self._size <= self._limit:
            self._input.append(line)

    def _flush(self, end: int) -> None:
        """An input that is plain text ends here."""
        if self._input is None or self._name is None:
            return
        if self._size > self._limit:
            self._fault("too_long", end, f"an action input of over {self._limit} characters")
        else:
            text, span = "".join(self._input), (self._begin, end)
            self._calls.append(ParsedToolCall(self._name, {}, None, span, text, text.strip()))
        self._reset()

    # ---------------------------------------------------------------- JSON

    def _json(self, text: str, index: int) -> int:
        assert self._reader is not None
        assert self._name is not None
        room = min(len(text), index + self._limit + 1 - self._size)
        stop, status = self._reader.feed(text, index, room)
        self._size += stop - index
        self._line.append(text[index:stop])
        end = self._base + stop - index
        if status is Status.DONE:
            source = "".join(self._line)
            value, span = self._reader.value, (self._begin, end)
            self._calls.append(ParsedToolCall(self._name, value, None, span, source))
            self._reset()
        elif status is Status.FAILED:  # plain text that begins with a brace
            self._input, self._reader, self._line = self._line, None, []
        elif self._size > self._limit:
            self._fault("too_long", end, f"an action input of over {self._limit} characters")
            self._reset()
        return stop

    # ---------------------------------------------------------------- helpers

    def _reset(self) -> None:
        self._name = self._input = self._reader = None
        self._awaited, self._line, self._length = False, [], 0

    def _fault(self, reason: Reason, end: int, message: str) -> None:
        self.faults.append(ScanFault(reason, (self._begin, end), message))
        self._name = None

    def _take(self) -> list[ParsedToolCall]:
        calls, self._calls = self._calls, []
        return calls
