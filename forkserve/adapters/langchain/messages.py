"""LangChain messages as prompts of the model's own template, and its text back as messages."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import convert_to_openai_messages

from forkserve.adapters.fitting import fit
from forkserve.adapters.scanner import Scanner
from forkserve.adapters.templates import ChatRenderer, Known
from forkserve.engine.protocol import Tokenizer

__all__ = ["Prompts", "Reading"]

# What is left of call markers when the calls are taken out.
_MARKERS = re.compile(
    r"<tool_call>\s*</tool_call>|<function=[^>]*>\s*</function>|<\|python_tag\|>[;\s]*"
    r"|\[TOOL_CALLS\][\[\],\s]*"
)
_KEPT = 8  # tool sets whose renderer is kept


class Prompts:
    """Renders conversations; one renderer for each set of tools."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderers: dict[str, ChatRenderer] = {}
        self._lock = threading.Lock()  # renderers remember the last text

    def tokens(
        self, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The prompt for the next turn."""
        with self._lock:
            renderer = self._renderer(tools)
            return renderer.tokens(_plain(messages, renderer))

    def known(
        self,
        decoded: Sequence[int],
        messages: Sequence[BaseMessage],
        tools: Sequence[Mapping[str, Any]],
        call_id: str,
        name: str,
    ) -> Known:
        """What will follow `decoded` up to the result of a call; `messages` end in the call."""
        with self._lock:
            renderer = self._renderer(tools)
            history = convert_to_openai_messages(list(messages), text_format="string")

            def build(content: str) -> Sequence[Mapping[str, Any]]:
                result = {
                    "role": "tool",
                    "tool_call_id": call_id,
                    "name": name,
                    "content": content,
                }
                return fit([*history, result], renderer)

            return renderer.known(decoded, build)

    def _renderer(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        key = json.dumps(list(tools), sort_keys=True)
        renderer = self._renderers.pop(key, None)
        if renderer is None:
            some = next(iter(self._renderers.values()), None)
            dialect = some.dialect if some is not None else None
            renderer = ChatRenderer(self._tokenizer, tools, dialect)
        self._renderers[key] = renderer
        while len(self._renderers) > _KEPT:
            del self._renderers[next(iter(self._renderers))]
        return renderer


def _plain(messages: Sequence[BaseMessage], renderer: ChatRenderer) -> list[dict[str, Any]]:
    return fit(convert_to_openai_messages(list(messages), text_format="string"), renderer)


class Reading:
    """A reply while it comes: text to show at once, calls at their end.

    tools: names that count as calls; without any all is text.
    """

    def __init__(self, tools: Sequence[str]) -> None:
        self._scanner = Scanner(tools) if tools else None
        self._text = ""
        self._shown = 0
        self._held = False
        self._spans: list[tuple[int, int]] = []
        self.calls: list[dict[str, Any]] = []

    def feed(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Text that may be shown now, and the calls that this piece completes."""
        if self._scanner is None:
            return piece, []
        calls = self._take(self._scanner.feed(piece))
        begin = len(self._text)
        self._text += piece
        if self._held:
            return "", calls
        marks = [at for mark in "<{[" if (at := piece.find(mark)) >= 0]
        if marks:  # from here on it may be a call
            self._held = True
            piece = piece[: min(marks)]
        self._shown = begin + len(piece)
        return piece, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and of the calls."""
        if self._scanner is None:
            return "", []
        calls = self._take(self._scanner.finish())
        rest, at = [], self._shown
        for begin, end in sorted(self._spans):
            rest.append(self._text[at : max(at, begin)])
            at = max(at, end)
        rest.append(self._text[at:])
        left = "".join(rest)
        if self._spans:
            left = _MARKERS.sub("", left)
        return (left if left.strip() else ""), calls

    def _take(self, found: Sequence[Any]) -> list[dict[str, Any]]:
        calls = []
        for call in found:
            self._spans.append(call.span)
            calls.append(
                {
                    "name": call.name,
                    "args": call.arguments,
                    "id": call.id or f"call_{uuid4().hex[:20]}",
                    "type": "tool_call",
                }
            )
        self.calls += calls
        return calls
