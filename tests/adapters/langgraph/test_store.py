"""An engine with a store: threads outlive the process with what their nodes generated."""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langgraph import Branch, ForkServe, ForkState
from forkserve.engine import MockBackend

from .graphs import PROMPT, START_STATE, THREAD, Boom, fan_out, one
from .test_turns import Talk, render, user


class Process:
    """An adapter in a process of its own, as the store sees it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine = Engine(MockBackend(ForkServeConfig(page_size=4)), store=folder / "store")
        self.fs = ForkServe(self.engine, **options)

    def __enter__(self) -> ForkServe:
        return self.fs

    def __exit__(self, *_: object) -> None:
        self.engine.check()
        self.engine.shutdown()


class Steps(ForkState, total=False):
    prompt: str
    out: Annotated[list[str], operator.add]


def steps(fs: ForkServe, saver: Any, fail: bool) -> Any:
    """a -> b; b fails, or says what it sees.  What a generates is in the tree only."""

    @fs.node
    def a(state: Steps, fork: Branch):
        fork.append("a: ")
        fork.generate(8)

    @fs.node
    def b(state: Steps, fork: Branch):
        if fail:
            raise Boom
        return {"out": [fork.full_text]}

    build = StateGraph(Steps)
    build.add_node("a", a)
    build.add_node("b", b)
    build.add_edge(START, "a")
    build.add_edge("a", "b")
    return fs.bind(build.compile(checkpointer=saver))


def test_what_was_generated_is_there_after_a_restart(tmp_path: Path) -> None:
    saver = InMemorySaver()
    with Process(tmp_path) as fs:
        graph = steps(fs, saver, fail=True)
        with pytest.raises(Boom):
            graph.invoke(START_STATE, THREAD)
        text = fs.text(graph.get_state(THREAD).values["fork_tip"])
    assert len(text) > len(PROMPT + "a: ")
    with Process(tmp_path) as fs:
        result = steps(fs, saver, fail=False).invoke(None, THREAD)
        assert result["out"] == [text]
        assert (fs.stats["resumed"], fs.stats["opened"], fs.stats["reopened"]) == (1, 0, 0)


def test_sealed_branches_come_back_too(tmp_path: Path) -> None:
    saver = InMemorySaver()
    with Process(tmp_path) as fs:
        graph = fs.bind(fan_out(fs).compile(checkpointer=saver, interrupt_before=["pick"]))
        graph.invoke(START_STATE, THREAD)
        refs = graph.get_state(THREAD).values["fork_refs"]
        texts = [fs.text(ref) for ref in refs]
    with Process(tmp_path) as fs:
        graph = fs.bind(fan_out(fs, best=1).compile(checkpointer=saver))
        result = graph.invoke(None, THREAD)
        assert fs.text(result["fork_tip"]) == texts[1]
        assert not fs.alive(refs[0])  # the losers went
        assert fs.stats["reopened"] == 0


def test_without_the_store_a_warning_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = InMemorySaver()
    with Process(tmp_path) as fs, pytest.raises(Boom):
        steps(fs, saver, fail=True).invoke(START_STATE, THREAD)
    with caplog.at_level(logging.WARNING), Process(tmp_path / "other") as fs:
        result = steps(fs, saver, fail=False).invoke(None, THREAD)
        assert result["out"] == [PROMPT]
        assert fs.stats["reopened"] == 1
    (record,) = [r for r in caplog.records if r.name.startswith("forkserve.adapters")]
    assert "thread 't'" in record.getMessage()
    assert "is lost" in record.getMessage()


def test_a_thread_is_told_something_after_a_restart(tmp_path: Path) -> None:
    saver = InMemorySaver()
    seen: list[str] = []

    def talk(fs: ForkServe, fail: bool = False) -> Any:
        @fs.node
        def chat(state: Talk, fork: Branch):
            seen.append(fork.full_text)
            if fail:
                raise Boom
            return {"messages": [("ai", "answer")]}

        build = StateGraph(Talk)
        build.add_node("chat", chat)
        build.add_edge(START, "chat")
        return fs.bind(build.compile(checkpointer=saver))

    with Process(tmp_path, render=render) as fs:
        talk(fs).invoke(user("FIRST"), THREAD)
    with Process(tmp_path, render=render) as fs, pytest.raises(Boom):
        talk(fs, fail=True).invoke(user("SECOND"), THREAD)
    with Process(tmp_path, render=render) as fs:  # a turn whose process ended is not lost
        talk(fs).invoke(None, THREAD)
        assert fs.stats["reopened"] == 0
    assert seen[1] == seen[2] == "human: FIRST\nai: answer\nhuman: SECOND\nai: "


def test_a_number_that_was_not_stored_means_nothing(tmp_path: Path) -> None:
    """Nodes are numbered on from what the store has, so an unsaved one's number comes again."""
    saver = InMemorySaver()
    with Process(tmp_path) as fs, pytest.raises(Boom):
        steps(fs, saver, fail=True).invoke(START_STATE, THREAD)
    with Process(tmp_path) as fs:
        graph = steps(fs, saver, fail=False)
        tip = graph.get_state(THREAD).values["fork_tip"]
        assert not fs.alive(tip)  # nothing is resumed by looking
        graph.invoke(None, THREAD)
        assert fs.alive(tip)
        assert not fs.alive({**tip, "length": tip["length"] + 1})
        new = fs.engine.fork(tip["session"], tip["node"], "new", "as long as it gets, or longer")
        assert not fs.alive({**tip, "node": new})


def test_a_session_that_made_room_comes_back(tmp_path: Path) -> None:
    with Process(tmp_path, keep=1) as fs:

        @fs.node
        def say(state: Any, fork: Branch):
            fork.append("said. ")

        from .graphs import State

        graph = one(fs, say, State)
        tip = graph.invoke(START_STATE, THREAD)["fork_tip"]
        graph.invoke(START_STATE, {"configurable": {"thread_id": "other"}})
        assert not fs.alive(tip)
        result = graph.invoke({**START_STATE, "fork_tip": tip}, THREAD)
        assert fs.text(result["fork_tip"]) == PROMPT + "said. said. "
        assert fs.stats["resumed"] == 1


def test_time_travel_after_a_restart_goes_where_the_checkpoint_says(tmp_path: Path) -> None:
    """Though a later turn is in the tree, too."""
    saver = InMemorySaver()
    with Process(tmp_path) as fs:
        graph = steps(fs, saver, fail=False)
        first = graph.invoke(START_STATE, THREAD)["out"]
        graph.invoke({"prompt": PROMPT + "more "}, THREAD)
        old = [s for s in graph.get_state_history(THREAD) if s.next == ("b",)][-1]
    with Process(tmp_path) as fs:
        assert steps(fs, saver, fail=False).invoke(None, old.config)["out"] == first
        assert fs.stats["turns"] == 0
