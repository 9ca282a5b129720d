"""An engine on the mock that answers by rule: what is tested is the adapter, not the model.

The grammar still decides which tokens are allowed: a reply that breaks it ends where it does.
"""

from __future__ import annotations

import json
import re
from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langchain.constraints import SchemaConstraint
from forkserve.control.generation import Generation
from forkserve.engine import MockBackend
from forkserve.types import GREEDY, SamplingParams

SYSTEM = SystemMessage("You answer questions about the sea, the sky and what is between them. " * 3)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def tide(city: str) -> str:
    """The tide at a city."""
    return f"low at {city}"


def cached(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


def whole(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total


class RuleEngine(Engine):
    """`start` looks at the prompt and scripts the reply."""

    def __init__(self, **config: Any) -> None:
        settings = {"capacity_pages": 4096, "page_size": 8} | config
        super().__init__(MockBackend(ForkServeConfig(**settings)))
        self.prompts: list[str] = []

    def start(
        self,
        session: str,
        max_tokens: int = 128,
        *,
        node: int | None = None,
        params: SamplingParams = GREEDY,
    ) -> Generation:
        with self._core.lock:
            prompt = self.text(session, node)
            self.prompts.append(prompt)
            reply = answer(prompt, params)
            backend = self.backend
            assert isinstance(backend, MockBackend)
            backend._by_request[self._generations + 1] = backend.tokenizer.encode(reply)
            return super().start(session, max_tokens, node=node, params=params)


def answer(prompt: str, params: SamplingParams) -> str:
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    users = [text for role, text in turns if role == "user"]
    last = users[-1] if users else ""
    if isinstance(params.constraint, SchemaConstraint):
        value = fill(params.constraint.schema, last)
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    answered = turns[-1][0] == "tool" if turns else False
    listed = turns[0][1].splitlines() if turns else []
    tools = [json.loads(line) for line in listed if line.startswith('{"')]
    if tools and not answered and "no tool" not in last:
        calls = [call(tool, last) for tool in tools[: 2 if "both" in last else 1]]
        return ("Let me see. " if "think" in last else "") + "".join(
            f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls
        )
    return "Hello from the engine. "


def call(tool: dict[str, Any], text: str) -> dict[str, Any]:
    function = tool["function"]
    return {"name": function["name"], "arguments": fill(function.get("parameters", {}), text)}


def fill(schema: Any, text: str, defs: Any = None) -> Any:
    """Some value that the schema accepts, out of words of the prompt."""
    defs = defs or schema.get("$defs") or {}
    if "$ref" in schema:
        return fill(defs[schema["$ref"].split("/")[-1]], text, defs)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return fill(schema[key][0], text, defs)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object" and "properties" not in schema:
        return {"setup": "why", "punchline": "because"}  # json mode: what the suite asks for
    if kind == "object" or "properties" in schema:
        required = schema.get("required", [])
        return {
            name: fill(one, text, defs)
            for name, one in schema.get("properties", {}).items()
            if name in required or not required
        }
    if kind in ("integer", "number"):
        found = re.findall(r"\((\d+)\)|\b(\d+)\b", text)
        return int(next((a or b for a, b in found[::-1]), 1))
    if kind == "boolean":
        return True
    if kind == "array":
        return [fill(schema.get("items", {}), text, defs)]
    special = re.search(r"[\u4e00-\u9fff]+|\w*ü\w*", text)
    if special:
        return special.group(0)
    return "San Francisco" if "San Francisco" in text else "text"
