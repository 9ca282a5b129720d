"""Chat messages of clients that speak OpenAI's form: to prompts, and replies back to messages."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from forkserve.adapters.fitting import fit
from forkserve.adapters.scanner import Scanner
from forkserve.adapters.templates import ChatRenderer, Known, Mask, Message
from forkserve.engine.protocol import Tokenizer

__all__ = ["Reading", "Renderers", "Thoughts"]

# What is left of call markers when the calls are taken out.
_MARKERS = re.compile(
    r"<tool_call>\s*</tool_call>|<function=[^>]*>\s*</function>|<\|python_tag\|>[;\s]*"
    r"|\[TOOL_CALLS\][\[\],\s]*"
)
_OPEN, _CLOSE = "<think>", "</think>"
_KEPT = 8  # tool sets whose renderer is kept


class Renderers:
    """Renders conversations; one renderer for each set of tools."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderers: dict[str, ChatRenderer] = {}
        self._lock = threading.Lock()  # renderers remember the last text

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = True,
    ) -> list[int]:
        """The prompt for the next turn.  generation: with the header of the model's turn."""
        with self._lock:
            renderer = self._renderer(tools)
            return renderer.tokens(fit(messages, renderer), generation=generation)

    def known(
        self,
        decoded: Sequence[int],
        build: Callable[[str], Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prefix: str = "",
        masks: Sequence[Mask] = (),
    ) -> Known:
        """What will follow `decoded` up to a result; see `ChatRenderer.known`."""
        with self._lock:
            renderer = self._renderer(tools)

            def fitted(mask: Mask) -> Mask:
                return lambda first, word: fit(mask(first, word), renderer)

            return renderer.known(
                decoded,
                lambda first: fit(build(first), renderer),
                prefix=prefix,
                masks=[fitted(mask) for mask in masks],
            )

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


class Thoughts:
    """Splits a reply into what stands in its first <think> block and what follows.

    inside: the prompt has opened the block.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._begun = inside  # whether the place of a block has passed
        self._held = ""  # may be a part of a marker
        self._closed = False  # the last thing was the end of the block

    def feed(self, piece: str) -> tuple[str, str]:
        """Thought and text that this piece adds."""
        text, self._held = self._held + piece, ""
        if not self._begun:
            start = text.lstrip()
            if len(start) < len(_OPEN) and _OPEN.startswith(start):
                self._held = text
                return "", ""
            self._begun = True
            if start.startswith(_OPEN):
                self._inside, text = True, start[len(_OPEN) :]
        if not self._inside:
            return "", self._after(text)
        thought, closed, rest = text.partition(_CLOSE)
        if closed:
            self._inside, self._closed = False, True
            return thought, self._after(rest)
        keep = next(n for n in range(len(_CLOSE), -1, -1) if thought.endswith(_CLOSE[:n]))
        self._held = thought[len(thought) - keep :]
        return thought[: len(thought) - keep], ""

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)

    def _after(self, text: str) -> str:
        """Text after the block, without the empty lines between."""
        if self._closed:
            text = text.lstrip("\n")
            self._closed = not text
        return text
