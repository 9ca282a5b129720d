from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import pytest

from tests.adapters.openhands.conftest import REASON, SDK

if not SDK:
    pytest.skip(REASON, allow_module_level=True)

from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import AgentErrorEvent, LLMConvertibleEvent, ObservationEvent
from openhands.sdk.security.confirmation_policy import AlwaysConfirm, NeverConfirm
from openhands.sdk.testing import TestLLM

from forkserve.adapters.openhands.requests import ChatRequest
from tests.adapters.openhands.rigs import LookupObservation, Rig, call, said

DONE = call("It costs 4.", "finish")


def replayed(rig: Rig, conversation: Any) -> list[list[Any]]:
    """What the SDK's own scripted model is sent, if it says the same, without ForkServe."""
    seen: list[list[Any]] = []

    class Scripted(TestLLM):
        def completion(self, messages: Any, **options: Any) -> Any:
            wire = self.format_messages_for_llm(messages)
            seen.append(list(ChatRequest.read(wire, {}).messages))
            return super().completion(messages, **options)

    turns: dict[str, list[Any]] = {}
    for event in said(conversation):
        turns.setdefault(str(event.llm_response_id), []).append(event)
    messages = [LLMConvertibleEvent.events_to_messages(events)[0] for events in turns.values()]
    llm = Scripted(
        model="forkserve/plain",
        usage_id="scripted",
        scripted_responses=deque(messages),
    )
    plain = rig.conversation(agent=rig.agent(llm=llm), callbacks=[])
    for event in conversation.state.active_branch():
        if event.source == "user":
            plain.send_message(event.llm_message.content[0].text)
            plain.run()
    return seen


def test_a_conversation_runs_and_leaves_its_spine(rig: Rig) -> None:
    talk = rig.conversation("I look. " + call("lamp"), DONE)
    rig.ask(talk)
    assert talk.state.execution_status is Status.FINISHED
    assert [type(e).__name__ for e in said(talk)] == ["ActionEvent", "ActionEvent"]
    assert said(talk)[0].thought[0].text.strip() == "I look."
    stats = rig.adapter.stats
    assert (stats.opened, stats.continued, stats.forked, stats.side) == (1, 1, 0, 0)
    assert stats.committed == 1
    assert stats.failures == stats.errors == stats.drifts == 0
    rig.only_spine(talk)


def test_usage_has_the_cached_tokens(rig: Rig) -> None:
    talk = rig.conversation(call("lamp"), DONE)
    rig.ask(talk)
    usage = talk.state.stats.get_combined_metrics().accumulated_token_usage
    stats = rig.adapter.stats
    assert usage is not None
    assert usage.prompt_tokens == stats.prompt
    assert usage.cache_read_tokens == stats.cached > stats.prompt // 3
    assert usage.completion_tokens == stats.generated
    assert talk.state.stats.get_combined_metrics().accumulated_cost == 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_those_without_forkserve(rig: Rig, stream: bool) -> None:
    pieces: list[Any] = []
    talk = rig.conversation(
        "I look. " + call("lamp"),
        call("shade") + call("bulb"),
        "It costs 4.",
        call("lamp"),
        DONE,
        agent=rig.agent(llm=rig.adapter.llm(stream=stream, num_retries=0)),
        token_callbacks=[pieces.append],
    )
    rig.ask(talk)
    rig.ask(talk, "Really?")
    sent = [list(request.messages) for request in rig.requests]
    rig.requests.clear()
    assert sent == replayed(rig, talk)
    usage = talk.state.stats.get_combined_metrics().accumulated_token_usage
    assert usage.prompt_tokens == rig.adapter.stats.prompt
    assert usage.cache_read_tokens == rig.adapter.stats.cached
    assert bool(pieces) == stream
    if stream:
        shown = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert shown == "I look. It costs 4."


def test_what_is_known_is_there_when_the_tool_ends(rig: Rig) -> None:
    def slow(key: str) -> str:
        rig.adapter.settle()
        return f"the {key} costs 4"

    talk = rig.conversation(call("lamp"), DONE, tool=slow)
    rig.ask(talk)
    stats = rig.engine.stats()
    assert rig.adapter.stats.speculated > 0
    assert stats.prefilled_tokens.speculative > 0
    assert stats.hits == {"known_suffix": 1}
    rig.only_spine(talk)


def test_an_engine_with_a_thread_of_its_own(tmp_path: Any) -> None:
    rig = Rig(tmp_path, background=True)
    talk = rig.conversation(call("lamp"), DONE, tool=lambda key: rig.adapter.settle() or key)
    rig.ask(talk)
    assert rig.engine.stats().hits == {"known_suffix": 1}
    rig.only_spine(talk)
    rig.close()


def test_arguments_are_not_speculated_on_unless_public(tmp_path: Any) -> None:
    """The SDK writes arguments anew, so what follows them is beyond hidden text."""
    spoken = '<tool_call>{"arguments": {"key":   "pin 4711"}, "name": "lookup"}</tool_call>'
    for public in ((), ("lookup",)):
        rig = Rig(tmp_path)
        rig.adapter._public = frozenset(public)
        seen: list[str] = []

        def look(key: str, rig: Rig = rig, seen: list[str] = seen) -> str:
            rig.adapter.settle()
            decode = rig.backend.tokenizer.decode_bytes
            for node in rig.nodes(rig.conversations[0]):
                if node.mode.value == "spec":
                    seen.append(decode(list(node.tokens)).decode())
            return key

        rig.ask(rig.conversation(spoken, DONE, tool=look))
        assert any("4711" in text for text in seen) == bool(public)
        rig.close()


def test_an_error_is_committed_as_one(rig: Rig) -> None:
    def fail(key: str) -> Any:
        rig.adapter.settle()
        return LookupObservation.from_text("no such page", is_error=True)

    talk = rig.conversation(call("lamp"), DONE, tool=fail)
    rig.ask(talk)
    assert rig.adapter.stats.errors == 1
    before = rig.engine.stats()
    assert before.hits == {"known_suffix": 1}
    tree = rig.nodes(talk)
    assert "err" in {node.branch for node in tree}, "the error branch was taken"
    rig.only_spine(talk)


def test_a_tool_that_raises(rig: Rig) -> None:
    def fail(key: str) -> Any:
        raise ValueError(f"{key} is lost")

    talk = rig.conversation(call("lamp"), DONE, tool=fail)
    rig.ask(talk)
    assert any(isinstance(e, AgentErrorEvent) for e in talk.state.events)
    assert rig.adapter.stats.errors == 1
    assert talk.state.execution_status is Status.FINISHED
    rig.only_spine(talk)


def test_calls_that_do_not_fit(rig: Rig) -> None:
    """A call without its argument beside a good one, and a tool that there is not."""
    wrong = '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>'
    talk = rig.conversation(wrong + call("lamp"), call("x", "nothing") + call("bulb"), DONE)
    rig.ask(talk)
    assert talk.state.execution_status is Status.FINISHED
    assert rig.adapter.stats.errors >= 1
    assert sum(isinstance(e, ObservationEvent) for e in talk.state.events) >= 2
    rig.only_spine(talk)


@pytest.mark.parametrize("limit", [1, 3])
def test_parallel_calls(rig: Rig, limit: int) -> None:
    def slow(key: str) -> str:
        rig.adapter.settle()
        return f"the {key} costs 4"

    talk = rig.conversation(
        "Three. " + call("lamp") + call("bulb") + call("shade"),
        DONE,
        tool=slow,
        agent=rig.agent(tool_concurrency_limit=limit),
    )
    rig.ask(talk)
    assert len([e for e in talk.state.events if isinstance(e, ObservationEvent)]) == 4
    assert rig.adapter.stats.committed == 1
    assert rig.engine.stats().hits == {"known_suffix": 1}
    assert [list(r.messages) for r in rig.requests] == replayed(rig, talk)
    rig.adapter.release(rig.conversations[-1])
    rig.only_spine(talk)


def test_times_of_tools_are_learned(rig: Rig) -> None:
    talk = rig.conversation(call("lamp"), call("bulb"), DONE)
    assert rig.adapter.expected_ms(["lookup"]) > 1e6
    rig.ask(talk)
    assert 0 < rig.adapter.expected_ms(["lookup"]) < 1e5


def test_reasoning_is_kept_apart(rig: Rig) -> None:
    """The SDK drops it from the history; the turn is written anew and known while the tool runs."""

    def slow(key: str) -> str:
        rig.adapter.settle()
        return key

    talk = rig.conversation("<think>Hm, a lamp.</think>\nI look. " + call("lamp"), DONE, tool=slow)
    rig.ask(talk)
    action = said(talk)[0]
    assert action.reasoning_content == "Hm, a lamp."
    assert action.thought[0].text.strip() == "I look."
    assert rig.adapter.stats.speculated > 40
    assert rig.engine.stats().hits == {"known_suffix": 1}
    rig.only_spine(talk)


def test_pause_and_resume(rig: Rig) -> None:
    def pause(key: str) -> str:
        threading.Thread(target=talk.pause).start()
        return key

    talk = rig.conversation(call("lamp"), DONE, tool=pause)
    talk.send_message("What does the lamp cost?")
    talk.run()
    while talk.state.execution_status is not Status.FINISHED:
        talk.run()
    rig.adapter.settle()
    assert rig.adapter.stats.opened == 1
    assert rig.adapter.stats.forked == 0
    rig.only_spine(talk)


def test_confirmation_and_rejection(rig: Rig) -> None:
    talk = rig.conversation(call("lamp"), call("bulb"), DONE)
    talk.set_confirmation_policy(AlwaysConfirm())
    talk.send_message("What does the lamp cost?")
    talk.run()
    assert talk.state.execution_status is Status.WAITING_FOR_CONFIRMATION
    rig.adapter.settle()
    assert rig.engine.stats().speculative_pages > 0
    talk.reject_pending_actions("not now")
    rig.adapter.settle()
    assert rig.adapter.stats.errors == 1
    talk.run()
    assert talk.state.execution_status is Status.WAITING_FOR_CONFIRMATION
    talk.set_confirmation_policy(NeverConfirm())
    talk.run()
    assert talk.state.execution_status is Status.FINISHED
    rig.only_spine(talk)


async def test_async_run_and_stream(rig: Rig) -> None:
    pieces: list[Any] = []
    llm = rig.adapter.llm(stream=True, num_retries=0)
    talk = rig.conversation(
        "I look. " + call("lamp"),
        DONE,
        agent=rig.agent(llm=llm),
        token_callbacks=[pieces.append],
    )
    talk.send_message("What does the lamp cost?")
    await talk.arun()
    assert talk.state.execution_status is Status.FINISHED
    assert pieces
    assert rig.adapter.stats.continued == 1
    rig.only_spine(talk)


async def test_interrupt_ends_the_generation(rig: Rig) -> None:
    import asyncio

    long = "so " * 3000
    talk = rig.conversation(long, DONE)
    rig.backend._on_batch = lambda batch: time.sleep(0.01)  # it is not over when it is ended
    talk.send_message("What does the lamp cost?")
    run = asyncio.create_task(talk.arun())
    while not rig.engine.stats().decode_steps:
        await asyncio.sleep(0.005)
    talk.interrupt()
    await run
    rig.backend._on_batch = None
    assert talk.state.execution_status is Status.PAUSED
    steps = rig.engine.stats().decode_steps
    assert steps < 3000
    await asyncio.sleep(0.05)
    assert rig.engine.stats().decode_steps == steps
    await talk.arun()  # the half reply is taken back
    assert talk.state.execution_status is Status.FINISHED
    assert rig.adapter.stats.forked == 0
    assert list(rig.requests[0].messages) == list(rig.requests[1].messages)
    rig.only_spine(talk)


def test_an_interrupt_while_a_tool_runs_drops_the_guesses(rig: Rig) -> None:
    from openhands.sdk.event import InterruptEvent

    watch = rig.adapter.watch()
    left: list[int] = []

    def stop(key: str) -> str:
        rig.adapter.settle()
        left.append(rig.engine.stats().speculative_pages)
        watch(InterruptEvent())
        rig.adapter.settle()
        left.append(rig.engine.stats().speculative_pages)
        return key

    talk = rig.conversation(call("lamp"), DONE, tool=stop, callbacks=[watch])
    rig.ask(talk)
    assert left[0] > 0
    assert left[1] == 0
    rig.only_spine(talk)


def test_a_watch_on_another_model_does_nothing(rig: Rig) -> None:
    from openhands.sdk.llm import Message, MessageToolCall, TextContent

    given = MessageToolCall(
        id="c1", name="lookup", arguments='{"key": "lamp"}', origin="completion"
    )
    script = [
        Message(role="assistant", content=[TextContent(text="I look.")], tool_calls=[given]),
        Message(role="assistant", content=[TextContent(text="Four.")]),
    ]
    talk = rig.conversation(agent=rig.agent(llm=TestLLM.from_messages(script)))
    rig.ask(talk)
    assert talk.state.execution_status is Status.FINISHED
    assert rig.adapter.stats.requests == rig.adapter.stats.failures == 0
    assert rig.engine.stats().sessions == 0


def test_without_speculation(rig: Rig) -> None:
    rig.adapter._speculates = False
    talk = rig.conversation(call("lamp"), DONE, tool=lambda key: rig.adapter.settle() or key)
    rig.ask(talk)
    assert rig.engine.stats().prefilled_tokens.speculative == 0
    assert rig.adapter.stats.committed == 1
    rig.only_spine(talk)
