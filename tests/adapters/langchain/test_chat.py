"""Conversations that are found again, streams, parameters, branches."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langchain import ChatForkServe
from forkserve.adapters.langchain.current import current_branch, running
from forkserve.engine import MockBackend
from forkserve.errors import AdapterError, ConfigError
from forkserve.session import Session
from tests.waiting import until

from .rules import SYSTEM, RuleEngine, cached, tide, weather, whole

# ------------------------------------------------------------------ conversations


def test_the_next_turn_reuses_the_prompt_and_the_reply(engine: RuleEngine) -> None:
    model = ChatForkServe(engine=engine)
    history: list[Any] = [SYSTEM, HumanMessage("hello")]
    for number in range(4):
        reply = model.invoke(history)
        usage = reply.usage_metadata
        assert usage is not None
        assert 0 <= cached(reply) <= usage["input_tokens"]
        if number:
            # all but the user's new turn, and the end token that the template writes otherwise
            assert usage["input_tokens"] - cached(reply) < 80
        history += [reply, HumanMessage(f"question {number}")]
    assert len(engine.sessions()) == 1


def test_committed_tokens_equal_those_of_a_cold_engine() -> None:
    """On a model that speaks for itself: reuse must not change a token."""

    def talk(fresh: bool) -> list[Any]:
        config = ForkServeConfig(page_size=4, prefix_index=False)
        engine = Engine(MockBackend(config, vocab_size=512))
        model = ChatForkServe(engine=engine, max_tokens=12)
        history: list[Any] = [SYSTEM, HumanMessage("hello")]
        texts = []
        for number in range(5):
            reply = model.invoke(history)
            texts.append(reply.content)
            history += [reply, HumanMessage(f"question {number}")]
            if fresh:
                model.close()
            engine.check()
        model.close()
        assert engine.stats().nodes == 0
        assert engine.stats().live_pages == 0
        engine.shutdown()
        return texts

    assert talk(fresh=False) == talk(fresh=True)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_that_is_cut_inside_a_character(streamed: bool) -> None:
    engine = Engine(MockBackend(ForkServeConfig(page_size=4), replies=["On é"]))
    model = ChatForkServe(engine=engine, max_tokens=len("On ") + 1)
    if streamed:
        assert "".join(str(chunk.content) for chunk in model.stream("Go.")) == "On "
    else:
        assert model.invoke("Go.").content == "On "
    model.close()
    engine.shutdown()


def test_the_same_prompt_again_is_free(engine: RuleEngine) -> None:
    model = ChatForkServe(engine=engine)
    first, second = model.invoke("hello"), model.invoke("hello")
    assert first.content == second.content
    assert cached(first) == 0
    assert cached(second) == second.usage_metadata["input_tokens"]  # type: ignore[index]
    before = engine.stats().prefilled_tokens.committed
    model.invoke("hello")
    assert engine.stats().prefilled_tokens.committed - before <= len("Hello from the engine. ")


def test_another_way_on_is_another_conversation(model: ChatForkServe, engine: RuleEngine) -> None:
    history: list[Any] = [SYSTEM, HumanMessage("hello")]
    reply = model.invoke(history)
    model.invoke([*history, reply, HumanMessage("this way")])
    other = model.invoke([*history, reply, HumanMessage("that way")])
    assert len(engine.sessions()) == 2
    assert cached(other) >= len(SYSTEM.text) // 8 * 8 - 8  # pages of the prefix index
    again = model.invoke([*history, reply, HumanMessage("this way")])
    assert cached(again) == again.usage_metadata["input_tokens"]  # type: ignore[index]


def test_a_reply_that_was_edited_is_cut_where_it_differs(
    model: ChatForkServe, engine: RuleEngine
) -> None:
    history: list[Any] = [SYSTEM, HumanMessage("hello")]
    model.invoke(history)
    edited = model.invoke([*history, AIMessage("Hello from elsewhere."), HumanMessage("and?")])
    prompt = len(engine.backend.tokenizer.encode(engine.prompts[0]))
    assert prompt + len("Hello from ") <= cached(edited) <= prompt + len("Hello from e")
    (session,) = engine.sessions()
    assert len(engine.tree(session).tips) == 2  # the main line and the new reply: no other is left


def test_conversations_that_are_kept_are_bounded(engine: RuleEngine) -> None:
    model = ChatForkServe(engine=engine, keep=3)
    for number in range(40):
        model.invoke(f"{number} is a number")
        assert len(engine.sessions()) <= 3
    model.close()
    assert engine.stats().nodes == 0


def test_threads_and_tasks_share_a_model(model: ChatForkServe, engine: RuleEngine) -> None:
    prompts = [[SYSTEM, HumanMessage(f"question {number % 5}")] for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(model.invoke, prompts))
    assert {reply.content for reply in replies} == {"Hello from the engine. "}
    assert {r.content for r in asyncio.run(model.abatch(prompts))} == {"Hello from the engine. "}
    assert len(engine.sessions()) <= 16
    engine.check()


def test_a_session_that_somebody_closed_is_forgotten(
    model: ChatForkServe, engine: RuleEngine
) -> None:
    model.invoke("hello")
    for session in engine.sessions():
        engine.close(session)
    assert cached(model.invoke("hello")) < 60
    assert len(model._pool or ()) == 1


# ------------------------------------------------------------------ streams


def test_streams_say_what_invoke_says(model: ChatForkServe) -> None:
    async def acollect() -> list[Any]:
        return [chunk async for chunk in model.astream("hello")]

    for chunks in (list(model.stream("hello")), asyncio.run(acollect())):
        assert len(chunks) > 5
        total = whole(chunks)
        assert total.content == model.invoke("hello").content
        assert [bool(c.usage_metadata) for c in chunks].count(True) == 1
        assert sum("model_name" in c.response_metadata for c in chunks) == 1
        assert chunks[-1].chunk_position == "last"
        assert cached(total) >= 0


def test_a_stream_that_is_left_early_is_cancelled(model: ChatForkServe, engine: RuleEngine) -> None:
    stream = model.stream("hello")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.stats().queued == 0
    (session,) = engine.sessions()
    assert len(engine.tree(session).nodes) == 1  # the reply that nobody waits for is gone
    assert model.invoke("hello").content == "Hello from the engine. "


def test_a_task_that_is_cancelled_cancels_its_generation(engine: RuleEngine) -> None:
    slow = Engine(MockBackend(on_batch=lambda batch: time.sleep(0.01)))
    model = ChatForkServe(engine=slow, max_tokens=100_000, ignore_eos=True)
    assert model.engine is not None

    async def go() -> None:
        task = asyncio.create_task(model.ainvoke("hello"))
        await until(lambda: slow.stats().decode_steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert model.engine.stats().queued == 0
    model.engine.check()
    model.engine.shutdown()


def test_calls_come_out_of_the_text_while_it_streams(model: ChatForkServe) -> None:
    bound = model.bind_tools([weather, tide])
    chunks = list(bound.stream("think, then ask both about San Francisco"))
    total = whole(chunks)
    assert total.content == "Let me see. "
    assert [call["name"] for call in total.tool_calls] == ["weather", "tide"]
    assert [call["args"] for call in total.tool_calls] == [{"city": "San Francisco"}] * 2
    assert len({call["id"] for call in total.tool_calls}) == 2
    assert total.response_metadata["finish_reason"] == "tool_calls"
    first = next(i for i, chunk in enumerate(chunks) if chunk.tool_call_chunks)
    assert first < len(chunks) - 2  # the first call is out before the second has ended
    same = bound.invoke("think, then ask both about San Francisco")
    assert same.content == total.content
    assert [c["args"] for c in same.tool_calls] == [c["args"] for c in total.tool_calls]


# ------------------------------------------------------------------ parameters


def test_stop_and_length(engine: RuleEngine) -> None:
    model = ChatForkServe(engine=engine, stop=["the"])
    assert model.invoke("hello").content == "Hello from "
    assert model.invoke("hello", stop=["from"]).content == "Hello "
    assert model.invoke("hello").response_metadata["finish_reason"] == "stop"
    word: Any = "from"  # not letters of which each one stops
    assert model.invoke("hello", stop=word).content == "Hello "
    for none in (0, -1):
        with pytest.raises(ConfigError, match=f"max_tokens={none} must be >= 1"):
            model.invoke("hello", max_tokens=none)
    short = ChatForkServe(engine=engine, max_tokens=4).invoke("hello")
    assert (short.content, short.response_metadata["finish_reason"]) == ("Hell", "length")


def test_seeds_decide(engine: RuleEngine) -> None:
    own = Engine(MockBackend(ForkServeConfig(prefix_index=False)))

    def say(seed: int) -> Any:
        model = ChatForkServe(engine=own, temperature=1.0, max_tokens=12, seed=seed)
        text = model.invoke("hello").content
        model.close()
        return text

    assert say(1) == say(1) != say(2)
    own.shutdown()


def test_a_call_that_takes_too_long(engine: RuleEngine) -> None:
    slow = Engine(MockBackend(on_batch=lambda batch: time.sleep(0.01)))
    model = ChatForkServe(engine=slow, timeout=0.05, max_tokens=10_000)
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        model.invoke("hello")
    with pytest.raises(TimeoutError):
        asyncio.run(model.ainvoke("hello"))
    assert slow.stats().queued == 0
    slow.check()
    slow.shutdown()


def test_without_an_engine() -> None:
    with pytest.raises(AdapterError, match="engine=Engine"):
        ChatForkServe(model="mock").invoke("hello")
    with pytest.raises(AdapterError, match="server"):
        ChatForkServe(base_url="http://localhost:1").invoke("hello")


def test_langchains_cache_keys_hold_no_session(model: ChatForkServe) -> None:
    from langchain_core.caches import InMemoryCache

    set_llm_cache(InMemoryCache())
    try:
        first, again = model.invoke("hello"), model.invoke("hello")
        assert again.id == first.id  # a hit, though the model keeps a conversation by now
        assert "engine" not in str(model._identifying_params)
    finally:
        set_llm_cache(None)


# ------------------------------------------------------------------ on a branch


def test_inside_a_node_the_model_speaks_on_the_nodes_branch(
    model: ChatForkServe, engine: RuleEngine
) -> None:
    history: list[Any] = [SYSTEM, HumanMessage("hello")]
    assert model._prompts is not None
    assert current_branch() is None
    prompt = model._prompts.tokens(history, [])
    with Session(engine, prompt) as session, session.fork("node") as branch:
        token = running.set(branch)
        try:
            first = model.invoke(history)
            assert len(engine.sessions()) == 1
            assert branch.text.startswith("Hello from the engine. ")
            assert first.content == "Hello from the engine. "

            async def later() -> Any:
                return await model.ainvoke(history)  # no longer goes on with the branch

            assert asyncio.run(later()).content == first.content
            assert len(engine.sessions()) == 2
        finally:
            running.reset(token)
    model.close()
    assert engine.stats().nodes == 0
