"""A thread whose process died: what waited, what had begun, what is left in the store."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph

from forkserve.adapters.langgraph import Branch, ForkServe

from .graphs import START_STATE, THREAD, Boom, fan_out
from .test_store import Process, steps
from .test_turns import Talk, render, user


def talk(
    fs: ForkServe, saver: Any, seen: list[str], *, coroutine: bool = False, **more: Any
) -> Any:
    """One node that answers, and notes what it sees."""

    @fs.node
    def chat(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        fork.append("answer")
        return {"messages": [("ai", "answer")]}

    @fs.node
    async def achat(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        fork.append("answer")
        return {"messages": [("ai", "answer")]}

    build = StateGraph(Talk)
    build.add_node("chat", achat if coroutine else chat)
    build.add_edge(START, "chat")
    return fs.bind(build.compile(checkpointer=saver, **more))


FIRST = "human: FIRST\nai: "
SECOND = FIRST + "answer\nhuman: SECOND\nai: "


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("edited", [False, True])
def test_an_input_that_was_held_is_not_lost(tmp_path: Path, edited: bool, durability: Any) -> None:
    """No node of its turn had run, so the tree says nothing of it: the checkpoint does."""
    saver, seen = InMemorySaver(), list[str]()
    stop: Any = {"interrupt_before": ["chat"]}
    with Process(tmp_path, render=render) as fs:
        graph = talk(fs, saver, seen, **stop)
        graph.invoke(user("FIRST"), THREAD, durability=durability)
        graph.invoke(None, THREAD, durability=durability)
        graph.invoke(user("SECOND"), THREAD, durability=durability)
    told = SECOND
    with Process(tmp_path, render=render) as fs:
        graph = talk(fs, saver, seen, **stop)
        config = THREAD
        if edited:
            config = graph.update_state(THREAD, user("and THIS"))
            told = SECOND.removesuffix("ai: ") + "human: and THIS\nai: "
        graph.invoke(None, config, durability=durability)
        assert seen == [FIRST, told]
        assert (fs.stats["reopened"], fs.stats["resumed"]) == (0, 1)


def test_a_sync_saver_on_disk_is_asked_as_well(tmp_path: Path) -> None:
    seen: list[str] = []
    for told in (user("FIRST"), None, user("SECOND"), None):
        with (
            SqliteSaver.from_conn_string(str(tmp_path / "g.db")) as saver,
            Process(tmp_path, render=render) as fs,
        ):
            talk(fs, saver, seen, interrupt_before=["chat"]).invoke(told, THREAD)
    assert seen == [FIRST, SECOND]


@pytest.mark.parametrize("coroutine", [False, True])
def test_the_event_loop_waits_for_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coroutine: bool
) -> None:
    """Neither for the saver nor for the store: a node has both read in a thread."""
    seen: list[str] = []
    where: list[tuple[str, threading.Thread]] = []

    async def run(fs: ForkServe, told: Any) -> None:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "g.db")) as saver:
            for name, owner in (("get_tuple", saver), ("resume", fs.engine), ("open", fs.engine)):
                ask = getattr(owner, name)

                def asked(*args: Any, ask: Any = ask, name: str = name, **more: Any) -> Any:
                    where.append((name, threading.current_thread()))
                    return ask(*args, **more)

                monkeypatch.setattr(owner, name, asked)
            graph = talk(fs, saver, seen, coroutine=coroutine, interrupt_before=["chat"])
            await graph.ainvoke(told, THREAD)

    for told in (user("FIRST"), None, user("SECOND"), None):
        with Process(tmp_path, render=render) as fs:
            asyncio.run(run(fs, told))
    assert seen == [FIRST, SECOND]
    assert [name for name, _ in where] == ["get_tuple", "open", "get_tuple", "resume"]
    assert threading.current_thread() not in [thread for _, thread in where]


def test_a_node_that_is_cancelled_while_it_waits_for_its_branch_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = InMemorySaver()
    began, goes_on = threading.Event(), threading.Event()

    async def run(fs: ForkServe) -> None:
        graph = talk(fs, saver, [], coroutine=True)
        opened = fs.engine.open

        def slowly(*args: Any, **more: Any) -> Any:
            handle = opened(*args, **more)
            began.set()
            goes_on.wait()
            return handle

        monkeypatch.setattr(fs.engine, "open", slowly)
        task = asyncio.create_task(graph.ainvoke(user("FIRST"), THREAD))
        await asyncio.to_thread(began.wait)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert fs.stats["undecided"] == fs.stats["running"] == 0
        await graph.ainvoke(user("SECOND"), THREAD)
        for live in fs._registry.sessions.values():
            tree = fs.engine.tree(live.session.id)
            assert set(tree.nodes.values()) == set(tree.spine())

    with Process(tmp_path, render=render) as fs:
        asyncio.run(run(fs))


def test_branches_of_a_turn_go_on_from_where_it_began(tmp_path: Path) -> None:
    """Sealed ones are promoted, as in the process that made them, and not copied."""
    saver = InMemorySaver()

    def act(i: int, run: int) -> None:
        if i == 2 and fails[0]:
            raise Boom

    fails = [False]

    def graph(fs: ForkServe) -> Any:
        build = fan_out(fs, act, best=1)
        return fs.bind(build.compile(checkpointer=saver))

    told = {"prompt": "Another prompt, that shares only its first letter with the other. "}
    with Process(tmp_path) as fs:
        graph(fs).invoke(START_STATE, THREAD)
        fails[0] = True
        with pytest.raises(Boom):
            graph(fs).invoke(told, THREAD)
        fails[0] = False
    with Process(tmp_path) as fs:
        result = graph(fs).invoke(None, THREAD)
        text = fs.text(result["fork_tip"])
        assert text.startswith(told["prompt"] + "plan. ")
        assert "branch 1. " in text
        assert (fs.stats["copied"], fs.stats["reopened"], fs.stats["turns"]) == (0, 0, 0)


def test_where_a_turn_began_is_found_again(tmp_path: Path) -> None:
    """The process died in the first node, so nothing stands above that place yet."""
    saver, seen = InMemorySaver(), list[str]()
    fails = [False]

    def graph(fs: ForkServe) -> Any:
        @fs.node
        def chat(state: Talk, fork: Branch):
            seen.append(fork.full_text)
            if fails[0]:
                raise Boom
            fork.append("answer")
            return {"messages": [("ai", "answer")]}

        build = StateGraph(Talk)
        build.add_node("chat", chat)
        build.add_edge(START, "chat")
        return fs.bind(build.compile(checkpointer=saver))

    with Process(tmp_path, render=render) as fs:
        graph(fs).invoke(user("FIRST"), THREAD)
        fails[0] = True
        with pytest.raises(Boom):
            graph(fs).invoke(user("SECOND"), THREAD)
        fails[0] = False
    with Process(tmp_path, render=render) as fs:
        result = graph(fs).invoke(None, THREAD)
        tree = fs.engine.tree(result["fork_tip"]["session"])
        assert set(tree.nodes.values()) == set(tree.spine())
    assert seen == [FIRST, SECOND, SECOND]


# ---------------------------------------------------------------- what is left in the store


def closed(fs: ForkServe) -> list[bool]:
    rows = fs.engine.store.catalog.read("SELECT closed_at FROM session ORDER BY id")
    return [row[0] is not None for row in rows]


def test_a_thread_is_forgotten_in_the_store_too(tmp_path: Path) -> None:
    """Its process has ended, and the next one never opened it."""
    saver = InMemorySaver()
    other: Any = {"configurable": {"thread_id": "other"}}
    with Process(tmp_path) as fs:
        for thread in (THREAD, other):
            steps(fs, saver, fail=False).invoke(START_STATE, thread)
        assert closed(fs) == [False, False]
    with Process(tmp_path) as fs:
        steps(fs, saver, fail=False).invoke({"prompt": "anew"}, other)
        assert fs.forget("t") == 1
        assert sum(closed(fs)) == 1
        assert fs.forget("t") == 0
        assert fs.forget("other") == 2  # open here: what was resumed, and what "anew" began
        assert all(closed(fs))


def test_a_run_that_nobody_can_resume_leaves_no_open_session(tmp_path: Path) -> None:
    """Its process was killed; a run of the present process is not touched."""
    with Process(tmp_path) as fs:
        engine = fs.engine
        graph = steps(fs, None, fail=False)
        close = engine.close

        def killed(session: str) -> None:
            raise KeyboardInterrupt

        engine.close = killed  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt):
            graph.invoke(START_STATE)
        engine.close = close  # type: ignore[method-assign]
        assert closed(fs) == [False]
        ForkServe(engine)
        assert closed(fs) == [False]
    with Process(tmp_path) as fs:
        assert closed(fs) == [True]


def test_a_run_that_begins_while_others_are_closed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter of the engine, in another thread, is as quick as that."""
    with Process(tmp_path) as fs:
        catalog, engine = fs.engine.store.catalog, fs.engine
        read = catalog.read

        def late(*query: Any) -> Any:
            monkeypatch.undo()
            engine.open([1, 2, 3], session="langgraph-run-x")
            return read(*query)

        monkeypatch.setattr(catalog, "read", late)
        ForkServe(engine)
        assert engine.sessions() == ["langgraph-run-x"]
        assert closed(fs) == [False]
