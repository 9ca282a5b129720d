"""What the LangGraph decorator adds to a node that does nothing, on the mock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from benchmarks.measure import Options, Report, Target, median, repeat, share
from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langgraph import ForkServe, ForkState
from forkserve.engine import MockBackend

PROMPT = "A prompt that all nodes share. " * 20
LIMIT_MS = 0.3
Run = Callable[[], float]  # runs a graph once, ms


class State(ForkState, total=False):
    """The undecorated graph has the same channels."""

    prompt: str


def run(options: Options) -> Report:
    report = Report("decorator", "cost of `@fs.node` for a node that does nothing (mock)")
    nodes, runs, rounds, budget = (4, 2, 1, 0) if options.quick else (20, 20, 7, 20)
    table = report.table(
        f"{nodes} nodes, {runs} runs a round, with and without the decorator in turn",
        *("graph", "plain ms/node", "decorated ms/node", "added ms/node", "quiet rounds", "others"),
    )
    shapes = {"chain": chain, "fan-out by Send": fan_out}
    for name, shape in shapes.items():
        for is_async in (False, True):
            with Engine(MockBackend(ForkServeConfig(capacity_pages=65536))) as engine:
                fs = ForkServe(engine, stream_stats=False)
                plain, ours = shape(None, nodes, is_async), shape(fs, nodes, is_async)
                found = repeat(partial(_round, plain, ours, runs), rounds, budget)
            without, with_ = (median(pair[i] for pair in found.values) / nodes for i in (0, 1))
            added = median(b - a for a, b in found.values) / nodes
            kind = f"{name}, {'async' if is_async else 'sync'}"
            table.add(kind, without, with_, added, found.quiet, found.others)
            met = None if options.quick else added < LIMIT_MS
            why = f"others took {share(found.others)} of the CPU"
            report.targets.append(Target(f"ms a node: {kind}", f"< {LIMIT_MS}", added, met, why))
    report.notes.append(
        "opening and closing the session of a run is in these numbers: it is shared out over its "
        "nodes; the fan-out ends without a join, so its branches are swept"
    )
    return report


def _round(plain: Run, ours: Run, runs: int, number: int) -> tuple[float, float]:
    """Median ms of a run, (without, with) the decorator; neighbours in time."""
    pairs = [(plain(), ours()) for _ in range(runs)]
    return median(a for a, _ in pairs), median(b for _, b in pairs)


def chain(fs: ForkServe | None, nodes: int, is_async: bool) -> Run:
    """START -> n0 -> n1 -> ... -> END."""
    builder = StateGraph(State)
    for number in range(nodes):
        builder.add_node(f"n{number}", _node(fs, is_async))
        builder.add_edge(START if number == 0 else f"n{number - 1}", f"n{number}")
    builder.add_edge(f"n{nodes - 1}", END)
    return _runner(fs, builder, is_async)


def fan_out(fs: ForkServe | None, nodes: int, is_async: bool) -> Run:
    """A node, then all others at once by Send."""

    def fan(state: State) -> list[Send]:
        if fs is None:
            return [Send("leaf", {"i": i}) for i in range(nodes - 1)]
        return [fs.send("leaf", {"i": i}, parent=state["fork_tip"]) for i in range(nodes - 1)]

    builder = StateGraph(State)
    builder.add_node("root", _node(fs, is_async))
    builder.add_node("leaf", _node(fs, is_async))
    builder.add_edge(START, "root")
    builder.add_conditional_edges("root", fan, ["leaf"])
    builder.add_edge("leaf", END)
    return _runner(fs, builder, is_async)


def _node(fs: ForkServe | None, is_async: bool) -> Any:
    def idle(state: State) -> dict[str, Any]:
        return {}

    async def aidle(state: State) -> dict[str, Any]:
        return {}

    node: Any = aidle if is_async else idle
    return node if fs is None else fs.node(node)


def _runner(fs: ForkServe | None, builder: Any, is_async: bool) -> Run:
    graph = builder.compile() if fs is None else fs.bind(builder.compile())
    limit = {"recursion_limit": 1000}

    def once() -> float:
        begin = time.perf_counter()
        if is_async:
            asyncio.run(graph.ainvoke({"prompt": PROMPT}, limit))
        else:
            graph.invoke({"prompt": PROMPT}, limit)
        return (time.perf_counter() - begin) * 1e3

    return once
