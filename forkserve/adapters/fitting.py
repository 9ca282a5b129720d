"""Messages as a template takes them: what it can't write is written into their text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from forkserve.adapters.templates import ChatRenderer, Message

__all__ = ["fit"]


def fit(messages: Iterable[Message], renderer: ChatRenderer) -> list[dict[str, Any]]:
    """OpenAI's messages for a renderer.

    A template without a place for tools has them in the system message; one that knows no calls
    has them in the assistant's text, and one that knows no results in a user's.
    """
    dialect, out = renderer.dialect, []
    for given in messages:
        message = dict(given)
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
            message["content"] = message.get("content") or ""
            if not dialect.calls:
                message["content"] += "".join(
                    f"<tool_call>{json.dumps(call['function'])}</tool_call>"
                    for call in message.pop("tool_calls")
                )
        if message["role"] == "tool" and not dialect.results:
            message = {
                "role": "user",
                "content": f"<tool_response>\n{message['content']}\n</tool_response>",
            }
        out.append(message)
    if renderer.tools and not dialect.tools:
        listing = "\n".join(json.dumps(tool) for tool in renderer.tools)
        text = (
            f"You may call these tools:\n{listing}\nTo call one, write <tool_call>"
            '{"name": ..., "arguments": {...}}</tool_call>.'
        )
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{text}"}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as models write it: the name first, the arguments as an object."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # the template may cope with the text itself
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
