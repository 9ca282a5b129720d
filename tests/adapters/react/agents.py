"""Tools, replies, and ways to run an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from forkserve import Engine
from forkserve.adapters.react import (
    Event,
    ReactAgent,
    ReactResult,
)

from .conftest import rest_until_quiet, spoken

THINK = "<think>\n" + "This needs some thought. " * 6 + "\n</think>\n\n"


def look(at: str) -> str:
    """Look at something.

    at: what to look at
    """
    if at == "nothing":
        raise LookupError("there is nothing")
    return f'{at}: {{"seen": "by day\nand night"}}'


def gaze(at: str) -> str:
    """Look for a while: longer than it takes the mock to end its turn."""
    rest_until_quiet()
    return look(at)


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def run(agent: ReactAgent, task: Any, how: str, **options: Any) -> ReactResult:
    if how == "sync":
        return agent.run(task, **options)
    return asyncio.run(agent.arun(task, **options))


def events_of(
    agent: ReactAgent, task: Any = "Go on.", how: str = "sync", seen: list[Event] | None = None
) -> list[Event]:
    """All events.  seen: a list that gets each as it comes."""
    events: list[Event] = [] if seen is None else seen

    async def collect() -> None:
        async for event in agent.astream(task):
            events.append(event)

    if how == "async":
        asyncio.run(collect())
    else:
        events.extend(agent.stream(task))
    return events


REPLIES = [
    "I look." + spoken({"look": {"at": "the sea"}}),
    THINK + spoken([("look", {"at": "nothing"}), ("look", {"at": 'a "quoted"\nline é'})]),
    spoken({"add": {"a": 3}}),
]


def answer(eng: Engine, tokens: list[int]) -> str:
    end = eng.backend.info.eos_ids[0]
    text = eng.backend.tokenizer.decode_bytes([t for t in tokens if t != end])
    return text.decode("utf-8", "replace").strip()
