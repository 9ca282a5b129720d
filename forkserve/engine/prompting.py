"""Chat messages as a prompt: what has to be done around every call of a chat template."""

from __future__ import annotations

import json
import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ConfigError, ForkServeError, ModelError
from forkserve.prompt_text import PromptText, content, joined

__all__ = ["opening_ids", "render_prompt", "require_messages", "takes_system"]

_WORD = "Ty6SystemWordQm"
_takes: weakref.WeakKeyDictionary[Tokenizer, bool] = weakref.WeakKeyDictionary()


def opening_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text with which a sequence begins.

    Models whose tokenizer puts a begin-of-text token before every text (`begin_ids`: Llama, Mistral
    and Gemma) write nonsense without it, so it is put there too, once.  A `PromptText` with frames
    of its own, as a chat template or a program writes them, says itself how it begins.
    """
    ids = tokenizer.encode(text)
    begin = [*getattr(tokenizer, "begin_ids", ())]
    framed = isinstance(text, PromptText) and text.plain != ((0, len(text)),)
    return ids if not ids or framed or ids[: len(begin)] == begin else begin + ids


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    system: bool | None = None,
) -> str:
    """Messages as text, by the model's own template; `encode` reads its marks.

    A template that takes no system message (Gemma's refuses one) has it as the beginning of the
    first user's text.  system: whether it takes one, if that is known.

    Arguments of a call that are JSON in a string, as OpenAI writes them, are an object for the
    template, as Hugging Face's expect and as vLLM does; one that fails at that is given the string.
    Raises ConfigError for ``tool_calls`` that are no list, ModelError when the template fails.
    """
    first = messages[0].get("role") if messages else None
    if first == "system" and not (takes_system(tokenizer) if system is None else system):
        messages = _folded(messages)
    render = partial(tokenizer.render, tools=tools, add_generation_prompt=add_generation_prompt)
    read = [_read(message) for message in messages]
    if not all(map(operator.is_, read, messages)):
        with suppress(ModelError):
            return render(read)
    return render(messages)


def _read(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message itself, or with arguments of its calls as objects that were JSON of one."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ConfigError(
            f"a chat message of role '{message.get('role')}' has tool_calls={calls!r:.100}; give a "
            "list of calls"
        )
    read = [_call(call) for call in calls]
    return message if all(map(operator.is_, read, calls)) else {**message, "tool_calls": read}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):  # a model may have written it
        value = json.loads(function["arguments"] or "{}")
        if isinstance(value, dict):
            return {**call, "function": {**function, "arguments": value}}
    return call


def require_messages(messages: Sequence[Any]) -> None:
    """Refuse what is no chat message: a mapping with a role, and content: text or a list of parts.

    As OpenAI has it, an assistant's message that calls tools may do without content; no other may.
    Raises ConfigError with the place of the first that is wrong.
    """
    for place, message in enumerate(messages):
        where = f"chat message {place} of {len(messages)}"
        if not isinstance(message, Mapping):
            raise ConfigError(
                f"{where} is {type(message).__name__}, not a dict with a 'role' and a 'content'"
            )
        role, said = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigError(
                f"{where} has role={role!r}; give 'system', 'user', 'assistant' or 'tool'"
            )
        if said is None and not (role == "assistant" and message.get("tool_calls")):
            raise ConfigError(
                f"{where}, of role '{role}', has no content; give 'content', which only an "
                "assistant's message with 'tool_calls' may lack"
            )
        if not isinstance(said, str | list | tuple | Mapping | None):
            raise ConfigError(
                f"{where}, of role '{role}', has content={said!r}; give text or a list of parts"
            )


def takes_system(tokenizer: Tokenizer) -> bool:
    """Whether the template writes a system message at the beginning, found out by trying it."""
    known = _takes.get(tokenizer)
    if known is None:
        messages = [{"role": "system", "content": _WORD}, {"role": "user", "content": "x"}]
        try:
            known = _WORD in tokenizer.render(messages, add_generation_prompt=True)
        except ForkServeError:
            known = False
        _takes[tokenizer] = known
    return known


def _folded(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """System messages at the beginning as the beginning of the first user's text."""
    count = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    parts: list[str] = []
    for message in messages[:count]:
        said = message["content"]
        parts += ["\n\n" if parts else "", content(said if isinstance(said, str) else str(said))]
    text = joined(parts)
    rest = list(messages[count:])
    if not rest or rest[0].get("role") != "user":  # nobody to put it before
        return [{"role": "user", "content": text}, *rest]
    said = rest[0].get("content") or ""
    whole: Any = [{"type": "text", "text": text}]
    whole = joined([text, "\n\n", content(said)]) if isinstance(said, str) else [*whole, *said]
    return [{**rest[0], "content": whole}, *rest[1:]]
