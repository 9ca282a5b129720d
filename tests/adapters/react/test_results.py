"""Whatever a tool raises or returns becomes an observation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from forkserve.adapters.react import (
    Committed,
    ReactAgent,
    Speculated,
)
from forkserve.adapters.tools import Tool, ToolFailed
from forkserve.types import NodeMode

from .conftest import Make, rest_until_quiet, spoken


class Odd(BaseException):
    """Not an Exception."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


def leave(error: BaseException, is_async: bool) -> Callable[[], Any]:
    async def later() -> str:
        raise error

    def now() -> str:
        raise error

    return later if is_async else now


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(2), "SystemExit: 2"),
        (Odd("odd"), "Odd: odd"),
        (asyncio.CancelledError(), "cancel"),
        (Mute(), "Mute"),
        (ValueError("a\ud800b"), "ValueError: a"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_tool_raises_is_an_observation(
    make: Make, error: BaseException, text: str, is_async: bool, how: str
) -> None:
    """Also what is no Exception: in a thread nobody would hear of it, and the run would wait."""
    eng = make(spoken({"tool": {}}), "Done.")
    agent = ReactAgent(eng, [Tool.of(leave(error, is_async), name="tool")])
    result = agent.run("Go.") if how == "sync" else asyncio.run(agent.arun("Go."))
    (seen,) = result.turns[0].observations
    assert isinstance(seen.error, ToolFailed)
    assert text.lower() in str(seen.error).lower()
    assert result.text == "Done."


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_validator_that_raises_is_an_observation(make: Make, how: str) -> None:
    class Order(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            raise RuntimeError("the shop is closed")

        def __call__(self) -> str:
            return "ordered"

    eng = make(spoken({"Order": {"n": 1}}), "Done.")
    agent = ReactAgent(eng, [Order])
    result = agent.run("Go.") if how == "sync" else asyncio.run(agent.arun("Go."))
    assert "the shop is closed" in result.turns[0].observations[0].text


async def stream_of() -> Any:
    yield "one"
    yield "two"


def lazily() -> Any:
    async def later() -> str:
        return "in the end"

    return later()


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (stream_of, '["one", "two"]'),
        (lazily, "in the end"),
        (partial(stream_of), '["one", "two"]'),
        (lambda: "half \ud83d", "half \ud83d"),
        (lambda: {"name": "\ud83d\ude00"}, '{"name": "\ud83d\ude00"}'),
        (lambda: None, "null"),
        (lambda: b"\xff\x00", "\ufffd\x00"),
    ],
)
def test_whatever_a_tool_returns_can_be_written(
    make: Make, tool: Callable[[], Any], text: str, how: str
) -> None:
    eng = make(spoken({"tool": {}}), "Done.")
    agent = ReactAgent(eng, [Tool.of(tool, name="tool")])
    result = agent.run("Go.") if how == "sync" else asyncio.run(agent.arun("Go."))
    assert result.turns[0].observations[0].text == text
    assert result.text == "Done."


def test_nothing_speculative_is_left_after_a_commit(make: Make) -> None:
    """The recovery branch hangs on the known suffix, which the commit adopts."""

    def wait() -> str:
        rest_until_quiet()
        return "fine"

    eng = make(spoken({"wait": {}}), "Done.")
    left = []
    for event in ReactAgent(eng, [wait], p_error=0.5).stream("Go."):
        if isinstance(event, Speculated):
            left.append(event.branch)
        if isinstance(event, Committed):
            (name,) = eng.sessions()
            assert [n.branch for n in eng.tree(name) if n.mode is NodeMode.SPEC] == []
    assert left == ["wait", "err"]
