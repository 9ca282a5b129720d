"""Other ways in: refused calls, open sessions, reasoning, text form; what is learned."""

from __future__ import annotations

import threading

import pytest

from forkserve.adapters.react import (
    ReactAgent,
    Speculated,
)
from forkserve.adapters.templates import Dialect
from forkserve.adapters.tools import (
    Tool,
)
from forkserve.errors import AdapterError, ModelError
from forkserve.types import HitClass
from tests.adapters.templates.chats import QWEN, SeamTokenizer
from tests.waiting import HANGS_S

from .agents import THINK, add, gaze, look, run
from .conftest import Make, prompts, rest_until_quiet, spoken


def test_a_template_may_refuse_parallel_calls(make: Make) -> None:
    both = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    eng = make(both, "Yes.", family="llama")
    agent = ReactAgent(eng, [add])
    assert not agent.parallel
    result = agent.run("Go.")
    assert result.text == "Yes."
    assert [c.arguments for c in result.turns[0].calls] == [{"a": 1}]
    insist = ReactAgent(
        make(both, "Yes.", family="llama"), [add], dialect=Dialect(True, True, True)
    )
    with pytest.raises(ModelError, match="one call at a time"):
        insist.run("Go.")


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_conversation_goes_on_in_its_session(make: Make, how: str) -> None:
    eng = make(spoken({"add": {"a": 1}}), "Two.", THINK + spoken({"add": {"a": 5}}), "Six.")
    agent = ReactAgent(eng, [add], system="Add.")
    with eng.session("nothing in common") as session, pytest.raises(AdapterError, match="nothing"):
        run(agent, "One and one?", how, session=session)
    with eng.session(agent.prompt("Hello")) as session:
        first = run(agent, "One and one?", how, session=session)
        task = [*first.messages, {"role": "user", "content": "Five and one?"}]
        second = run(agent, task, how, session=session.id)
        assert second.text == "Six."
        assert second.turns[0].stats.kept > first.turns[-1].stats.prompt
        assert second.turns[0].stats.prefilled < 60
        assert not session.closed
        assert not session.tip.children


def test_reasoning_may_be_kept_from_the_messages(make: Make) -> None:
    eng = make(THINK + spoken({"add": {"a": 1}}), THINK + "Two.", family="hermes")
    kept = ReactAgent(eng, [add]).run("Go.")
    assert "thought" in kept.messages[1]["content"]
    eng = make(THINK + spoken({"add": {"a": 1}}), THINK + "Two.", family="hermes")
    dropped = ReactAgent(eng, [add], reasoning="drop").run("Go.")
    assert all("thought" not in m["content"] for m in dropped.messages)
    assert dropped.turns[1].stats.kept < kept.turns[1].stats.kept
    assert dropped.text == kept.text == "Two."


@pytest.mark.parametrize("opened", [False, True])
def test_a_call_that_is_only_thought_of_is_none(make: Make, opened: bool) -> None:
    call = spoken({"add": {"a": 1}})
    family = QWEN.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert family != QWEN
    eng = make(("" if opened else "<think>\n") + f"Perhaps {call}\n</think>\n\nTwo.")
    eng.backend.tokenizer = SeamTokenizer(family if opened else QWEN)
    result = ReactAgent(eng, [add]).run("Go.")
    assert result.turns[0].calls == []
    assert result.text == "Two."


@pytest.mark.parametrize("how", ["sync", "async"])
def test_text_form(make: Make, how: str) -> None:
    eng = make(
        'Thought: hm.\nAction: look\nAction Input: {"at": "sea"}\nObservation: I made this up.',
        "Thought: so.\nAction: look\nAction Input: the sky\nObservation: and this",
        "Thought: so.\nAction: add\nAction Input: 3, 4\n",
        "Thought: fine.\nFinal Answer: It is there.",
        family="plain",
    )
    agent = ReactAgent(eng, [look, Tool.of(add)], mode="text", system="Think.")
    assert "Action Input:" in agent.system
    result = run(agent, "Where?", how)
    assert result.text == "It is there."
    roles = [m["role"] for m in result.messages]
    assert roles == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    texts = [m["content"] for m in result.messages]
    assert texts[2] == 'Thought: hm.\nAction: look\nAction Input: {"at": "sea"}'
    assert texts[3] == "Observation: " + look("sea")
    assert texts[5] == "Observation: " + look("the sky")
    assert "a: Input should be a valid integer" in texts[7]
    assert prompts(eng)[1] == eng.backend.tokenizer.encode(
        eng.backend.tokenizer.render(result.messages[:4])
    )


# --- what is learned -----------------------------------------------------------------------------


def test_the_pause_of_each_tool_is_learned(make: Make) -> None:
    eng = make(*[spoken({"gaze": {"at": "x"}})] * 2, "Yes.", slow_ms=0.02)
    agent = ReactAgent(eng, [gaze, Tool.of(add, idle_ms=7.0)])
    assert agent.expected_ms("gaze") > 1e6
    assert agent.expected_ms("add") == 7.0
    assert agent.expected_ms("unknown") == 0.0
    turns = agent.run("Go.").turns
    took = [seen.ms for turn in turns for seen in turn.observations]
    assert 290 < min(took) <= agent.expected_ms("gaze") <= max(took)


def test_a_tool_that_ends_at_once_is_not_speculated_on(make: Make) -> None:
    def gate(n: int) -> str:
        assert held.wait(HANGS_S)
        return "x" * n

    held = threading.Event()
    eng = make(spoken({"gate": {"n": 1}}), "Yes.")
    agent = ReactAgent(eng, [Tool.of(gate, idle_ms=0.001)])
    for event in agent.stream("Go."):
        if isinstance(event, Speculated):
            assert event.refused == ("idle_horizon",)
            assert event.admitted == 0
            held.set()
    assert held.is_set()


@pytest.mark.parametrize("family", ["qwen", "hermes"])
def test_the_shape_of_a_stable_output_is_learned(make: Make, family: str) -> None:
    def rows(n: int) -> str:
        rest_until_quiet()
        return f'{{"code": 0, "rows": [{n}, {n}]}}'

    tool = Tool.of(rows, stable=True)
    eng = make(*[spoken({"rows": {"n": n}}) for n in range(5)], "Yes.", family=family)
    result = ReactAgent(eng, [tool], placeholders=False, max_tokens=900).run("Go.")
    hits = [turn.stats.hit for turn in result.turns[1:]]
    assert hits[0] is HitClass.KNOWN_SUFFIX
    assert hits[-1] is HitClass.RESIDUAL_PARTIAL
    assert result.turns[-1].stats.used > result.turns[-1].stats.known + 8


@pytest.mark.parametrize("how", ["sync", "async"])
def test_drift_is_counted_and_harmless(make: Make, how: str) -> None:
    eng = make(spoken({"gaze": {"at": "x"}}), "Yes.", family="counts")
    result = run(ReactAgent(eng, [gaze]), "Go.", how)
    assert result.text == "Yes."
    assert result.stats.drifts == 1
    assert result.turns[1].stats.known == 0
    assert "template_drift" in result.turns[1].stats.refused
    assert prompts(eng)[1] == eng.backend.tokenizer.encode(
        eng.backend.tokenizer.render(result.messages[:-1])
    )
