"""Nested fan-outs, deferred joins, subgraphs, commands to a parent."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from forkserve.adapters.langgraph import (
    Branch,
    ForkBranchState,
    ForkServe,
    ForkState,
)
from forkserve.adapters.langgraph.state import merge_refs

from .graphs import PROMPT, START_STATE, THREAD, State, one, spine_only

# ------------------------------------------------------------------ graphs


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_nested_fan_out_by_command(fs: ForkServe, is_async: bool) -> None:
    """Grandchildren leave from their own parent, because the ref rides in the Send."""
    bases: dict[str, int] = {}

    @fs.node
    def root(state: State, fork: Branch):
        fork.append("root ")

    @fs.node
    def outer(state, fork: Branch):
        fork.append(f"outer {state['i']} ")
        return Command(
            update={"out": [f"o{state['i']}"]},
            goto=[fs.send("inner", {"i": state["i"], "j": j}) for j in range(2)],
        )

    @fs.node
    def inner(state, fork: Branch):
        fork.append(f"inner {state['i']}{state['j']}")
        bases[f"{state['i']}{state['j']}"] = fork.base["node"]

    @fs.node(role="join")
    def pick(state: State):
        refs = state["fork_refs"]
        leaves = fs.leaves(refs)
        assert len(refs) == 6
        assert len(leaves) == 4
        return fs.commit_winner(refs, leaves[2])

    build = StateGraph(State)
    build.add_node("root", root)
    build.add_node("outer", outer, destinations=("inner",))
    build.add_node("inner", inner)
    build.add_node("pick", pick, defer=True)
    build.add_edge(START, "root")
    build.add_conditional_edges(
        "root", lambda s: [fs.send("outer", {"i": i}) for i in range(2)], ["outer"]
    )
    build.add_edge("inner", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = (
        asyncio.run(graph.ainvoke(START_STATE, THREAD))
        if is_async
        else graph.invoke(START_STATE, THREAD)
    )
    assert bases["00"] == bases["01"] != bases["10"] == bases["11"]
    assert fs.text(result["fork_tip"]) == PROMPT + "root outer 1 inner 10"
    spine_only(fs, result["fork_tip"])


def test_a_deferred_join_waits_for_branches_of_unequal_depth(fs: ForkServe) -> None:
    joins: list[int] = []

    @fs.node
    def short(state, fork: Branch):
        fork.append("short")

    @fs.node
    def long(state, fork: Branch):
        fork.append("long ")

    @fs.node(role="branch", parent=lambda state: state["fork_refs"][1])
    def longer(state: State, fork: Branch):
        fork.append("longer")  # goes on with a branch: its ref takes that one's place

    @fs.node(role="join")
    def pick(state: State):
        joins.append(len(state["fork_refs"]))
        return fs.commit_winner(state["fork_refs"], 1)

    build = StateGraph(State)
    build.add_node("short", short)
    build.add_node("long", long)
    build.add_node("longer", longer)
    build.add_node("pick", pick, defer=True)
    build.add_conditional_edges(
        START, lambda s: [fs.send("short", {}), fs.send("long", {})], ["short", "long"]
    )
    build.add_edge("long", "longer")
    build.add_edge("short", "pick")
    build.add_edge("longer", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert joins == [2]
    assert fs.text(result["fork_tip"]) == PROMPT + "long longer"
    spine_only(fs, result["fork_tip"])


def test_one_fan_out_may_be_decided_while_another_runs(fs: ForkServe) -> None:
    """A join touches the branches it was given and no others."""

    class Two(ForkState, total=False):
        prompt: str
        mine: Annotated[list[Any], merge_refs]

    alive: list[bool] = []

    @fs.node
    def quick(state, fork: Branch):
        fork.append(f"quick {state['i']}")
        return {"mine": [fork.ref]}

    @fs.node
    def slow(state, fork: Branch):
        fork.append("slow ")
        return Command(goto=[fs.send("slower", {})])

    @fs.node
    def slower(state, fork: Branch):
        fork.append("slower")
        fork.generate(2)

    @fs.node(role="join")
    def pick(state: Two):
        return fs.commit_winner(state["mine"], 0)

    @fs.node(role="join")
    def rest(state: Two):
        alive.extend(fs.alive(ref) for ref in state["fork_refs"])
        return {}

    build = StateGraph(Two)
    build.add_node("quick", quick)
    build.add_node("slow", slow, destinations=("slower",))
    build.add_node("slower", slower)
    build.add_node("pick", pick)
    build.add_node("rest", rest, defer=True)
    build.add_conditional_edges(
        START,
        lambda s: [fs.send("quick", {"i": 0}), fs.send("quick", {"i": 1}), fs.send("slow", {})],
        ["quick", "slow"],
    )
    build.add_edge("quick", "pick")
    build.add_edge("slower", "rest")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "quick 0"
    assert alive
    assert all(alive)
    spine_only(fs, result["fork_tip"])


class Inner(ForkBranchState, total=False):
    prompt: str
    i: int
    out: Annotated[list[str], operator.add]


def subgraph(fs: ForkServe, steps: int = 2) -> Any:
    @fs.node
    def step(state: Inner, fork: Branch):
        assert fork.role == "branch"
        fork.append(f"s{state['i']} ")
        return {"out": [fork.text]}

    build = StateGraph(Inner)
    for number in range(steps):
        build.add_node(f"step{number}", step)
        build.add_edge(START if not number else f"step{number - 1}", f"step{number}")
    return build.compile()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_subgraph_as_a_branch(fs: ForkServe, is_async: bool) -> None:
    @fs.node
    def plan(state: State, fork: Branch):
        fork.append("plan ")

    @fs.node(role="join")
    def pick(state: State):
        assert len(state["fork_refs"]) == 3  # one for each branch, not for each step
        return fs.commit_winner(state["fork_refs"], 2)

    build = StateGraph(State)
    build.add_node("plan", plan)
    build.add_node("sub", subgraph(fs))
    build.add_node("pick", pick)
    build.add_edge(START, "plan")
    build.add_conditional_edges(
        "plan",
        lambda s: [
            fs.send("sub", {"i": i}, parent=s["fork_tip"], text=f"role {i}: ") for i in range(3)
        ],
        ["sub"],
    )
    build.add_edge("sub", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = (
        asyncio.run(graph.ainvoke(START_STATE, THREAD))
        if is_async
        else graph.invoke(START_STATE, THREAD)
    )
    assert fs.text(result["fork_tip"]) == PROMPT + "plan role 2: s2 s2 "
    spine_only(fs, result["fork_tip"])
    before = next(s for s in graph.get_state_history(THREAD) if "sub" in s.next)
    again = graph.invoke(None, before.config)  # the namespace of a subgraph changes on replay
    assert fs.text(again["fork_tip"]) == fs.text(result["fork_tip"])
    assert fs.stats["reopened"] == 0


def test_branches_that_are_subgraphs_of_a_branch(fs: ForkServe) -> None:
    """Each is a branch of its own, not a step of the one that sent it."""

    @fs.node
    def outer(state, fork: Branch):
        fork.append("outer ")
        return Command(goto=[fs.send("sub", {"i": i}) for i in range(2)])

    @fs.node(role="join")
    def pick(state: State):
        assert len(state["fork_refs"]) == 3
        (_, two) = fs.leaves(state["fork_refs"])
        return fs.commit_winner(state["fork_refs"], two)

    build = StateGraph(State)
    build.add_node("outer", outer, destinations=("sub",))
    build.add_node("sub", subgraph(fs))
    build.add_node("pick", pick)
    build.add_conditional_edges(START, lambda s: [fs.send("outer", {})], ["outer"])
    build.add_edge("sub", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "outer s1 s1 "
    spine_only(fs, result["fork_tip"])


def test_a_fan_out_and_join_inside_a_subgraph_that_is_a_branch(fs: ForkServe) -> None:
    @fs.node
    def first(state: Inner, fork: Branch):
        fork.append(f"first {state['i']} ")

    @fs.node
    def leaf(state, fork: Branch):
        fork.append(f"leaf {state['j']}")

    @fs.node(role="join")
    def choose(state: Inner):
        mine = [r for r in state["fork_refs"] if r["index"] >= 0]
        return fs.commit_winner(mine, 1)

    @fs.node
    def last(state: Inner, fork: Branch):
        fork.append(" last")

    @fs.node(role="join")
    def pick(state: State):
        assert len(state["fork_refs"]) == 2
        return fs.commit_winner(state["fork_refs"], 1)

    sub = StateGraph(Inner, output_schema=ForkBranchState)
    for name, node in (("first", first), ("leaf", leaf), ("choose", choose), ("last", last)):
        sub.add_node(name, node)
    sub.add_edge(START, "first")
    sub.add_conditional_edges(
        "first",
        lambda s: [fs.send("leaf", {"j": j}, parent=s["fork_parent"]) for j in range(2)],
        ["leaf"],
    )
    sub.add_edge("leaf", "choose")
    sub.add_edge("choose", "last")
    build = StateGraph(State)
    build.add_node("sub", sub.compile())
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("sub", {"i": i, "prompt": PROMPT}) for i in range(2)], ["sub"]
    )
    build.add_edge("sub", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "first 1 leaf 1 last"
    spine_only(fs, result["fork_tip"])


def test_a_subgraph_on_the_trunk(fs: ForkServe) -> None:
    @fs.node
    def grow(state: State, fork: Branch):
        fork.append("grown ")

    sub = StateGraph(State)
    sub.add_node("a", grow)
    sub.add_node("b", grow)
    sub.add_edge(START, "a")
    sub.add_edge("a", "b")
    build = StateGraph(State)
    build.add_node("sub", sub.compile())
    build.add_node("after", grow)
    build.add_edge(START, "sub")
    build.add_edge("sub", "after")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "grown grown grown "
    spine_only(fs, result["fork_tip"])


def test_a_command_to_the_parent_graph(fs: ForkServe) -> None:
    @fs.node
    def leaves(state: State, fork: Branch):
        fork.append("inside ")
        return Command(graph=Command.PARENT, goto="after", update={"out": ["from inside"]})

    @fs.node
    def after(state: State, fork: Branch):
        fork.append("after")

    sub = StateGraph(State)
    sub.add_node("leaves", leaves)
    sub.add_edge(START, "leaves")
    build = StateGraph(State)
    build.add_node("sub", sub.compile(), destinations=("after",))
    build.add_node("after", after)
    build.add_edge(START, "sub")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert result["out"] == ["from inside"]
    assert fs.text(result["fork_tip"]) == PROMPT + "inside after"
    spine_only(fs, result["fork_tip"])


def test_a_command_that_comes_through_a_node(fs: ForkServe) -> None:
    """A graph called inside a node sends its command up through it: the node has ended well."""

    def inside(state: State):
        return Command(graph=Command.PARENT, goto="after", update={"out": ["from inside"]})

    sub = StateGraph(State)
    sub.add_node("inside", inside)
    sub.add_edge(START, "inside")
    inner = sub.compile()

    @fs.node
    def outer(state: State, fork: Branch):
        fork.append("outer ")
        inner.invoke({"prompt": "x"})

    @fs.node
    def after(state: State, fork: Branch):
        fork.append("after")

    build = StateGraph(State)
    build.add_node("outer", outer, destinations=("after",))
    build.add_node("after", after)
    build.add_edge(START, "outer")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert result["out"] == ["from inside"]
    assert fs.text(result["fork_tip"]) == PROMPT + "outer after"
    spine_only(fs, result["fork_tip"])


def test_a_graph_called_inside_a_node_belongs_to_the_same_run(fs: ForkServe) -> None:
    @fs.node
    def grow(state: State, fork: Branch):
        fork.append("inner")
        return {"out": ["inner"]}

    build = StateGraph(State)
    build.add_node("grow", grow)
    build.add_edge(START, "grow")
    inner = build.compile()

    @fs.node
    def outer(state: State, fork: Branch):
        fork.append("outer")
        assert inner.invoke({"prompt": "another prompt"})["out"] == ["inner"]
        assert fs.stats["sessions"] == 2

    result = one(fs, outer).invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "outer"
    assert fs.stats["undecided"] == 0


def test_a_graph_inside_a_larger_chain(fs: ForkServe) -> None:
    from langchain_core.runnables import RunnableLambda

    @fs.node
    def grow(state: State, fork: Branch):
        fork.append("x")

    chain = RunnableLambda(lambda x: {"prompt": x}) | one(fs, grow)
    result = chain.invoke(PROMPT, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "x"
    assert fs.stats["running"] == 0


def test_max_concurrency_one(fs: ForkServe) -> None:
    from .graphs import fan_out

    graph = fs.bind(fan_out(fs, k=5).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, {**THREAD, "max_concurrency": 1})
    assert len(result["out"]) == 5
    spine_only(fs, result["fork_tip"])
