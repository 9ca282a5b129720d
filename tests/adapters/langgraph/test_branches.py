"""Branches of a node's own, hints, sampling, and statistics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from forkserve.adapters.langgraph import (
    Branch,
    ForkServe,
)

from .graphs import PROMPT, START_STATE, THREAD, State, one, spine_only

# ------------------------------------------------------------------ scratch branches and hints


def test_branches_that_a_node_leaves_behind_are_aborted(fs: ForkServe) -> None:
    @fs.node
    def node(state: State, fork: Branch):
        fork.append("said ")
        fork.fork("kept").append("never chosen")
        other = fork.fork("ran", "ran as an attempt")
        other.generate(3)
        with fork.fork("chosen", "chosen") as chosen:
            chosen.commit()

    result = one(fs, node).invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "said chosen"
    spine_only(fs, result["fork_tip"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_branches_that_commit_at_the_same_time_take_turns(make: Any, is_async: bool) -> None:
    """Each branch is an agent of its own, which commits what its tools return."""
    fs = make(slow_ms=2)

    @fs.node
    def branch(state, fork: Branch):
        for turn in range(4):
            fork.generate(2)
            with fork.fork("tool", f"[{state['i']}.{turn} ") as guess:
                guess.append("observed] ")
                guess.commit()
            fork.commit("more ")
        return {"out": [fork.text[-24:]]}

    @fs.node
    async def abranch(state, fork: Branch):
        for turn in range(4):
            await fork.agenerate(2)
            with fork.fork("tool", f"[{state['i']}.{turn} ") as guess:
                guess.append("observed] ")
                await guess.acommit()
            await fork.acommit("more ")
        return {"out": [fork.text[-24:]]}

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], 5)

    build = StateGraph(State)
    build.add_node("branch", abranch if is_async else branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("branch", {"i": i}) for i in range(8)], ["branch"]
    )
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    config = {**THREAD, "max_concurrency": 8}
    result = (
        asyncio.run(graph.ainvoke(START_STATE, config))
        if is_async
        else graph.invoke(START_STATE, config)
    )
    assert [f"[{i}.3 observed] more " in out for i, out in enumerate(result["out"])] == [True] * 8
    assert "[5.0 observed] more " in fs.text(result["fork_tip"])
    spine_only(fs, result["fork_tip"])


@pytest.mark.parametrize("adds", [True, False], ids=["adds", "adds nothing"])
def test_a_hinted_branch_is_taken_over_with_its_rows(fs: ForkServe, adds: bool) -> None:
    role = "You are a careful reviewer of travel plans. " * 3

    @fs.node
    def plan(state: State, fork: Branch):
        if adds:
            fork.generate(3)
        fork.hint(role, t_idle_ms=1e6)
        fork.hint("a guess that nobody takes", t_idle_ms=1e6)
        while fs.engine.drain_slack():
            pass

    @fs.node
    def review(state, fork: Branch):
        assert fork.text == role
        return {"out": [fork.generate(3).text]}

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], 0)

    build = StateGraph(State)
    build.add_node("plan", plan)
    build.add_node("review", review)
    build.add_node("pick", pick)
    build.add_edge(START, "plan")
    build.add_conditional_edges(
        "plan", lambda s: [fs.send("review", {}, parent=s["fork_tip"], text=role)], ["review"]
    )
    build.add_edge("review", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.engine.stats().prefilled_tokens.speculative >= len(role)
    assert fs.engine.stats().prefilled_tokens.wasted <= len("a guess that nobody takes")
    spine_only(fs, result["fork_tip"])


def test_text_that_begins_a_branch_without_a_hint(fs: ForkServe) -> None:
    texts: list[str] = []

    @fs.node
    def review(state, fork: Branch):
        texts.append(fork.text)

    build = StateGraph(State)
    build.add_node("review", review)
    build.add_conditional_edges(
        START,
        lambda s: [fs.send("review", {}, text="role"), fs.send("review", {}, text=[65, 66])],
        ["review"],
    )
    fs.bind(build.compile()).invoke(START_STATE)
    assert sorted(texts) == ["AB", "role"]


def test_sampled_branches_do_not_depend_on_the_order_of_threads(make: Any) -> None:
    def texts(order: int) -> list[str]:
        fs = make()

        @fs.node
        def branch(state, fork: Branch):
            time.sleep(0.02 * ((order * state["i"]) % 4))
            return {"out": [fork.generate(8, temperature=1.0).text]}

        build = StateGraph(State)
        build.add_node("branch", branch)
        build.add_edge("branch", END)
        build.add_conditional_edges(
            START, lambda s: [Send("branch", {"i": i}) for i in range(4)], ["branch"]
        )
        return fs.bind(build.compile()).invoke(START_STATE)["out"]

    first = texts(1)
    assert len(set(first)) > 1
    assert texts(-1) == first


def test_statistics_on_the_custom_stream(make: Any) -> None:
    from .graphs import fan_out

    for on in (True, False):
        fs = make(stream_stats=on)
        graph = fs.bind(fan_out(fs).compile())
        events = [e["forkserve"] for e in graph.stream(START_STATE, stream_mode="custom")]
        assert len(events) == (5 if on else 0)
        if on:
            assert [e["role"] for e in events] == ["trunk", "branch", "branch", "branch", "join"]
            branches = [e for e in events if e["role"] == "branch"]
            assert sorted(e["index"] for e in branches) == [0, 1, 2]
            trunk = len(PROMPT) + len("plan. ") + 3
            assert {e["shared_tokens"] for e in branches} == {trunk}
            assert {e["added_tokens"] for e in branches} == {len("branch 0. ") + 3}
            assert all(e["ms"] >= 0 for e in events)
