"""Failures, retries, interrupts, cancels and dropped streams."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeError, NodeTimeoutError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from forkserve.adapters.langgraph import Branch, ForkServe
from forkserve.types import NodeMode
from tests.waiting import HANGS_S, until, wait_for

from .graphs import PROMPT, Boom, State, fan_out, spine_only

THREAD: Any = {"configurable": {"thread_id": "t"}}
START_STATE: Any = {"prompt": PROMPT}


def fail(index: int, times: int = 10**9, wait: float = 0.0) -> Any:
    def act(i: int, before: int) -> float:
        if i == index and before < times:
            raise Boom(f"branch {i}")
        return wait

    return act


def run(graph: Any, state: Any, config: Any = None, *, is_async: bool) -> Any:
    if is_async:
        return asyncio.run(graph.ainvoke(state, config))
    return graph.invoke(state, config)


either = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@either
def test_a_run_that_ends_well(fs: ForkServe, is_async: bool) -> None:
    graph = fs.bind(fan_out(fs, is_async=is_async).compile(checkpointer=InMemorySaver()))
    result = run(graph, START_STATE, THREAD, is_async=is_async)
    assert len(result["out"]) == 3
    assert "plan. " in fs.text(result["fork_tip"])
    spine_only(fs, result["fork_tip"])


@either
def test_a_failing_branch_is_aborted_and_its_siblings_are_swept(
    fs: ForkServe, is_async: bool
) -> None:
    graph = fs.bind(fan_out(fs, fail(0, wait=0.02), is_async=is_async).compile())
    with pytest.raises(Boom):
        run(graph, START_STATE, is_async=is_async)
    assert fs.stats["undecided"] == 0
    assert fs.stats["sessions"] == 0
    assert fs.engine.stats().nodes == 0


@either
def test_a_failed_run_of_a_thread_keeps_what_is_sealed(fs: ForkServe, is_async: bool) -> None:
    """Resuming runs the failed branch alone: the writes of its siblings are reused."""
    saved: list[str] = []

    class Saver(InMemorySaver):
        def put_writes(self, config: Any, writes: Any, *task: Any) -> None:
            super().put_writes(config, writes, *task)
            saved.extend(channel for channel, _ in writes if channel == "fork_refs")

    def act(i: int, before: int) -> None:
        if i == 2 and before == 0:
            if not is_async:
                wait_for(lambda: len(saved) >= 2, "the siblings' writes were not saved")
            raise Boom

    build = fan_out(fs, act, is_async=is_async, best=1)
    graph = fs.bind(build.compile(checkpointer=Saver()))
    with pytest.raises(Boom):
        run(graph, START_STATE, THREAD, is_async=is_async)
    kept = fs.stats["undecided"]
    if not is_async:  # there the siblings may have been cancelled
        assert fs.stats["kept"] >= 2
        # the trunk, and two sealed branches whose rows may go when nobody comes
        (live,) = fs._registry.sessions.values()
        sealed = [f for f in live.forks.values() if f.phase == "sealed"]
        tree = fs.engine.tree(live.session.id)
        assert [tree.get(f.node).mode for f in sealed] == [NodeMode.IDLE] * 2
        forks = fs.engine.stats().forks
    result = run(graph, None, THREAD, is_async=is_async)
    if not is_async:
        assert fs.engine.stats().forks - forks == 1 + 1  # the branch that failed, and the join
    assert len(result["out"]) == 3
    assert "branch 1. " in fs.text(result["fork_tip"])
    assert fs.stats["reopened"] == 0
    assert kept >= 1
    spine_only(fs, result["fork_tip"])


@either
def test_a_thread_that_goes_elsewhere_drops_what_was_kept(fs: ForkServe, is_async: bool) -> None:
    graph = fs.bind(
        fan_out(fs, fail(2, times=1), is_async=is_async).compile(checkpointer=InMemorySaver())
    )
    with pytest.raises(Boom):
        run(graph, START_STATE, THREAD, is_async=is_async)
    result = run(graph, START_STATE, THREAD, is_async=is_async)  # new input, not a resume
    assert fs.stats["undecided"] == 0
    tree = fs.engine.tree(result["fork_tip"]["session"])
    assert not [n for n in tree if n.mode is NodeMode.SPEC]


@either
def test_each_retry_has_one_fork_and_the_failed_ones_are_gone(
    fs: ForkServe, is_async: bool
) -> None:
    retry = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3, retry_on=Boom)
    attempts: list[int] = []
    build = fan_out(fs, fail(1, times=2), is_async=is_async, best=1, node={"retry_policy": retry})
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    before = fs.engine.stats().forks
    result = run(graph, START_STATE, THREAD, is_async=is_async)
    assert fs.engine.stats().forks - before == 1 + 3 + 2 + 1
    assert "branch 1. " in fs.text(result["fork_tip"])
    spine_only(fs, result["fork_tip"])
    assert not attempts


def test_a_retry_knows_its_number(fs: ForkServe) -> None:
    seen: list[int] = []

    @fs.node
    def plan(state: State, fork: Branch):
        seen.append(fork.attempt_number)
        fork.append("x")
        if len(seen) < 3:
            raise Boom

    build = StateGraph(State)
    build.add_node(
        "plan", plan, retry_policy=RetryPolicy(initial_interval=0.001, jitter=False, retry_on=Boom)
    )
    build.add_edge(START, "plan")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert seen == [1, 2, 3]
    assert fs.text(result["fork_tip"]) == PROMPT + "x"
    spine_only(fs, result["fork_tip"])


@pytest.mark.parametrize("retried", [True, False], ids=["retried", "resumed"])
def test_an_edge_function_that_fails_runs_a_committed_node_again(
    fs: ForkServe, retried: bool
) -> None:
    """It runs inside the task of its node, whose branch is committed by then."""
    failures = [Boom("edge")]

    @fs.node
    def plan(state: State, fork: Branch):
        fork.append("planned")

    def edge(state: State):
        if failures:
            raise failures.pop()
        return "__end__"

    build = StateGraph(State)
    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=Boom) if retried else None
    build.add_node("plan", plan, retry_policy=policy)
    build.add_edge(START, "plan")
    build.add_conditional_edges("plan", edge, ["__end__"])
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    if not retried:
        with pytest.raises(Boom):
            graph.invoke(START_STATE, THREAD)
    result = graph.invoke(START_STATE if retried else None, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "planned"
    if not retried:  # LangGraph had saved the node's own writes: it was not called again
        graph.invoke(START_STATE, THREAD)
    tree = fs.engine.tree(result["fork_tip"]["session"])
    aside = set(tree.nodes.values()) - set(tree.spine())
    assert {node.mode for node in aside} == (set() if retried else {NodeMode.IDLE})  # turn 1
    assert fs.stats["undecided"] == 0


@either
def test_an_interrupt_keeps_all_and_resume_forks_anew(fs: ForkServe, is_async: bool) -> None:
    def act(i: int, before: int) -> None:
        if i == 1:
            interrupt("which one?")

    build = fan_out(fs, act, is_async=is_async, best=1)
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    run(graph, START_STATE, THREAD, is_async=is_async)
    phases = sorted(f.phase for f in fs._registry.tasks.values())
    assert phases == ["held", "sealed", "sealed"]
    assert fs.stats["aborted"] == 0
    held = next(f for f in fs._registry.tasks.values() if f.phase == "held")
    session = held.live.session
    result = run(graph, Command(resume="this"), THREAD, is_async=is_async)
    assert held.node not in fs.engine.tree(session.id).nodes  # re-run from line one: forked anew
    assert "branch 1. " in fs.text(result["fork_tip"])
    assert fs.stats["reopened"] == 0
    spine_only(fs, result["fork_tip"])


def test_a_static_interrupt_keeps_the_trunk(fs: ForkServe) -> None:
    graph = fs.bind(
        fan_out(fs).compile(checkpointer=InMemorySaver(), interrupt_before=["branch", "pick"])
    )
    graph.invoke(START_STATE, THREAD)
    graph.invoke(None, THREAD)
    assert sorted(f.phase for f in fs._registry.tasks.values()) == ["sealed"] * 3
    result = graph.invoke(None, THREAD)
    assert fs.stats["opened"] == 1
    spine_only(fs, result["fork_tip"])


def test_an_interrupt_in_a_join_leaves_the_choice_open(fs: ForkServe) -> None:
    @fs.node
    def branch(state, fork: Branch):
        fork.append(f"branch {state['i']}")

    @fs.node(role="join")
    def pick(state: State, fork: Branch):
        fork.append("scratch")
        return fs.commit_winner(state["fork_refs"], interrupt("which?"))

    build = StateGraph(State)
    build.add_node("branch", branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("branch", {"i": i}) for i in range(3)], ["branch"]
    )
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    graph.invoke(START_STATE, THREAD)
    assert len(fs._registry.tasks) == 3
    result = graph.invoke(Command(resume=2), THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "branch 2"
    spine_only(fs, result["fork_tip"])


@either
@pytest.mark.parametrize("saver", [False, True], ids=["no-saver", "saver"])
def test_an_error_handler_forks_from_the_same_parent(
    fs: ForkServe, is_async: bool, saver: bool
) -> None:
    parents: list[int] = []

    @fs.node
    def rescue(state, error: NodeError, fork: Branch):
        parents.append(fork.base["node"])
        assert fork.role == "branch"
        fork.append("rescued")
        return {"out": [f"rescued {type(error.error).__name__}"]}

    build = fan_out(fs, fail(0), is_async=is_async, node={"error_handler": rescue}, best=-1)
    graph = fs.bind(build.compile(checkpointer=InMemorySaver() if saver else None))
    result = run(graph, START_STATE, THREAD if saver else None, is_async=is_async)
    assert sorted(o.split(":")[0] for o in result["out"]) == ["1", "2", "rescued Boom"]
    assert len(result["fork_refs"]) == 0
    if saver:
        assert parents == [fs.engine.tree(result["fork_tip"]["session"]).root.id + 1]
        spine_only(fs, result["fork_tip"])


def test_the_handler_of_a_trunk_node_goes_on_with_the_trunk(fs: ForkServe) -> None:
    @fs.node
    def rescue(state: State, error: NodeError, fork: Branch):
        assert fork.role == "trunk"
        fork.append("rescued")

    @fs.node
    def plan(state: State, fork: Branch):
        fork.append("lost")
        raise Boom

    build = StateGraph(State)
    build.add_node("plan", plan, error_handler=rescue)
    build.add_edge(START, "plan")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "rescued"
    spine_only(fs, result["fork_tip"])


@pytest.mark.parametrize("saver", [False, True], ids=["no-saver", "saver"])
def test_a_dropped_stream_leaves_nothing(fs: ForkServe, saver: bool) -> None:
    graph = fs.bind(
        fan_out(fs, lambda i, before: 0.01 * i).compile(
            checkpointer=InMemorySaver() if saver else None
        )
    )
    stream = graph.stream(START_STATE, THREAD if saver else None, stream_mode="updates")
    for chunk in stream:
        if "branch" in chunk:
            break
    stream.close()
    assert fs.stats["running"] == 0
    if saver:  # may be resumed: what is sealed stays, what ran does not
        assert {f.phase for f in fs._registry.tasks.values()} <= {"sealed", "done"}
    else:
        assert fs.engine.stats().nodes == 0


def test_a_dropped_async_stream_leaves_nothing(fs: ForkServe) -> None:
    async def go() -> None:
        graph = fs.bind(fan_out(fs, lambda i, b: 0.05 * (i + 1), is_async=True).compile())
        stream = graph.astream(START_STATE, stream_mode="updates")
        async for chunk in stream:
            if "branch" in chunk:
                break
        await stream.aclose()
        await asyncio.sleep(0.05)

    asyncio.run(go())
    assert fs.engine.stats().nodes == 0
    assert fs.stats["undecided"] == 0


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_a_cancelled_run_leaves_nothing(fs: ForkServe, after_s: float) -> None:
    async def go() -> None:
        graph = fs.bind(fan_out(fs, lambda i, before: 60.0, is_async=True, tokens=40).compile())
        task = asyncio.create_task(graph.ainvoke(START_STATE))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)

    asyncio.run(go())
    assert fs.stats["undecided"] == 0
    assert fs.engine.stats().nodes == 0


@pytest.mark.parametrize("thread", [None, THREAD], ids=["no-thread", "thread"])
def test_a_node_that_comes_after_its_run_was_cancelled_opens_nothing(
    make: Any, thread: Any
) -> None:
    """It runs in a thread, which goes on."""
    inside, go = threading.Event(), threading.Event()

    def render(state: Any) -> str:
        inside.set()
        assert go.wait(HANGS_S)
        return PROMPT

    fs = make(render=render)

    async def main() -> None:
        graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver() if thread else None))
        task = asyncio.create_task(graph.ainvoke(START_STATE, thread))
        await until(inside.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()  # the loop waits for its threads at the end

    asyncio.run(main())
    assert fs.engine.sessions() == []
    assert fs.stats["opened"] == 0


def test_a_node_that_times_out_is_aborted(fs: ForkServe) -> None:
    build = fan_out(
        fs, lambda i, before: 5.0 if i == 0 else 0.0, is_async=True, node={"timeout": 0.1}
    )
    graph = fs.bind(build.compile())
    with pytest.raises(NodeTimeoutError):
        asyncio.run(graph.ainvoke(START_STATE))
    assert fs.engine.stats().nodes == 0


@either
def test_a_handled_error_with_siblings_is_not_raised_again(fs: ForkServe, is_async: bool) -> None:
    """LangGraph #8277 and #8608, not reproduced; this would notice."""

    @fs.node
    def rescue(state, error: NodeError, fork: Branch):
        return {"out": ["rescued"]}

    for _ in range(10):
        build = fan_out(fs, fail(0), is_async=is_async, node={"error_handler": rescue}, k=4)
        result = run(fs.bind(build.compile()), START_STATE, is_async=is_async)
        assert result["out"].count("rescued") == 1
        assert len(result["out"]) == 4
