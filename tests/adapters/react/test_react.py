"""The loop: prompts as without it, what is forked and bound, events."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import pytest

from forkserve.adapters.react import (
    Committed,
    Final,
    ReactAgent,
    Speculated,
    TextDelta,
    ToolCalled,
    ToolResult,
    ToolStarted,
)
from forkserve.adapters.tools import (
    ToolFailed,
)
from forkserve.types import HitClass
from tests.waiting import HANGS_S, wait_for

from .agents import REPLIES, THINK, add, answer, events_of, gaze, look, run
from .conftest import Make, plain_loop, prompts, rest_until_quiet, spoken


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
    assert bound.stats.used == sum(e.known for e in forks)
    # What a loop of its own had computed by then need not be admitted for the second once more.
    assert forks[1].known <= forks[1].admitted <= bound.stats.used
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
            in_time.append(began.wait(HANGS_S))

    reply = spoken({"note": {}}) + "x" * 60
    eng = make(reply, "Yes.")
    whole = len(eng.backend.tokenizer.encode(reply))
    eng.backend._on_batch = near_the_end  # type: ignore[attr-defined]
    result = ReactAgent(eng, [note]).run("Go.")
    assert result.text == "Yes."
    assert in_time == [True]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_parallel_calls_run_together_and_are_bound_in_order(make: Make, how: str) -> None:
    gate = threading.Barrier(2, timeout=HANGS_S)
    events: list[Any] = []

    def slow(n: int) -> str:
        gate.wait()
        if n == 0:
            wait_for(lambda: any(isinstance(e, ToolResult) for e in events))
        return f"result {n}"

    eng = make(spoken([("slow", {"n": 0}), ("slow", {"n": 1})]), "Yes.")
    events_of(ReactAgent(eng, [slow]), how=how, seen=events)
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
    events: list[Any] = []

    def slow(n: int) -> str:
        wait_for(lambda: sum(isinstance(e, ToolResult) for e in events) == n)
        rest_until_quiet()
        return f"result number {n}"

    eng = make(spoken([("slow", {"n": n}) for n in range(3)]), "Yes.")
    agent = ReactAgent(eng, [slow], max_tokens=900, placeholders=False)
    events_of(agent, how=how, seen=events)
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
