"""Many runs at once, with every kind of bad luck; and that nothing grows."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from forkserve.adapters.langgraph import Branch, ForkServe
from tests.instructions import own_calls
from tests.waiting import HANGS_S

from .graphs import PROMPT, THREAD, Boom, State, fan_out
from .test_turns import Talk, render, user

START_STATE: Any = {"prompt": PROMPT}
RETRY = {
    "retry_policy": RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)
}


def trouble(dice: random.Random, interrupts: bool) -> Any:
    lock = threading.Lock()

    def act(i: int, before: int) -> float:
        with lock:
            luck = dice.random()
        if luck < 0.08:
            raise Boom
        if luck < 0.2:
            raise ConnectionError("retried")
        if interrupts and luck < 0.3:
            interrupt("wait")
        return 0.002 * luck

    return act


def clean(fs: ForkServe) -> None:
    """No run is left, and every session holds committed lines and nothing else."""
    fs.engine.check()
    assert fs.stats["running"] == 0
    assert fs.stats["undecided"] == 0
    for live in fs._registry.sessions.values():
        tree = fs.engine.tree(live.session.id)
        assert set(tree.nodes.values()) == set(tree.spine())
        assert not live.hints


@pytest.mark.slow
def test_two_hundred_runs_in_threads(fs: ForkServe) -> None:
    dice = random.Random(7)
    act = trouble(dice, interrupts=False)

    def one(number: int) -> None:
        with suppress(Boom, ConnectionError):
            fs.bind(fan_out(fs, act, node=RETRY).compile()).invoke(START_STATE)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    clean(fs)
    assert fs.stats["sessions"] == 0
    assert fs.engine.stats().nodes == 0


@pytest.mark.slow
def test_two_hundred_threads_of_a_saver_that_are_resumed(fs: ForkServe) -> None:
    """Interrupted and failed runs are taken up again until they end well."""
    dice = random.Random(11)
    act = trouble(dice, interrupts=True)
    graph = fs.bind(fan_out(fs, act, node=RETRY).compile(checkpointer=InMemorySaver()))

    def one(number: int) -> None:
        config: Any = {"configurable": {"thread_id": str(number)}}
        state: Any = START_STATE
        for _ in range(60):
            with suppress(Boom, ConnectionError):
                result = graph.invoke(state, config)
                if "__interrupt__" not in result:
                    return
            tasks = graph.get_state(config).tasks
            waiting = {i.id: "go" for task in tasks for i in task.interrupts}
            state = Command(resume=waiting) if waiting else None
        raise AssertionError(f"run {number} never ended well")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    clean(fs)
    assert fs.stats["sessions"] <= 64


@pytest.mark.slow
def test_two_hundred_async_runs_with_cancels(fs: ForkServe) -> None:
    dice = random.Random(13)
    act = trouble(dice, interrupts=False)

    async def one(number: int) -> None:
        graph = fs.bind(fan_out(fs, act, is_async=True, node=RETRY).compile())
        task = asyncio.create_task(graph.ainvoke(START_STATE))
        if number % 3 == 0:
            await asyncio.sleep(dice.random() * 0.03)
            task.cancel()
        with suppress(Boom, ConnectionError, asyncio.CancelledError):
            await task

    async def go() -> None:
        for _ in range(10):
            await asyncio.gather(*(one(number) for number in range(20)))
        await asyncio.sleep(0.1)

    asyncio.run(go())
    clean(fs)
    assert fs.engine.stats().nodes == 0


@pytest.mark.slow
@pytest.mark.parametrize("background", [False], indirect=True)
@pytest.mark.parametrize("thread", [False, True], ids=["no-thread", "thread"])
def test_hundreds_of_runs_grow_nothing(fs: ForkServe, thread: bool) -> None:
    @fs.node
    def branch(state, fork: Branch):
        fork.append("x")
        return {}

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], 0)

    build = StateGraph(State)
    build.add_node("branch", branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("branch", {"i": i}) for i in range(2)], ["branch"]
    )
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile())
    registry, sweeper = fs._registry, fs._sweeper

    def sizes() -> tuple[int, ...]:
        return (
            len(registry.sessions),
            len(registry.tasks),
            len(sweeper.runs),
            len(sweeper._members),
            sum(len(live.forks) + len(live.hints) for live in registry.sessions.values()),
            fs.engine.stats().nodes,
            fs.engine.stats().live_pages,
        )

    def config(number: int) -> Any:
        return {"configurable": {"thread_id": str(number)}} if thread else None

    for number in range(100):
        graph.invoke(START_STATE, config(number))
    before = sizes()
    for number in range(100, 400):  # what stays of one in six runs would be seen below
        graph.invoke(START_STATE, config(number))
    assert sizes() == before
    gc.collect()
    assert sum(type(o).__name__ in ("Run", "Fork") for o in gc.get_objects()) < 50


@pytest.mark.parametrize("background", [False], indirect=True)
def test_the_decorator_costs_little(fs: ForkServe) -> None:
    """A node that does nothing is a fork and its end; what that takes does not grow with the graph.

    `python -m benchmarks decorator` measures the time.
    """

    def graph(nodes: int) -> Any:
        made = StateGraph(State)
        for number in range(nodes):

            def node(state: State):
                return {}

            made.add_node(f"n{number}", fs.node(node))
            made.add_edge(START if not number else f"n{number - 1}", f"n{number}")
        return fs.bind(made.compile())

    calls = []
    for nodes in (20, 40):
        chain = graph(nodes)
        chain.invoke(START_STATE)
        before = fs.engine.stats()
        calls.append(own_calls(partial(chain.invoke, START_STATE)))
        after = fs.engine.stats()
        assert after.forks - before.forks == after.aborts - before.aborts == nodes
        for name in ("copied_rows", "forward_passes", "commits", "nodes", "sessions"):
            assert getattr(after, name) == getattr(before, name), name
        assert calls[-1]["ByteTokenizer.encode"] <= 1  # the prompt, once a run
    few, many = (sum(found.values()) for found in calls)
    assert (many - few) / 20 < 120  # 94 when this was written


def test_what_a_node_leaves_from_is_not_closed_to_make_room(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run has found the session, and another thread needs room before it has its branch."""
    fs = make(render=render, keep=1)
    seen: list[str] = []

    @fs.node
    def first(state: Talk, fork: Branch):
        fork.append("[first]")

    @fs.node
    def second(state: Talk, fork: Branch):
        seen.append(fork.full_text)

    build = StateGraph(Talk)
    build.add_node("first", first)
    build.add_node("second", second)
    build.add_edge(START, "first")
    build.add_edge("first", "second")
    stops = ["second"]
    graph = fs.bind(build.compile(checkpointer=InMemorySaver(), interrupt_before=stops))
    graph.invoke(user("ONE"), THREAD)
    other: Any = {"configurable": {"thread_id": "other"}}
    tree, others = fs.engine.tree, list[threading.Thread]()

    def meanwhile(session: str) -> Any:
        if not others and not fs._registry.lock._is_owned():
            others.append(threading.Thread(target=graph.invoke, args=(user("TWO"), other)))
            others[0].start()
            others[0].join(HANGS_S)
        return tree(session)

    monkeypatch.setattr(fs.engine, "tree", meanwhile)
    graph.invoke(None, THREAD)
    assert len(others) == 1
    assert seen == ["human: ONE\nai: [first]"]
    assert (fs.stats["opened"], fs.stats["reopened"]) == (2, 0)
