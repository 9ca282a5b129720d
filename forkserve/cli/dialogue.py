"""The conversation as pieces of the model's chat template, so that each turn only appends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ModelError

__all__ = ["Dialogue"]

_MARK = "\N{OPEN BOX}here\N{OPEN BOX}"  # text that no template touches
_Message = dict[str, Any]


class Dialogue:
    """Renders one message at a time.  The template writes the frame; contents are plain text.

    Contents are encoded apart from their frame and never as special tokens, so a document that
    contains a marker cannot end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = {i: tokenizer.decode_bytes([i]).decode("utf-8", "replace") for i in eos_ids}
        system, user = _say("system", "s"), _say("user", "u")
        answer = _say("assistant", "a")
        self._system = self._frame([], lambda text: _say("system", text), False)
        self._user = self._frame([system, user, answer], lambda text: _say("user", text), True)
        _, self._close = self._frame([system, user], lambda text: _say("assistant", text), False)
        self._tool = self._tool_frame([system, user, answer])

    def trunk(self, text: str) -> list[int]:
        """The system message: instructions and document."""
        return self._filled(self._system, text)

    def question(self, text: str, last: int | None) -> list[int]:
        """A user message after an assistant turn that ended with token `last`, up to the reply."""
        return self._closing(last) + self._filled(self._user, text)

    def tool_wrap(self, last: int | None, text: str) -> list[int]:
        """All that comes before a tool's result: end of the call, header of the result, `text`."""
        frame = self._tokenizer.encode(self._tool[0])
        return self._closing(last) + frame + self._plain(text)

    def tool_result(self, text: str) -> list[int]:
        """The result itself, and the frame up to the model's reply."""
        return self._plain(text) + self._tokenizer.encode(self._tool[1])

    def _closing(self, last: int | None) -> list[int]:
        """End of an assistant turn; the marker that the model itself gave is not repeated."""
        if last is None:
            return []
        return self._tokenizer.encode(self._close.removeprefix(self._eos.get(last, "")))

    def _filled(self, frame: tuple[str, str], text: str) -> list[int]:
        encode = self._tokenizer.encode
        return encode(frame[0]) + self._plain(text) + encode(frame[1])

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False) if text else []

    def _frame(
        self, before: Sequence[_Message], message: Callable[[str], _Message], reply: bool
    ) -> tuple[str, str]:
        """What the template writes around the content of a message that follows `before`."""
        render = self._tokenizer.render
        start = render(before, add_generation_prompt=False) if before else ""
        whole = render([*before, message(_MARK)], add_generation_prompt=reply)
        head, mark, tail = whole.partition(_MARK)
        if not mark or not head.startswith(start):
            raise ModelError(
                "the model's chat template rewrites earlier turns, so a turn cannot be appended; "
                "give a model whose template only appends"
            )
        return head[len(start) :], tail

    def _tool_frame(self, before: Sequence[_Message]) -> tuple[str, str]:
        """Frame of a tool's result; templates without that role get it as a user message."""
        try:
            return self._frame(before, lambda text: _say("tool", text), True)
        except ModelError:
            return self._user


def _say(role: str, text: str) -> _Message:
    return {"role": role, "content": text}
