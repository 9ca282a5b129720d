"""The middleware of `create_agent`: the same agent, with the tools' time put to use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain.agents")

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from forkserve.adapters.langchain import ChatForkServe
from forkserve.adapters.langgraph import ForkServeMiddleware
from tests.waiting import until, wait_for

from ..langchain.rules import RuleEngine

SYSTEM = "You look things up before you answer. " * 8


LIVE: list[RuleEngine] = []  # of the present test


def _quiet() -> bool:
    """A slow tool outlasts what is speculated on its result."""
    return not any(eng.stats().queued for eng in LIVE)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    time.sleep(0.05)
    wait_for(_quiet)
    return f"sunny in {city}"


@tool
async def aweather(city: str) -> str:
    """The weather of a city."""
    await asyncio.sleep(0.05)
    await until(_quiet)
    return f"sunny in {city}"


@tool
def broken(city: str) -> str:
    """A tool that fails."""
    raise ValueError("no such city")


@pytest.fixture
def engine() -> Iterator[RuleEngine]:
    made = RuleEngine(background=True, prefix_index=False)
    LIVE.append(made)
    yield made
    LIVE.clear()
    made.check()
    for session in made.sessions():
        made.close(session)
    assert made.stats().nodes == 0
    made.shutdown()


def ask(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_next_prompt_is_there_when_the_tool_returns(engine: RuleEngine, is_async: bool) -> None:
    model, ours = ChatForkServe(engine=engine), ForkServeMiddleware()
    agent = create_agent(
        model, [aweather if is_async else weather], system_prompt=SYSTEM, middleware=[ours]
    )
    question = ask("How is it in San Francisco?")
    result = asyncio.run(agent.ainvoke(question)) if is_async else agent.invoke(question)
    assert [m.type for m in result["messages"]] == ["human", "ai", "tool", "ai"]
    assert result["messages"][-1].content == "Hello from the engine. "
    assert ours.speculated_tokens > 0
    usage = result["messages"][-1].usage_metadata
    fresh = usage["input_tokens"] - usage["input_token_details"]["cache_read"]
    # the result, the end of its turn, and the header of the next one
    assert fresh <= len("sunny in San Francisco") + len("X\nXassistant\n")
    assert engine.stats().prefilled_tokens.wasted == 0


def test_answers_are_those_of_the_agent_without_it(engine: RuleEngine) -> None:
    def run(*middleware: Any) -> list[Any]:
        model = ChatForkServe(engine=engine)
        agent = create_agent(model, [weather], system_prompt=SYSTEM, middleware=middleware)
        result = agent.invoke(ask("both of them, San Francisco"))
        model.close()
        return [(m.type, m.content) for m in result["messages"]]

    assert run(ForkServeMiddleware()) == run()


def test_statistics_on_the_custom_stream(engine: RuleEngine) -> None:
    for on in (True, False):
        model = ChatForkServe(engine=engine)
        agent = create_agent(model, [weather], middleware=[ForkServeMiddleware(stream_stats=on)])
        events = list(agent.stream(ask("San Francisco?"), stream_mode="custom"))
        assert len(events) == (2 if on else 0)
        if on:
            assert events[0]["forkserve"]["tools"] == ["weather"]
            assert events[0]["forkserve"]["speculated_tokens"] > 0
            assert events[1]["forkserve"]["cached_tokens"] > 0
        model.close()


def test_a_tool_that_fails_is_measured_and_its_error_goes_on(engine: RuleEngine) -> None:
    ours = ForkServeMiddleware()
    agent = create_agent(ChatForkServe(engine=engine), [broken], middleware=[ours])
    with pytest.raises(ValueError, match="no such city"):
        agent.invoke(ask("San Francisco?"))
    assert ours._times.expect("broken", -1.0) >= 0


def test_pauses_are_learned(engine: RuleEngine) -> None:
    ours = ForkServeMiddleware(t_idle_ms=7.0)
    agent = create_agent(ChatForkServe(engine=engine), [weather], middleware=[ours])
    assert ours._times.expect("weather", 7.0) == 7.0
    agent.invoke(ask("San Francisco?"))
    assert ours._times.expect("weather", 7.0) >= 50


def test_a_thread_goes_on_with_its_conversation(engine: RuleEngine) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    agent = create_agent(
        ChatForkServe(engine=engine),
        [weather],
        system_prompt=SYSTEM,
        middleware=[ForkServeMiddleware()],
        checkpointer=InMemorySaver(),
    )
    agent.invoke(ask("San Francisco?"), config)
    result = agent.invoke(ask("no tool please"), config)
    usage = result["messages"][-1].usage_metadata
    assert usage["input_tokens"] - usage["input_token_details"]["cache_read"] < 80
    assert len(engine.sessions()) == 1


def test_other_models_pass_untouched() -> None:
    ours = ForkServeMiddleware()
    agent = create_agent(FakeListChatModel(responses=["hi"]), [], middleware=[ours])
    assert agent.invoke(ask("hello"))["messages"][-1].content == "hi"
    assert asyncio.run(agent.ainvoke(ask("hello")))["messages"][-1].content == "hi"
    assert ours.speculated_tokens == 0
