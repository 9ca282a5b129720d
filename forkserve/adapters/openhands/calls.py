"""One call of the model: its limits, and its reply as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from forkserve.adapters.chat import Reading, Thoughts
from forkserve.adapters.constraints import constraint_for
from forkserve.adapters.openhands.forest import Place
from forkserve.adapters.openhands.requests import Answer, ChatRequest, Delta
from forkserve.api import Engine
from forkserve.branch import Branch
from forkserve.errors import ContextOverflow, SessionError
from forkserve.reply import Reply
from forkserve.types import SamplingParams

__all__ = ["Call"]

_ENDS = {"length": "length", "context": "length"}


class Call:
    """A request whose prompt is in place."""

    def __init__(self, engine: Engine, request: ChatRequest, prompt: list[int], place: Place):
        self.request, self.prompt, self.place = request, prompt, place
        self._engine = engine
        ends = engine.backend.tokenizer.decode_bytes(prompt[-8:]).decode("utf-8", "replace")
        self._thoughts = Thoughts(inside=ends.rstrip().endswith("<think>"))
        self._reading = Reading(request.callables)
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []
        limit = request.timeout
        self._deadline = time.monotonic() + limit if limit is not None else None

    @property
    def branch(self) -> Branch:
        """Where to generate."""
        return self.place.family.session.branch(self.place.tip.node)

    def limits(self, most: int) -> tuple[int, SamplingParams]:
        """Tokens of the reply, `most` if the request does not say, and how to sample.

        Raises ContextOverflow when there is no room for any, ConfigError for a bad parameter.
        """
        request, limit = self.request, self._engine.backend.info.max_context
        room = limit - len(self.prompt)
        if room < 1:
            raise ContextOverflow(len(self.prompt) + 1, limit, "prompt with a reply")
        constraint = constraint_for(
            self._engine, request.tools, request.tool_choice, request.response_format
        )
        wanted = most if request.max_tokens is None else request.max_tokens
        return min(wanted, room), SamplingParams(constraint=constraint, **request.sampling)

    def feed(self, piece: str) -> Delta:
        """What a piece of text adds.  Raises TimeoutError once the time is over."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError(f"no whole reply within timeout={self.request.timeout:g} s")
        thought, text = self._thoughts.feed(piece)
        return self._add(thought, *self._reading.feed(text))

    def rest(self) -> Delta:
        """What was held back, for it might have been part of a call."""
        thought, text = self._thoughts.finish()
        first = self._add(thought, *self._reading.feed(text))
        last = self._add("", *self._reading.finish())
        return Delta(first.text + last.text, first.thought, first.calls + last.calls)

    def answer(self, reply: Reply) -> Answer:
        """The whole reply.  Raises SessionError when it was cut off from outside."""
        if reply.finish_reason == "cancelled":
            raise SessionError(
                "the reply was cut off: its session was closed, or its branch aborted"
            )
        reason = _ENDS.get(reply.finish_reason or "", "stop")
        return Answer(
            id=self.request.id,
            text="".join(self._text),
            thought="".join(self._thought),
            calls=tuple(self._calls),
            finish_reason="tool_calls" if self._calls else reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(reply.tokens),
            cached=self.place.cached,
        )

    def _add(self, thought: str, text: str, calls: Sequence[dict[str, Any]]) -> Delta:
        found = []
        for call in calls:
            arguments = json.dumps(call["args"], ensure_ascii=False)
            function = {"name": call["name"], "arguments": arguments}
            found.append({"id": call["id"], "type": "function", "function": function})
        self._text.append(text)
        self._thought.append(thought)
        self._calls += found
        return Delta(text, thought, tuple(found))
