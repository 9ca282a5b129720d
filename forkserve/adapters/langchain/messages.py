"""LangChain messages as prompts of the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import convert_to_openai_messages

from forkserve.adapters.chat import Renderers
from forkserve.adapters.templates import Known, Message
from forkserve.engine.protocol import Tokenizer

__all__ = ["Prompts"]


class Prompts:
    """Renders conversations of LangChain messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._renderers = Renderers(tokenizer)

    def tokens(
        self, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The prompt for the next turn."""
        return self._renderers.tokens(_plain(messages), tools)

    def known(
        self,
        decoded: Sequence[int],
        messages: Sequence[BaseMessage],
        tools: Sequence[Mapping[str, Any]],
        call_id: str,
        name: str,
    ) -> Known:
        """What will follow `decoded` up to the result of a call; `messages` end in the call."""
        history = _plain(messages)

        def build(content: str) -> Sequence[Message]:
            result = {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
            return [*history, result]

        return self._renderers.known(decoded, build, tools)


def _plain(messages: Sequence[BaseMessage]) -> Sequence[Message]:
    plain = convert_to_openai_messages(list(messages), text_format="string")
    return plain if isinstance(plain, list) else [plain]
