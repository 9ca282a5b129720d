"""Where a chat template breaks the prefix: a conversation rendered turn by turn.

After a turn the session holds the prompt and the turn as the model wrote it; the next prompt is
what the template makes of the longer conversation. What both share is kept, the rest is computed
anew::

    held   [------ prompt ------|---- turn, as decoded ----]
    next   [----------- kept -----------|-- written anew --|-- result, header ...]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkserve.adapters.fitting import fit
from forkserve.adapters.templates import LATER, ChatRenderer, Known, Message, common
from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ConfigError, ForkServeError
from forkserve.prompt_text import plain

__all__ = ["Conversation", "Report", "Step", "check_template", "read_conversation"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 16  # tokens of each side of a change


@dataclass(frozen=True, slots=True)
class Conversation:
    """messages, and tools as OpenAI describes them.

    An assistant's message may hold "raw": its text as the model wrote it, up to the end marker.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """From the end of one turn to the next prompt; all counts in tokens.

    turn: number of the assistant's turn, from 1.  then: role of the message after it.
    held: prompt and turn as decoded.  prompt: the next prompt.  kept: what both begin with.
    again: held tokens that the template writes anew.  added: tokens of the prompt after the kept.
    inside: where the first difference is: "turn", "prompt" (an earlier message), or "" for none.
    before, after: held text and the template's from there on, shortened.
    known, wrapper, close: before a tool's result is there, how many tokens of the prompt after the
    kept are known, as text, and the text behind the result.  drift: why nothing is known.
    refused: the template would not write the next prompt; nothing else is known then.
    lost: numbers, from 0, of messages whose text the next prompt does not hold.
    assumed: how the model wrote the turn was not recorded; it is taken to write what the template
    does.
    """

    turn: int
    then: str
    held: int = 0
    prompt: int = 0
    kept: int = 0
    inside: str = ""
    before: str = ""
    after: str = ""
    known: int = 0
    wrapper: str = ""
    close: str = ""
    drift: str = ""
    refused: str = ""
    lost: tuple[int, ...] = ()
    assumed: bool = True

    @property
    def again(self) -> int:
        """Held tokens that are thrown away."""
        return self.held - self.kept

    @property
    def added(self) -> int:
        """Tokens to compute for the next prompt."""
        return self.prompt - self.kept

    @property
    def ok(self) -> bool:
        """All that is held is kept, and every message is in the next prompt."""
        return not self.again and not self.refused and not self.lost


@dataclass(frozen=True, slots=True)
class Report:
    """Steps in order; a refused one is the last.

    folded: the template takes no system message, so it was put before the first user's text.
    """

    steps: list[Step]
    folded: bool = False

    @property
    def ok(self) -> bool:
        """No step loses anything."""
        return all(step.ok for step in self.steps)


def read_conversation(value: Any, where: str) -> Conversation:
    """A conversation from JSON: a list of messages, or an object with messages and tools."""
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise ConfigError(f"{where} holds no messages: give a list, or an object with 'messages'")
    messages, tools = value["messages"], value.get("tools") or []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise ConfigError(
                f"{where}: message {number} has the role {role!r}; {', '.join(_ROLES)} are known"
            )
        for call in message.get("tool_calls") or ():
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
                raise ConfigError(f"{where}: message {number} has a call without a function")
            if "name" not in call["function"]:
                raise ConfigError(f"{where}: message {number} calls a function without a name")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: tools are no list of descriptions")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[:-1]:
        raise ConfigError(f"{where} has no turn of an assistant that something follows")
    return Conversation(messages, tools)


def check_template(tokenizer: Tokenizer, conversation: Conversation) -> Report:
    """One step for every assistant's turn that something follows.

    `ModelError` if there is no template, or if it refuses the first prompt.
    """
    writer = _Writer(ChatRenderer(tokenizer, conversation.tools))
    messages = conversation.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = [_plain(message) for message in messages[: turns[0]]]
    writer.text(prompt)  # refused: there is nothing to report
    report = Report([], writer.folds(prompt))
    for number, at in enumerate(turns, 1):
        end = next((i for i in turns if i > at), len(messages))
        if end == at + 1:
            continue  # two turns on end, or the last message: no prompt follows
        try:
            report.steps.append(_Turn(writer, messages, at, end).step(number))
        except ForkServeError as error:
            report.steps.append(Step(number, messages[at + 1]["role"], refused=str(error)))
            break
    return report


def _plain(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "raw"}


def _content(message: Message) -> str:
    """The text of a message; of parts those that are text."""
    given = message.get("content") or ""
    if isinstance(given, str):
        return given
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in given)


def _squeezed(text: str) -> str:
    return "".join(text.split())


class _Writer:
    """Conversations as text and tokens, with what the template lacks written into the text."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer

    def folds(self, messages: Sequence[Message]) -> bool:
        """Whether the prompt has a system message that the template does not take."""
        return not self.renderer.dialect.system and self.messages(messages)[0]["role"] == "system"

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return fit(messages, self.renderer)

    def text(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        return self.renderer.text(self.messages(messages), generation=generation)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        return self.renderer.tokens(self.messages(messages))


class _Turn:
    """Messages [0, at) are the prompt, `at` is the turn, up to `end` follows it."""

    def __init__(self, writer: _Writer, messages: Sequence[Message], at: int, end: int) -> None:
        self._writer = writer
        self._encode = writer.renderer.tokenizer.encode
        self._decode = writer.renderer.tokenizer.decode_bytes
        self._messages = [_plain(message) for message in messages[:end]]
        self._raw: str | None = messages[at].get("raw")
        self._at = at

    def step(self, number: int) -> Step:
        prompt = self._writer.tokens(self._messages[: self._at])
        held = [*prompt, *self._written(prompt)]
        following = self._writer.tokens(self._messages)
        kept = common(held, following)
        known = self._known(held) if self._messages[self._at + 1]["role"] == "tool" else Known(kept)
        broken = kept < len(held)
        return Step(
            turn=number,
            then=self._messages[self._at + 1]["role"],
            held=len(held),
            prompt=len(following),
            kept=kept,
            inside=("turn" if kept >= len(prompt) else "prompt") if broken else "",
            before=self._text(held[kept : kept + _SHOWN]) if broken else "",
            after=self._text(following[kept : kept + _SHOWN]) if broken else "",
            known=len(known.tokens),
            wrapper=self._text(known.tokens),
            close=known.close,
            drift=known.drift,
            lost=tuple(self._lost()),
            assumed=self._raw is None,
        )

    def _lost(self) -> Iterator[int]:
        """Messages whose text is not in the next prompt: neither as it is nor escaped for JSON.

        White space does not count: templates trim.  Nor does what an assistant thought.
        """
        prompt = _squeezed(self._writer.text(self._messages))
        for number, message in enumerate(self._messages):
            text = _content(message)
            if message["role"] == "assistant":
                text = text.rpartition("</think>")[2]
            forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
            if not any(_squeezed(form) in prompt for form in forms):
                yield number

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens).decode("utf-8", "replace")

    def _written(self, prompt: Sequence[int]) -> list[int]:
        """The turn's tokens as the model wrote them, without its end marker."""
        messages = self._messages
        before = self._writer.text(messages[: self._at])
        raw = self._raw
        if raw is None:
            whole = self._writer.text(messages[: self._at + 1], generation=False)
            raw = whole[common(before, whole) :]
            thought = messages[self._at].get("reasoning_content") or ""
            if thought and thought not in raw:  # it thought, though the template leaves it out
                opening = "" if before.rstrip().endswith("<think>") else "<think>\n"
                raw = opening + plain(thought) + "\n</think>\n\n" + raw
        ids = self._encode(before + raw)
        if list(prompt) != ids[: len(prompt)]:  # the seam falls into a token: a model can't know
            ids = [*prompt, *self._encode(raw)]
        written = ids[len(prompt) :]
        return written if self._raw is not None else self._ended(written)

    def _ended(self, written: list[int]) -> list[int]:
        """Up to the special token that ends the turn, behind which only space is left."""
        for index in range(len(written) - 1, -1, -1):
            token = written[index : index + 1]
            if not self._decode(token, skip_special=True):
                return written[:index]
            if self._text(token).strip():
                break
        return written

    def _known(self, held: Sequence[int]) -> Known:
        """What of the next prompt is known before the first result has come."""
        results = [i for i, m in enumerate(self._messages) if i > self._at and m["role"] == "tool"]

        def build(first: str) -> Sequence[Message]:
            open_ = list(self._messages[: results[-1] + 1])
            for number, index in enumerate(results):
                text = LATER.format(number) if number else first
                open_[index] = {**open_[index], "content": text}
            return self._writer.messages(open_)

        return self._writer.renderer.known(held, build)
