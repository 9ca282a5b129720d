"""A turn as messages: what a chat template is given, with results filled in or left open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forkserve.adapters.events import Call, Observation
from forkserve.adapters.scanner import Scanner, TextScanner
from forkserve.adapters.templates import LATER, Dialect, Mask, Message
from forkserve.prompt_text import plain

if TYPE_CHECKING:
    from forkserve.adapters.react import ReactAgent

__all__ = ["TurnMessages", "thought"]


class TurnMessages:
    """The messages of one turn after those before it.

    before: the conversation that the model answers.  text, calls, spans: what it wrote, and where
    in the text the calls stand.  observed: results by the number of their call.
    """

    def __init__(
        self,
        agent: ReactAgent,
        dialect: Dialect,
        before: Sequence[Message],
        scanner: Scanner | TextScanner,
    ) -> None:
        self.before = list(before)
        self.text = ""
        self.calls: list[Call] = []
        self.spans: list[tuple[int, int]] = []
        self.observed: dict[int, Observation] = {}
        self._agent = agent
        self._dialect = dialect
        self._scanner = scanner

    @property
    def known(self) -> int:
        """How many results have come without a gap."""
        known = 0
        while known in self.observed:
            known += 1
        return known

    def assistant(self, hidden: tuple[int, str] | None = None) -> Message:
        """The model's turn.  hidden: the number of a call whose arguments a word stands for."""
        text = self.text
        if not self.calls or not self._dialect.calls:
            if hidden is not None:
                begin, end = self.spans[hidden[0]]
                text = text[:begin] + hidden[1] + text[end:]
            return {"role": "assistant", "content": self._kept(text)}
        written = []
        for call in self.calls:
            arguments: Any = call.arguments
            if hidden is not None and hidden[0] == call.number:
                arguments = {hidden[1]: 0}
            function = {"name": call.name, "arguments": arguments}
            written.append({"id": call.id, "type": "function", "function": function})
        content = self._kept(self._scanner.content(text))
        return {"role": "assistant", "content": content, "tool_calls": written}

    def result(self, call: Call, text: str) -> Message:
        """An observation."""
        if self._dialect.results:
            return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        before, after = self._agent.result_wrap
        return {"role": "user", "content": before + plain(text) + after}

    def whole(self) -> list[Message]:
        """The conversation with all results."""
        results = [self.result(call, self.observed[call.number].text) for call in self.calls]
        return [*self.before, self.assistant(), *results]

    def open(self, first: str, hidden: tuple[int, str] | None = None) -> list[Message]:
        """The conversation with the results so far, `first` for the next, later ones left open."""
        known, results = self.known, []
        for call in self.calls:
            if call.number < known:
                text = self.observed[call.number].text
            else:
                text = first if call.number == known else LATER.format(call.number)
            results.append(self.result(call, text))
        return [*self.before, self.assistant(hidden), *results]

    def masks(self, secret: Callable[[Call], bool]) -> list[Mask]:
        """`open` with the arguments of each secret call replaced by a second word."""

        def mask(number: int) -> Mask:
            return lambda first, word: self.open(first, (number, word))

        return [mask(call.number) for call in self.calls if secret(call)]

    def _kept(self, text: str) -> str:
        return thought(text) if self._agent.reasoning == "drop" else text


def thought(text: str) -> str:
    """What is said after all thinking is done (it may have begun in the prompt)."""
    return text.rpartition("</think>")[2].lstrip("\n") if "</think>" in text else text
