"""The streaming scanner for the notations that models are trained on.

::

    {"name": ..., "arguments": {...}}                   bare JSON; also "parameters" (Llama 3),
    {"tool_calls": [{"id": ..., "function": {...}}]}    arguments as a string (OpenAI)
    <tool_call>{...}</tool_call>                        Hermes, Qwen
    <function=name>{...}</function>                     Llama 3, Qwen coder (<parameter=x>)
    <|python_tag|>{...}; {...}                          Llama 3
    [TOOL_CALLS][{...}, {...}]                          Mistral; also name[ARGS]{...}
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from forkserve.adapters.scanner.calls import (
    ParsedToolCall,
    Reason,
    ScanFault,
    is_place_of_call,
    read_call,
)
from forkserve.adapters.scanner.reader import JsonReader, Status

__all__ = ["Scanner"]

_EDGE = re.compile(r"[{>\]]")
_FUNCTION = re.compile(r"<function=([\w.\-]+)>\Z")
_PARAMETER = re.compile(r"<parameter=([\w.\-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LEAD = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]([\w\-]+))?\s*(?:\[ARGS\])?\s*")
_DEBRIS = re.compile(r"[\s,;\[\]]*")
_WRAPPERS = {"tool_calls", "function_call"}
_TAIL = 160  # characters kept to recognise a marker
_AGAIN = 3  # characters that may be read again for each new one


class _Mode(Enum):
    OUTSIDE = 0
    OBJECT = 1
    PARAMETERS = 2  # between <function=name><parameter=... and </function>


@dataclass(slots=True)
class _Tag:
    """An open call marker.

    closes: it ends with </tool_call>, rather than with the text.  sure: no call after it is a fault
    (after <|python_tag|> a program may stand).
    """

    begin: int
    closes: bool
    sure: bool = True
    found: int = 0


class Scanner:
    """Finds tool calls in a stream of text.

    names: tools that exist; a bare JSON object counts only if it calls one of them (None: any name
    counts).  Between call markers any name counts: the model meant a call.
    limit: longest call, in characters; what is longer is dropped with a fault.
    thinking: the text begins inside <think>, where nothing is a call, nor is it in any later one.
    faults: what was marked as a call and is none.  steps: characters looked at so far.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        *,
        limit: int = 1 << 20,
        thinking: bool = False,
    ) -> None:
        self.faults: list[ScanFault] = []
        self.steps = 0
        self._names = None if names is None else frozenset(names)
        self._limit = limit
        self._thinking = thinking
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._mode = _Mode.OUTSIDE
        self._base = 0  # position of the next character of the innermost source
        self._front = 0  # characters read at least once
        self._reread = 0
        self._tail = ""
        self._tag: _Tag | None = None
        self._lead: str | None = None  # text since a marker that a name may follow
        self._name: tuple[str, str | None] | None = None  # of the object or parameters that follow
        self._reader = JsonReader(0)
        self._begin = 0
        self._raw: list[str] = []
        self._size = 0
        self._regions: list[tuple[int, int]] = []
        self._calls: list[ParsedToolCall] = []

    def feed(self, text: str | bytes) -> list[ParsedToolCall]:
        """The calls that this piece completes, in order.  Bytes may be cut inside a character."""
        piece = self._decoder.decode(text) if isinstance(text, bytes) else text
        sources = [(piece, 0)]
        while sources:
            source, index = sources.pop()
            while index < len(source):
                before = index
                if self._mode is _Mode.OUTSIDE:
                    index = self._outside(source, index)
                elif self._mode is _Mode.PARAMETERS:
                    index = self._parameters(source, index)
                else:
                    index, again = self._object(source, index)
                    if again:
                        self._advance(index - before)
                        sources.append((source, index))
                        self._base -= len(again)
                        source, index = again, 0
                        continue
                self._advance(index - before)
        return self._take()

    def finish(self) -> list[ParsedToolCall]:
        """Call once at the end of the text: what is still open becomes a fault."""
        calls = self.feed(self._decoder.decode(b"", final=True))
        tag, end = self._tag, self._base
        named = self._mode is _Mode.OBJECT and (tag is not None or self._name is not None)
        if named or self._mode is _Mode.PARAMETERS:
            self._fault("truncated", self._begin, end, "the text ends inside a tool call")
        elif tag is not None and tag.sure and not tag.found:
            self._fault("malformed", tag.begin, end, "a tool call marker is followed by no call")
        if tag is not None and tag.found:
            self._regions.append((tag.begin, end))
        self._mode, self._tag, self._raw = _Mode.OUTSIDE, None, []
        return calls

    def content(self, text: str) -> str:
        """`text`, all that was fed, without calls and their markers."""
        regions = [*self._regions]
        if self._tag is not None and self._tag.found:
            regions.append((self._tag.begin, len(text)))
        kept, at = [], 0
        for begin, end in sorted(regions):
            kept.append(text[at : max(at, begin)])
            at = max(at, end)
        rest = "".join(kept) + text[at:]
        if regions and _DEBRIS.fullmatch(rest):
            return ""
        return rest.strip() if regions else rest

    def check(self) -> None:
        """Raise ScanError for the first fault, if there is one."""
        if self.faults:
            raise self.faults[0].error()

    # ---------------------------------------------------------------- outside of calls

    def _outside(self, text: str, index: int) -> int:
        """Text up to the next character that may begin or end something."""
        found = _EDGE.search(text, index)
        stop = found.end() if found is not None else len(text)
        piece = text[index:stop]
        if found is None or text[stop - 1] != "{" or self._thinking:
            self._tail = (self._tail + piece)[-_TAIL:]
            if self._lead is not None:
                self._lead = self._lead + piece if len(self._lead) < _TAIL else None
            if found is not None:
                self._marker(self._base + stop - index)
            return stop
        lead = self._lead
        if lead is not None:
            lead += piece[:-1]
        self._open(self._base + stop - 1 - index, lead)
        return stop - 1

    def _marker(self, end: int) -> None:
        """Something like a marker ends here."""
        tail = self._tail
        if tail.endswith("<think>") or self._thinking:
            self._thinking = not tail.endswith("</think>")
        elif tail.endswith("<tool_call>"):
            self._begin_tag(end - len("<tool_call>"), closes=True)
        elif tail.endswith("</tool_call>"):
            self._end_tag(end)
        elif tail.endswith("[TOOL_CALLS]"):
            self._begin_tag(end - len("[TOOL_CALLS]"), closes=False)
            self._lead, self._name = "", None
        elif tail.endswith("<|python_tag|>"):
            self._begin_tag(end - len("<|python_tag|>"), closes=False, sure=False)
        elif (function := _FUNCTION.search(tail)) is not None:
            self._begin = end - len(function[0])
            self._lead, self._name = "", (function[1], None)
        elif self._name is not None and self._lead is not None:
            self._after_function(self._name, self._lead.strip(), end)
        elif tail.endswith("</function>") and self._regions:
            self._regions[-1] = (self._regions[-1][0], end)

    def _after_function(self, name: tuple[str, str | None], lead: str, end: int) -> None:
        """What follows <function=name> up to a closing bracket."""
        if lead == "</function>":
            self._call(*name, {}, self._begin, end, "")
            self._regions.append((self._begin, end))
            self._lead = self._name = None
        elif lead.startswith("<parameter="):
            self._mode, self._raw, self._size = _Mode.PARAMETERS, [lead], 0
            self._lead = None

    def _begin_tag(self, begin: int, *, closes: bool, sure: bool = True) -> None:
        tag = self._tag
        if tag is not None and tag.closes and not tag.found:
            self._fault("malformed", tag.begin, begin, "a tool call marker is followed by no call")
        if tag is None or tag.closes:
            self._tag = _Tag(begin, closes, sure)
        self._tail = ""

    def _end_tag(self, end: int) -> None:
        tag = self._tag
        if tag is not None and tag.closes:
            if tag.found:
                self._regions.append((tag.begin, end))
            else:
                self._fault("malformed", tag.begin, end, "between call markers stands no call")
            self._tag = None

    # ---------------------------------------------------------------- JSON

    def _open(self, begin: int, lead: str | None) -> None:
        """A brace: an object begins, perhaps the arguments of a function named before."""
        named = self._name is not None and lead is not None and not lead.strip()
        match = _LEAD.fullmatch(lead) if lead is not None and self._name is None else None
        if match is not None:
            assert lead is not None
            self._name, self._begin = (match[1], match[2]), begin - len(lead)
        elif not named:
            self._name, self._begin = None, begin
        self._mode, self._tail, self._lead = _Mode.OBJECT, "", None
        self._reader = JsonReader(begin)
        self._raw, self._size = [], 0

    def _object(self, text: str, index: int) -> tuple[int, str]:
        """Text inside a JSON object, and what has to be read again because it is none."""
        room = min(len(text), index + self._limit + 1 - self._size)
        stop, status = self._reader.feed(text, index, room)
        self._raw.append(text[index:stop])
        self._size += stop - index
        if status is Status.FAILED:
            return stop, self._give_up()
        end = self._base + stop - index
        if status is Status.CLOSED and self._name is None and self._reader.path:
            self._report(end)
        elif status is Status.DONE:
            self._report(end)
            self._mode, self._name, self._raw = _Mode.OUTSIDE, None, []
        elif self._size > self._limit:
            self._too_long(end)
        return stop, ""

    def _too_long(self, end: int) -> None:
        self._fault("too_long", self._begin, end, f"a call of over {self._limit} characters")
        self._mode, self._name, self._raw = _Mode.OUTSIDE, None, []

    def _report(self, end: int) -> None:
        """An object ended: is it a call?"""
        reader, found = self._reader, len(self._calls)
        if self._name is not None:
            self._call(*self._name, reader.value, self._begin, end)
            self._regions.append((self._begin, end))
            return
        if not is_place_of_call(reader.path):
            return
        call = read_call(reader.value, lenient=self._tag is not None)
        known = self._tag is not None or self._names is None
        if call is not None and (known or call[0] in (self._names or ())):
            name, arguments = call
            if arguments is None:
                why = f"the arguments of '{name}' are no object"
                self._fault("arguments", reader.begin, end, why)
                if self._tag is not None:
                    self._tag.found += 1
            else:
                given = reader.value.get("id", reader.value.get("call_id"))
                self._call(name, str(given) if given else None, arguments, reader.begin, end)
        if not reader.path and (len(self._calls) > found or _WRAPPERS & reader.value.keys()):
            self._regions.append((reader.begin, end))

    def _give_up(self) -> str:
        """The object is none; returns the text to read again, from a brace inside a string."""
        raw, again = "".join(self._raw), ""
        self._mode, self._raw, self._name = _Mode.OUTSIDE, [], None
        if (retry := self._reader.retry) is not None:
            again = raw[retry - self._reader.at + len(raw) :]
            self._front = max(self._front, self._reader.at)
            if self._reread + len(again) > _AGAIN * self._front:
                return ""
            self._reread += len(again)
        return again

    # ---------------------------------------------------------------- <parameter=...>

    def _parameters(self, text: str, index: int) -> int:
        room = min(len(text), index + self._limit + 1 - self._size)
        stop = text.find(">", index, room) + 1 or room
        self._raw.append(text[index:stop])
        self._size += stop - index
        self._tail = (self._tail + text[index:stop])[-_TAIL:]
        end = self._base + stop - index
        if self._tail.endswith("</function>"):
            body = "".join(self._raw)
            assert self._name is not None
            self._call(*self._name, dict(_PARAMETER.findall(body)), self._begin, end, body)
            self._regions.append((self._begin, end))
            self._mode, self._name, self._raw = _Mode.OUTSIDE, None, []
        elif self._size > self._limit:
            self._too_long(end)
        return stop

    # ---------------------------------------------------------------- reporting

    def _call(
        self,
        name: str,
        given_id: str | None,
        arguments: dict[str, object],
        begin: int,
        end: int,
        source: str | None = None,
    ) -> None:
        if source is None:  # not for one of many in a list: that would take quadratic time
            source = "" if self._reader.path else "".join(self._raw)
        self._calls.append(ParsedToolCall(name, arguments, given_id, (begin, end), source))
        if self._tag is not None:
            self._tag.found += 1

    def _fault(self, reason: Reason, begin: int, end: int, message: str) -> None:
        self.faults.append(ScanFault(reason, (begin, end), message))

    def _advance(self, count: int) -> None:
        self.steps += count
        self._base += count
        self._front = max(self._front, self._base)

    def _take(self) -> list[ParsedToolCall]:
        calls, self._calls = self._calls, []
        return calls
