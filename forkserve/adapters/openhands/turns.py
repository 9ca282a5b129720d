"""What is known of the next prompt while the tools of a turn run, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forkserve.adapters.guessing import ERROR_BRANCH, Guesser
from forkserve.adapters.openhands.bridge import Bridge
from forkserve.adapters.openhands.requests import Turn
from forkserve.adapters.templates import LATER, Mask, Message, common

__all__ = ["Running"]


@dataclass(eq=False)
class Running:
    """The tools of one turn.

    assistant: the model's turn as it will be sent back; its calls in order.  results: messages by
    the id of their call.  failed: ids of calls that came to an error.  public: tools whose
    arguments may be speculated on.
    """

    bridge: Bridge
    turn: Turn
    assistant: Mapping[str, Any]
    public: frozenset[str] = frozenset()
    results: dict[str, Message] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls of the turn, in OpenAI's form."""
        calls: Sequence[Mapping[str, Any]] = self.assistant["tool_calls"]
        return calls

    @property
    def names(self) -> list[str]:
        """The tools that are called."""
        return [call["function"]["name"] for call in self.calls]

    @property
    def complete(self) -> bool:
        """Whether every call has a result."""
        return all(call["id"] in self.results for call in self.calls)

    @property
    def ms(self) -> float:
        """Since the tools were started."""
        return (time.monotonic() - self.begun) * 1e3

    # ---------------------------------------------------------------- messages

    def whole(self) -> list[Message]:
        """The conversation with all results."""
        results = [self.results[call["id"]] for call in self.calls]
        return [*self.turn.request.messages, self.assistant, *results]

    def open(self, first: str, hidden: tuple[int, str] | None = None) -> list[Message]:
        """The conversation with `first` for the next result, later ones left open.

        hidden: the number of a call whose arguments a word stands for.
        """
        messages: list[Message] = [*self.turn.request.messages, self._assistant(hidden)]
        waiting = False
        for number, call in enumerate(self.calls):
            known = self.results.get(call["id"])
            if known is not None and not waiting:
                messages.append(known)
                continue
            text = LATER.format(number) if waiting else first
            waiting = True
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                    "content": text,
                }
            )
        return messages

    def _assistant(self, hidden: tuple[int, str] | None) -> Message:
        if hidden is None:
            return self.assistant
        calls = list(self.calls)
        number, word = hidden
        function = {**calls[number]["function"], "arguments": {word: 0}}
        calls[number] = {**calls[number], "function": function}
        return {**self.assistant, "tool_calls": calls}

    def _masks(self) -> list[Mask]:
        def mask(number: int) -> Mask:
            return lambda first, word: self.open(first, (number, word))

        secret = [n for n, name in enumerate(self.names) if name not in self.public]
        return [mask(number) for number in secret]

    # ---------------------------------------------------------------- what the engine is told

    def speculate(self, pause_ms: float, p_error: float, error_prefix: str) -> None:
        """Prefill the next prompt up to the first result that is missing, beside it an error."""
        turn, renderers = self.turn, self.bridge.renderers
        now = replace(self, results=dict(self.results))  # more may come meanwhile
        tools, masks = turn.request.tools, now._masks()
        known = renderers.known(turn.decoded, now.open, tools, masks=masks)
        begins = renderers.known(turn.decoded, now.open, tools, prefix=error_prefix, masks=masks)
        with turn.family.lock:
            if turn.stale or self.complete:
                return
            session, node = turn.family.session.id, turn.tip.node
            guesser = turn.guesser = Guesser(self.bridge.engine, session, turn.serial, node)
            events = guesser.wrap(known, self.names[0], pause_ms)
            if known.tokens:
                events += guesser.recovery(begins, p_error, pause_ms)
        admitted = sum(event.admitted for event in events)
        self.bridge.count(speculated=admitted, drifts=int(bool(known.drift)))

    def commit(self) -> None:
        """Bind the results: the tip holds the next prompt, unless a fork stands in the way."""
        turn = self.turn
        prompt = self.bridge.renderers.tokens(self.whole(), turn.request.tools)
        branch = ERROR_BRANCH if self.failed else self.names[0]
        with turn.family.lock:
            if turn.stale:
                return
            shared = common(turn.family.tokens(turn.tip).tolist(), prompt)
            done = turn.family.extend(turn.tip, prompt, shared, branch)
        turn.drop()
        if not done:
            return
        self.bridge.count(committed=1, errors=int(bool(self.failed)))
