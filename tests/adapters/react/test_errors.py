"""Whatever goes wrong in a run is an observation, or says what it is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from forkserve.adapters.react import (
    MaxTurnsReached,
    ReactAgent,
)
from forkserve.adapters.tools import (
    BadArguments,
    Tool,
    ToolTimeout,
    UnknownTool,
)
from forkserve.errors import AdapterError, BackendError, ConfigError
from tests.waiting import HANGS_S

from .agents import add, look, run
from .conftest import Make, spoken


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ({"missing": {}}, UnknownTool, "there is no tool 'missing'; the tools are: look, add"),
        ({"add": {"a": "one"}}, BadArguments, "a: Input should be a valid integer"),
        ({"add": {"c": 1}}, BadArguments, "a: Field required; c: Extra inputs"),
    ],
)
def test_calls_that_cannot_be_made(
    make: Make, how: str, call: dict[str, Any], error: type[Exception], text: str
) -> None:
    eng = make(spoken(call), "Sorry.")
    result = run(ReactAgent(eng, [look, add]), "Go.", how)
    (seen,) = result.turns[0].observations
    assert isinstance(seen.error, error)
    assert isinstance(seen.error, AdapterError)
    assert text in seen.text
    assert seen.text.startswith("Error: ")
    assert result.messages[-2]["role"] == "tool"
    assert result.messages[-2]["content"] == seen.text
    assert result.text == "Sorry."


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_tool_that_gets_no_thread(make: Make, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the tool, and the model could do nothing about it."""
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("tool-"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    eng = make(spoken({"add": {"a": 1}}), "Done.")
    with pytest.raises(BackendError, match=r"no thread for 'tool-add'.*ulimit"):
        run(ReactAgent(eng, [add]), "Go.", how)
    eng.check()


def test_a_malformed_call_is_told_to_the_model(make: Make) -> None:
    eng = make('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "Sorry.")
    result = ReactAgent(eng, [add]).run("Go.")
    assert result.turns[0].faults[0].reason == "malformed"
    assert result.messages[-2]["role"] == "user"
    assert "between call markers stands no call" in result.messages[-2]["content"]
    assert result.messages[-3]["content"].startswith("<tool_call>")
    assert result.text == "Sorry."


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("kind", ["sync tool", "async tool"])
def test_a_tool_that_takes_too_long_is_given_up(make: Make, how: str, kind: str) -> None:
    over, ended = threading.Event(), threading.Event()

    def block() -> str:
        over.wait(HANGS_S)
        ended.set()
        return "late"

    async def sleep() -> str:
        await asyncio.sleep(60)
        ended.set()
        return "late"

    tool = Tool.of(block if kind == "sync tool" else sleep, name="wait", timeout_s=0.1)
    eng = make(spoken([("wait", {}), ("add", {"a": 1})]), "Sorry.")
    result = run(ReactAgent(eng, [tool, add], tool_timeout_s=30), "Go.", how)
    assert not ended.is_set(), "nobody waited for it"
    over.set()
    late, fine = result.turns[0].observations
    assert isinstance(late.error, ToolTimeout)
    assert late.text == "Error: tool 'wait' gave no result within 0.1 s"
    assert late.ms >= 100
    assert fine.text == "2"


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_turns_are_limited(make: Make, how: str) -> None:
    eng = make(*[spoken({"add": {"a": n}}) for n in range(9)])
    with pytest.raises(MaxTurnsReached, match="no answer after 3 turns") as caught:
        run(ReactAgent(eng, [add], max_turns=3), "Go.", how)
    result = caught.value.result
    assert len(result.turns) == 3
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == ["1", "2", "3"]
    assert isinstance(caught.value, AdapterError)


def test_an_answer_that_is_cut_off_says_so(make: Make) -> None:
    eng = make("one two three four")
    result = ReactAgent(eng, [add], max_tokens=7).run("Go.")
    assert (result.text, result.finish_reason) == ("one two"[:7], "length")


def test_nonsense_is_refused(make: Make) -> None:
    eng = make()
    for options in (
        {"max_turns": 0},
        {"mode": "jazz"},
        {"p_error": 2},
        {"reasoning": "some"},
        {"tools": [add, add]},
        {"tools": [3]},
    ):
        with pytest.raises(ConfigError):
            ReactAgent(eng, **options)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="at least one"):
        ReactAgent(eng).run([])
