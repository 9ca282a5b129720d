"""The loop: prompts as without it, what is forked and bound, errors as observations, events."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count
from typing import Any

import pytest

from forkserve import Engine
from forkserve.adapters.react import (
    Committed,
    Event,
    Final,
    MaxTurnsReached,
    ReactAgent,
    ReactResult,
    Speculated,
    TextDelta,
    ToolCalled,
    ToolResult,
    ToolStarted,
)
from forkserve.adapters.templates import Dialect
from forkserve.adapters.tools import (
    BadArguments,
    Tool,
    ToolFailed,
    ToolTimeout,
    UnknownTool,
)
from forkserve.errors import AdapterError, ConfigError, ModelError
from forkserve.types import HitClass
from tests.adapters.templates.chats import QWEN, SeamTokenizer

from .conftest import Make, plain_loop, prompts, rest_until_quiet, spoken

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


def events_of(agent: ReactAgent, task: Any = "Go on.", how: str = "sync") -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in agent.astream(task)]

    return list(agent.stream(task)) if how == "sync" else asyncio.run(collect())


REPLIES = [
    "I look." + spoken({"look": {"at": "the sea"}}),
    THINK + spoken([("look", {"at": "nothing"}), ("look", {"at": 'a "quoted"\nline é'})]),
    spoken({"add": {"a": 3}}),
]


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("family", ["qwen", "hermes", "mistral", "plain"])
@pytest.mark.parametrize("speculate", [True, False])
def test_prompts_are_those_of_a_plain_loop(
    make: Make, family: str, how: str, speculate: bool
) -> None:
    eng = make(*REPLIES, family=family)
    agent = ReactAgent(
        eng,
        [look, add],
        system="Be brief.",
        max_tokens=2_000,
        speculate=speculate,
        placeholders=False,
    )
    start = [{"role": "system", "content": agent.system}, {"role": "user", "content": "Where?"}]
    tools = {"look": look, "add": lambda **n: str(add(**n))}
    want, own = plain_loop(family, list(REPLIES), tools, agent.schemas, list(start), 9)
    # The last answer is the model's own: it shows that the rows under it are right.
    final = run(ReactAgentOf(agent, 9), "Where?", how)
    assert prompts(eng) == want
    assert final.turns[-1].stats.generated == len(own)
    assert final.text == answer(eng, own)


@pytest.mark.parametrize("mode", ["tools", "text"])
def test_a_template_that_takes_no_system_message(make: Make, mode: Any) -> None:
    """The agent's instructions stand before the first user's text."""
    eng = make("It is there.", family="no system")
    agent = ReactAgent(eng, [look], system="Be brief.", mode=mode)
    assert agent.run("Where?").text == "It is there."
    begin = eng.backend.tokenizer.decode_bytes(prompts(eng)[0]).decode()
    assert begin.startswith("<|im_start|>user\nBe brief.\n\nYou can ")
    assert begin.endswith("\n\nWhere?<|im_end|>\n<|im_start|>assistant\n")


def ReactAgentOf(agent: ReactAgent, last: int) -> ReactAgent:
    """The same agent with a short answer in the end."""
    whole = agent.max_tokens

    def limit() -> int:
        done = len(prompts(agent.engine))
        return whole if done < len(REPLIES) else last

    class Short(ReactAgent):
        @property
        def max_tokens(self) -> int:  # type: ignore[override]
            return limit()

        @max_tokens.setter
        def max_tokens(self, _: int) -> None: ...

    agent.__class__ = Short
    return agent


def answer(eng: Engine, tokens: list[int]) -> str:
    end = eng.backend.info.eos_ids[0]
    text = eng.backend.tokenizer.decode_bytes([t for t in tokens if t != end])
    return text.decode("utf-8", "replace").strip()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_what_is_known_is_prefilled_while_the_tool_runs(make: Make, how: str) -> None:
    eng = make(THINK + spoken({"gaze": {"at": "sea"}}), "Done.")
    result = run(ReactAgent(eng, [gaze], placeholders=False), "Go.", how)
    stats = result.turns[1].stats
    assert result.text == "Done."
    assert stats.hit is HitClass.KNOWN_SUFFIX
    assert stats.known > 50, "the turn without its thoughts, and the header"
    assert stats.known <= stats.used <= stats.known + 1  # a token of the recovery may fit
    assert stats.cached == stats.kept + stats.used
    assert stats.prompt == stats.cached + stats.prefilled
    assert stats.kept <= result.turns[0].stats.prompt + 1, "it leaves before the thoughts"
    assert result.stats.tool_ms > 290
    assert result.stats.turns == 2


def test_an_exception_binds_the_recovery_branch(make: Make) -> None:
    eng = make(spoken({"gaze": {"at": "nothing"}}), "Sorry.")
    events = events_of(ReactAgent(eng, [gaze]))
    forks = [e for e in events if isinstance(e, Speculated)]
    assert [e.branch for e in forks] == ["gaze", "err"]
    (bound,) = [e for e in events if isinstance(e, Committed)]
    assert bound.branch == "err"
    assert bound.hit is HitClass.KNOWN_SUFFIX
    assert bound.stats.used == sum(e.admitted for e in forks[1:])
    (seen,) = [e.observation for e in events if isinstance(e, ToolResult)]
    assert seen.text == "Error: LookupError: there is nothing"
    assert isinstance(seen.error, ToolFailed)
    assert isinstance(seen.error.__cause__, LookupError)
    assert not seen.ok


@pytest.mark.parametrize("how", ["sync", "async"])
def test_events_come_in_order(make: Make, how: str) -> None:
    eng = make("Hm." + spoken({"gaze": {"at": "x"}}), "Yes.", slow_ms=0.05)
    events = events_of(ReactAgent(eng, [gaze], placeholders=False), how=how)
    kinds = [type(e) for e in events]
    assert [k for k in kinds if k is not TextDelta] == [
        ToolCalled,
        ToolStarted,
        Speculated,
        Speculated,
        ToolResult,
        Committed,
        Final,
    ]
    said = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert said == "Hm." + spoken({"gaze": {"at": "x"}}) + "Yes."
    assert [e.turn for e in events if isinstance(e, TextDelta)][-1] == 1
    final = events[-1]
    assert isinstance(final, Final)
    assert final.result.finish_reason == "eos"
    assert str(final.result) == "Yes."


def test_a_tool_starts_while_the_model_still_writes(make: Make) -> None:
    began, passes, in_time = threading.Event(), count(), []

    def note() -> str:
        began.set()
        return "noted"

    def near_the_end(_: object) -> None:
        if next(passes) == whole - 10:  # a token a pass: the call was there long before
            in_time.append(began.wait(30))

    reply = spoken({"note": {}}) + "x" * 60
    eng = make(reply, "Yes.")
    whole = len(eng.backend.tokenizer.encode(reply))
    eng.backend._on_batch = near_the_end  # type: ignore[attr-defined]
    result = ReactAgent(eng, [note]).run("Go.")
    assert result.text == "Yes."
    assert in_time == [True]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_parallel_calls_run_together_and_are_bound_in_order(make: Make, how: str) -> None:
    gate = threading.Barrier(2, timeout=5)

    def slow(n: int) -> str:
        gate.wait()
        time.sleep(0.15 if n == 0 else 0.0)
        return f"result {n}"

    eng = make(spoken([("slow", {"n": 0}), ("slow", {"n": 1})]), "Yes.")
    events = events_of(ReactAgent(eng, [slow]), how=how)
    came = [e.observation.text for e in events if isinstance(e, ToolResult)]
    assert came == ["result 1", "result 0"]
    final = events[-1]
    assert isinstance(final, Final)
    assert [m["content"] for m in final.result.messages if m["role"] == "tool"] == [
        "result 0",
        "result 1",
    ]
    assert [o.text for o in final.result.turns[0].observations] == ["result 0", "result 1"]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_each_result_makes_more_known(make: Make, how: str) -> None:
    def slow(n: int) -> str:
        time.sleep(0.3 * n)
        rest_until_quiet()
        return f"result number {n}"

    eng = make(spoken([("slow", {"n": n}) for n in range(3)]), "Yes.")
    events = events_of(ReactAgent(eng, [slow], max_tokens=900, placeholders=False), how=how)
    forks = [e for e in events if isinstance(e, Speculated) and e.branch == "slow"]
    assert len(forks) == 3
    assert [a.at + a.known for a in forks[:-1]] == [b.at for b in forks[1:]]
    (bound,) = [e for e in events if isinstance(e, Committed)]
    assert bound.stats.used - sum(f.known for f in forks) in (0, 1)
    assert bound.stats.prefilled < 60, "the last result and the close"


def test_without_parallel_the_turn_ends_with_its_first_call(make: Make, cancels: list[int]) -> None:
    two = spoken([("add", {"a": 1}), ("add", {"a": 2})])
    eng = make("So: " + two, "Yes.")
    result = ReactAgent(eng, [add], parallel=False).run("Go.")
    assert [c.arguments for c in result.turns[0].calls] == [{"a": 1}]
    assert result.turns[0].text == "So: " + two[: two.index("}}") + 2] + "</tool_call>"
    assert result.messages[-2]["content"] == "2"
    assert len(cancels) == 1


# --- errors are observations ---------------------------------------------------------------------


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
        over.wait(60)
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


# --- other ways in -------------------------------------------------------------------------------


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
    agent.run("Go.")
    assert 290 < agent.expected_ms("gaze") < 2_000


def test_a_tool_that_ends_at_once_is_not_speculated_on(make: Make) -> None:
    def gate(n: int) -> str:
        assert held.wait(5)
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
