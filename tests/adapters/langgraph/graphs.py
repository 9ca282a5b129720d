"""A fan-out whose branches misbehave on demand."""

from __future__ import annotations

import asyncio
import operator
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from forkserve.adapters.langgraph import Branch, ForkServe, ForkState

PROMPT = "A prompt that all branches share, long enough for some pages. "


class State(ForkState, total=False):
    prompt: str
    out: Annotated[list[str], operator.add]


THREAD: Any = {"configurable": {"thread_id": "t"}}
START_STATE: Any = {"prompt": PROMPT}


class Boom(Exception):
    """Not retried by default handlers in tests unless asked."""


def fan_out(
    fs: ForkServe,
    act: Callable[[int, int], Any] = lambda i, run: None,
    *,
    k: int = 3,
    is_async: bool = False,
    best: int = 0,
    tokens: int = 3,
    node: dict[str, Any] | None = None,
) -> Any:
    """plan -> k branches -> pick; `act(index, how often it ran before)` may raise or wait."""
    runs: Counter[int] = Counter()

    @fs.node
    def plan(state: State, fork: Branch):
        fork.append("plan. ")
        fork.generate(tokens)

    @fs.node
    def branch(state, fork: Branch):
        i = state["i"]
        runs[i] += 1
        fork.append(f"branch {i}. ")
        said = fork.generate(tokens).text
        waiting = act(i, runs[i] - 1)
        if isinstance(waiting, float):
            time.sleep(waiting)
        return {"out": [f"{i}:{said}"]}

    @fs.node
    async def abranch(state, fork: Branch):
        i = state["i"]
        runs[i] += 1
        fork.append(f"branch {i}. ")
        said = (await fork.agenerate(tokens)).text
        waiting = act(i, runs[i] - 1)
        if isinstance(waiting, float):
            await asyncio.sleep(waiting)
        return {"out": [f"{i}:{said}"]}

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], best)

    def fan(state: State):
        return [fs.send("branch", {"i": i}, parent=state["fork_tip"]) for i in range(k)]

    build = StateGraph(State)
    build.add_node("plan", plan)
    build.add_node("branch", abranch if is_async else branch, **(node or {}))
    build.add_node("pick", pick)
    build.add_edge(START, "plan")
    build.add_conditional_edges("plan", fan, ["branch"])
    build.add_edge("branch", "pick")
    return build


def one(fs: ForkServe, node: Any, schema: Any = State, **more: Any) -> Any:
    """A graph of one node, with a saver."""
    build = StateGraph(schema)
    build.add_node("n", node)
    build.add_edge(START, "n")
    return fs.bind(build.compile(checkpointer=InMemorySaver(), **more))


def spine_only(fs: ForkServe, ref: Any) -> None:
    """The session of a ref holds its committed main line and nothing else."""
    tree = fs.engine.tree(ref["session"])
    assert set(tree.nodes.values()) == set(tree.spine())
    assert fs.stats["undecided"] == 0
