"""Messages as a template takes them: what it can't write is written into their text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from forkserve.adapters.templates import ChatRenderer, Message
from forkserve.errors import ConfigError
from forkserve.prompt_text import content, joined, plain

__all__ = ["fit"]

_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "video_url", "file")

_HOW_TO_CALL = '\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'


def fit(messages: Iterable[Message], renderer: ChatRenderer) -> list[dict[str, Any]]:
    """OpenAI's messages for a renderer.

    A template without a place for tools has them in the system message; one that knows no calls
    has them in the assistant's text, and one that knows no results in a user's.  Raises ConfigError
    for content that is no text.
    """
    dialect, out = renderer.dialect, []
    for message in messages:
        message = {**message, "content": _text(message.get("content"))}
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
            if not dialect.calls:
                written: list[str] = [content(message["content"])]
                for call in message.pop("tool_calls"):
                    written += ["<tool_call>", plain(json.dumps(call["function"])), "</tool_call>"]
                message["content"] = joined(written)
        if message["role"] == "tool" and not dialect.results:
            said = "<tool_response>\n" + content(message["content"]) + "\n</tool_response>"
            message = {"role": "user", "content": said}
        out.append(message)
    if renderer.tools and not dialect.tools:
        listing = "\n".join(json.dumps(tool) for tool in renderer.tools)
        text = "You may call these tools:\n" + plain(listing) + _HOW_TO_CALL
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": content(out[0]["content"]) + "\n\n" + text}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def _text(given: Any) -> str:
    """Content as text; parts of a list are lines.  Raises ConfigError for pictures etc."""
    if given is None or isinstance(given, str):
        return given or ""
    lines = []
    for part in given:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if part.get("type") in _MEDIA:
            raise ConfigError(f"content of type {part['type']!r}: the model reads text only")
        if isinstance(text := part.get("text"), str):  # a part of another kind says it elsewhere
            lines.append(text)
    return "\n".join(lines)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as models write it: the name first, the arguments as an object."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # the template may cope with the text itself
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
