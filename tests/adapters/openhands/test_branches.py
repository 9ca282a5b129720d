"""The SDK's event tree on the context tree: forks, steps back, summaries, questions beside."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.adapters.openhands.conftest import REASON, SDK

if not SDK:
    pytest.skip(REASON, allow_module_level=True)

from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, ObservationEvent
from openhands.sdk.event.condenser import Condensation

from forkserve.adapters.openhands import TrunkCondenser
from forkserve.errors import AdapterError, SessionError
from tests.adapters.openhands.rigs import Rig, call

DONE = call("It costs 4.", "finish")


def observation(talk: Any, number: int = 0) -> ObservationEvent:
    found = [e for e in talk.state.events if isinstance(e, ObservationEvent)]
    return found[number]


def pages(rig: Rig) -> int:
    stats = rig.engine.stats()
    return stats.live_pages - stats.index_pages


def rows_before(rig: Rig) -> int:
    return rig.engine.stats().prefilled_tokens.committed


def started(rig: Rig, **options: Any) -> Any:
    talk = rig.conversation(call("lamp"), call("bulb"), DONE, **options)
    rig.ask(talk)
    return talk


def test_a_fork_shares_all_pages_of_its_origin(rig: Rig) -> None:
    talk = started(rig)
    trunk, rows = pages(rig), rows_before(rig)
    rig.backend.script(call("shade"), DONE)
    fork = rig.adapter.fork(talk)
    rig.conversations.append(fork)
    assert pages(rig) == trunk, "a fork touches no page"
    rig.ask(fork, "And the shade?")
    assert rig.adapter.stats.forked == 1
    assert rig.engine.stats().sessions == 1
    assert pages(rig) - trunk < trunk / 4
    assert rows_before(rig) - rows < 200, "only what is new was computed"
    assert rig.adapter.stats.committed == 3, "the fork is watched"
    rig.only_spine(talk, fork)
    rig.adapter.release(talk)
    rig.only_spine(fork)


def test_both_sides_of_a_fork_go_on(rig: Rig) -> None:
    """Also with the same words: neither may take the other's text for its own."""
    talk = started(rig)
    fork = rig.adapter.fork(talk)
    rig.conversations.append(fork)
    for one, reply in ((talk, "At once."), (fork, "Later."), (talk, "Yes."), (fork, "No.")):
        rig.backend.script(reply)
        rig.ask(one, "Send it.")
        assert one.state.events[-1].llm_message.content[0].text == reply
    assert (rig.adapter.stats.continued, rig.adapter.stats.forked) == (2 + 3, 1)
    rig.only_spine(talk, fork)
    texts = [bytes(t for n in rig.spine(c) for t in n.tokens if t < 256) for c in (talk, fork)]
    assert b"At once." in texts[0]
    assert b"Later." in texts[1]
    rig.adapter.release(fork)
    rig.only_spine(talk)


def test_fork_from_an_event(rig: Rig) -> None:
    talk = started(rig)
    first = observation(talk)
    trunk, rows = pages(rig), rows_before(rig)
    rig.backend.script(call("shade"), DONE)
    fork = rig.adapter.fork(talk, from_event_id=first.id)
    rig.conversations.append(fork)
    rig.ask(fork, "Look the shade up instead.")
    assert rig.adapter.stats.forked == 1
    assert rows_before(rig) - rows < 200
    assert pages(rig) - trunk < trunk / 4
    here, there = rig.adapter.place(talk, first.id), rig.adapter.place(fork, first.id)
    assert here.tokens == here.expected == there.tokens
    assert here.session == there.session
    rig.adapter.release(fork)
    rig.only_spine(talk)
    assert pages(rig) == trunk


def test_a_plain_fork_is_found_by_its_prefix(rig: Rig) -> None:
    """`conversation.fork` alone: a new id on the wire, with nothing that names the origin."""
    talk = started(rig)
    rows = rows_before(rig)
    rig.backend.script("Yes.")
    fork = talk.fork(from_event_id=observation(talk).id)
    rig.conversations.append(fork)
    rig.ask(fork, "Is that all?")
    assert rig.adapter.stats.forked == 1
    assert rig.engine.stats().sessions == 1
    assert rows_before(rig) - rows < 100


def test_navigate_to_and_back(rig: Rig) -> None:
    talk = started(rig)
    end = talk.state.leaf_event_id
    trunk, rows = pages(rig), rows_before(rig)
    talk.navigate_to(observation(talk).id)
    rig.backend.script("The lamp is sold.")
    rig.ask(talk, "Look again.")
    assert rig.adapter.stats.forked == 1
    assert rows_before(rig) - rows < 100
    rows = rows_before(rig)
    left = rig.adapter.place(talk, end)
    assert left.tokens > left.expected - 30, "the branch that was left is kept"
    talk.navigate_to(end)
    rig.backend.script("Gladly.")
    rig.ask(talk, "Thanks.")
    assert rig.adapter.stats.forked == 1, "it goes on where it was"
    assert rows_before(rig) - rows < 100
    rig.adapter.prune(talk)
    rig.engine.check()
    rig.only_spine(talk)
    assert pages(rig) < trunk + 20


def test_prune_after_a_step_back_leaves_not_a_row_of_the_other_way(rig: Rig) -> None:
    talk = started(rig)
    talk.navigate_to(observation(talk).id)
    rig.backend.script("Sold.")
    rig.ask(talk, "Look again.")
    rig.adapter.prune(talk)
    rig.engine.check()
    rig.only_spine(talk)
    spine = rig.spine(talk)
    assert sum(len(node.tokens) for node in spine) == spine[-1].length, "no end hangs over"


def test_navigate_to_nothing(rig: Rig) -> None:
    talk = started(rig)
    first = talk.state.events[0]
    talk.navigate_to(first.id)  # the system prompt
    rig.backend.script("Good day.")
    rig.ask(talk, "Good day!")
    assert talk.state.execution_status is Status.FINISHED
    assert rig.adapter.stats.forked == 1
    rig.adapter.prune(talk)
    rig.only_spine(talk)


def test_many_steps_back_do_not_pile_up(rig: Rig) -> None:
    talk = started(rig)
    back = observation(talk).id
    for number in range(12):
        talk.navigate_to(back)
        rig.backend.script(f"Number {number}.")
        rig.ask(talk, f"Try {number}.")
    family = rig.adapter.bridge.forest.of(str(talk.id))
    assert family is not None
    assert len(family.tips) <= 9
    rig.adapter.prune(talk)
    rig.only_spine(talk)


def test_forks_run_at_the_same_time(rig: Rig) -> None:
    talk = started(rig)
    forks = [rig.adapter.fork(talk) for _ in range(4)]
    rig.conversations += forks
    rig.backend.script(*["Yes, gladly."] * 5)
    for number, one in enumerate([talk, *forks]):
        one.send_message(f"Are you number {number}?")
    errors: list[BaseException] = []

    def run(one: Any) -> None:
        try:
            one.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in [talk, *forks]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    rig.engine.check()
    assert rig.engine.stats().sessions == 1
    assert {one.state.execution_status for one in [talk, *forks]} == {Status.FINISHED}
    rig.only_spine(talk, *forks)


# --- summaries ----------------------------------------------------------------------------------


def condensed(rig: Rig, kind: Any) -> Any:
    llm = rig.adapter.llm(num_retries=0)
    if kind is TrunkCondenser:
        condenser = rig.adapter.condenser(llm, max_size=10, keep_first=2)
    else:
        condenser = LLMSummarizingCondenser(llm=llm, max_size=10, keep_first=2)
    agent = rig.agent(llm=llm, condenser=condenser)
    calls = [call(name) for name in ("lamp", "bulb", "shade", "cord", "plug")]
    talk = rig.conversation(*calls, "SUMMARY all cost 4", DONE, agent=agent)
    rig.ask(talk)
    assert talk.state.execution_status is Status.FINISHED
    (event,) = [e for e in talk.state.events if isinstance(e, Condensation)]
    assert event.summary == "SUMMARY all cost 4"
    assert any("SUMMARY" in str(m["content"]) for m in rig.requests[-1].messages)
    return talk


def test_the_summary_is_asked_for_on_the_trunk(rig: Rig) -> None:
    talk = condensed(rig, TrunkCondenser)
    stats = rig.adapter.stats
    assert stats.side == 1
    (question,) = [r for r in rig.requests if r.side]
    assert question.tools == rig.requests[0].tools, "or it would share nothing"
    asked = rig.adapter.bridge.renderers.tokens(question.messages, question.tools)
    text = str(question.messages[-1]["content"])
    cached = stats.cached
    assert stats.forked == 1, "the view with the summary leaves after what is kept"
    rig.adapter.prune(talk)
    rig.only_spine(talk)
    assert len(asked) > 1000
    assert len(text) < 600
    assert cached > 0.7 * stats.prompt


def test_the_question_of_the_condenser_costs_only_itself(rig: Rig) -> None:
    rows: list[int] = []
    inner = rig.adapter.bridge.stream

    def stream(request: Any) -> Any:
        before = rows_before(rig)
        yield from inner(request)
        if request.side:
            rows.append(rows_before(rig) - before)

    rig.adapter.bridge.stream = stream  # type: ignore[method-assign]
    condensed(rig, TrunkCondenser)
    (question,) = rows
    assert question < 700, "the question and its turn headers, and nothing of the conversation"


def test_the_sdk_s_own_condenser_works_too(rig: Rig) -> None:
    talk = condensed(rig, LLMSummarizingCondenser)
    rig.adapter.prune(talk)
    rig.only_spine(talk)


async def test_condensing_in_a_coroutine(rig: Rig) -> None:
    llm = rig.adapter.llm(num_retries=0)
    agent = rig.agent(llm=llm, condenser=rig.adapter.condenser(llm, max_size=8, keep_first=2))
    calls = [call(name) for name in ("lamp", "bulb", "shade", "cord")]
    talk = rig.conversation(*calls, "SUMMARY", DONE, agent=agent)
    talk.send_message("What do they cost?")
    await talk.arun()
    assert [e.summary for e in talk.state.events if isinstance(e, Condensation)] == ["SUMMARY"]
    assert rig.adapter.stats.side == 1


def test_too_long_a_history_is_condensed(tmp_path: Any) -> None:
    """The engine's own refusal reaches the agent as the kind of error that makes it condense."""
    rig = Rig(tmp_path, max_context=9000)
    llm = rig.adapter.llm(num_retries=0, max_input_tokens=10**6)
    agent = rig.agent(llm=llm, condenser=rig.adapter.condenser(llm, max_size=40, keep_first=2))
    talk = rig.conversation(
        call("lamp"),
        call("bulb"),
        "SUMMARY",
        DONE,
        agent=agent,
        tool=lambda key: key * 700,
    )
    rig.ask(talk)
    assert talk.state.execution_status is Status.FINISHED, talk.state.events[-1]
    assert [type(e).__name__ for e in talk.state.events].count("CondensationRequest") >= 1
    rig.close()


def test_a_fork_takes_the_condenser_along(rig: Rig) -> None:
    talk = condensed(rig, TrunkCondenser)
    fork = rig.adapter.fork(talk)
    rig.conversations.append(fork)
    assert type(fork.agent.condenser) is TrunkCondenser
    rig.backend.script("Yes.")
    rig.ask(fork, "All of them?")
    assert rig.engine.stats().sessions == 1


# --- beside -------------------------------------------------------------------------------------


def test_questions_beside_leave_the_conversation_where_it_is(rig: Rig) -> None:
    talk = rig.conversation(call("lamp"), "Four.", "A title", DONE)

    talk.send_message("What does the lamp cost?")
    talk.run()  # the second reply is an answer
    assert talk.ask_agent("What was the question?") == "A title"
    rig.backend.script("Lamp")
    talk.generate_title()
    rows = rows_before(rig)
    rig.ask(talk, "Thanks.")
    assert rows_before(rig) - rows < 100, "the conversation goes on at its own place"
    rig.adapter.prune(talk)
    rig.only_spine(talk)


def test_an_address_makes_a_request_a_side_one(rig: Rig) -> None:
    talk = started(rig)
    llm = rig.adapter.llm(
        usage_id="side",
        litellm_extra_body=rig.adapter.address(talk.id, side=True),
        num_retries=0,
    )
    from openhands.sdk.llm import Message, TextContent

    rig.backend.script("Aside.")
    reply = llm.completion([Message(role="user", content=[TextContent(text="Hm?")])])
    assert reply.message.content[0].text == "Aside."
    assert rig.adapter.stats.side == 1
    rig.only_spine(talk)


def test_a_parent_can_be_named_in_the_body(rig: Rig) -> None:
    """As a program does that starts a conversation in another process."""
    talk = started(rig)
    body = rig.adapter.address(parent=talk.id)
    llm = rig.adapter.llm(litellm_extra_body=body, num_retries=0)
    other = rig.conversation("Another.", agent=rig.agent(llm=llm))
    rig.ask(other, "Quite another question")
    assert rig.adapter.stats.forked == 1, "it hangs on the system prompt of its parent"
    assert rig.engine.stats().sessions == 1


def test_unrelated_conversations_have_trees_of_their_own(rig: Rig) -> None:
    talk = started(rig)
    other = rig.conversation(call("lamp"), DONE)
    rig.ask(other, "Quite another question")
    stats = rig.adapter.stats
    assert stats.opened == 2
    assert rig.engine.stats().sessions == 2
    assert rig.engine.stats().cached_tokens > 1000, "what they share came from the prefix index"
    rig.adapter.release(talk)
    assert rig.engine.stats().sessions == 1
    rig.only_spine(other)


# --- events and places ----------------------------------------------------------------------------


def test_every_event_has_its_place(rig: Rig) -> None:
    talk = started(rig)
    events = [e for e in talk.state.active_branch() if hasattr(e, "to_llm_message")]
    places = [rig.adapter.place(talk, event.id) for event in events]
    lengths = [place.tokens for place in places]
    assert lengths == sorted(lengths)
    assert all(place.expected - place.tokens < 30 for place in places)
    spine = [node.id for node in rig.spine(talk)]
    assert all(place.node in spine for place in places)
    assert isinstance(events[2], ActionEvent)


def test_place_of_what_is_not_there(rig: Rig) -> None:
    talk = started(rig)
    with pytest.raises(AdapterError, match="has no event nothing"):
        rig.adapter.place(talk, "nothing")
    rig.adapter.release(talk)
    with pytest.raises(SessionError, match="nothing of conversation"):
        rig.adapter.place(talk)


def test_a_released_conversation_goes_on(rig: Rig) -> None:
    talk = started(rig)
    rig.adapter.release(talk)
    assert rig.engine.stats().sessions == 0
    rig.backend.script("Still here.")
    rig.ask(talk, "Hello?")
    assert rig.adapter.stats.opened == 2
    rig.only_spine(talk)
