"""Checkpoints: time travel, edited state, restarts, caches, strict msgpack, sizes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy

from forkserve.adapters.langgraph import Branch, ForkServe, cache_key
from forkserve.errors import AdapterError
from forkserve.types import NodeMode

from .graphs import PROMPT, Boom, State, fan_out, spine_only

THREAD: Any = {"configurable": {"thread_id": "t"}}
START_STATE: Any = {"prompt": PROMPT}


def before(graph: Any, node: str) -> Any:
    """The checkpoint at which a node was about to run."""
    return next(s for s in graph.get_state_history(THREAD) if node in s.next)


def prefilled(fs: ForkServe) -> int:
    return fs.engine.stats().prefilled_tokens.committed


def test_a_replay_forks_the_tree_and_prefills_residuals_only(fs: ForkServe) -> None:
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    first = graph.invoke(START_STATE, THREAD)
    was, forks = prefilled(fs), fs.engine.stats().forks
    second = graph.invoke(None, before(graph, "branch").config)
    assert fs.engine.stats().forks - forks == 3 + 1
    assert prefilled(fs) - was <= 3 * (len("branch 0. ") + 3)
    assert second["out"] == first["out"]  # greedy: the same again
    assert fs.stats["opened"] == 1
    assert fs.tokens(first["fork_tip"]) == fs.tokens(second["fork_tip"])
    assert first["fork_tip"]["node"] != second["fork_tip"]["node"]
    tree = fs.engine.tree(first["fork_tip"]["session"])
    assert tree.tip.id == second["fork_tip"]["node"]
    assert tree.get(first["fork_tip"]["node"]).mode is NodeMode.IDLE  # histories live side by side


def test_edited_state_forks_from_the_old_place(fs: ForkServe) -> None:
    @fs.node
    def say(state: State, fork: Branch):
        fork.append(f"{state['prompt'][-4:]}: ")
        return {"out": [fork.generate(4).text]}

    build = StateGraph(State)
    build.add_node("a", say)
    build.add_node("b", say)
    build.add_edge(START, "a")
    build.add_edge("a", "b")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    first = graph.invoke(START_STATE, THREAD)
    was = prefilled(fs)
    config = graph.update_state(before(graph, "b").config, {"prompt": "edited"}, as_node="a")
    second = graph.invoke(None, config)
    assert "ited: " in fs.text(second["fork_tip"])
    common = before(graph, "b").values["fork_tip"]["length"]
    assert fs.tokens(second["fork_tip"])[:common] == fs.tokens(first["fork_tip"])[:common]
    assert prefilled(fs) - was <= len("ited: ") + 4
    assert fs.stats["reopened"] == 0


def test_the_state_of_the_other_history_can_be_gone_on_with(fs: ForkServe) -> None:
    """Back and forth between two histories: each goes on where it was."""
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    graph.invoke(START_STATE, THREAD)
    end = graph.get_state(THREAD).config
    for _ in range(3):
        graph.invoke(None, before(graph, "branch").config)
        config = graph.update_state(end, {"out": ["edited"]}, as_node="pick")
        assert graph.get_state(config).values["fork_tip"]
        result = graph.invoke(None, before(graph, "pick").config)
        tip = result["fork_tip"]
        assert fs.engine.tree(tip["session"]).tip.id == tip["node"]
        fs.engine.check()


def test_travel_to_a_choice_that_was_made_keeps_the_winner(fs: ForkServe) -> None:
    graph = fs.bind(fan_out(fs, best=1).compile(checkpointer=InMemorySaver()))
    first = graph.invoke(START_STATE, THREAD)
    second = graph.invoke(None, before(graph, "pick").config)
    assert second["fork_tip"] == first["fork_tip"]  # the winner lives, on the main line
    assert fs.stats["reopened"] == 0
    spine_only(fs, second["fork_tip"])


@pytest.mark.parametrize("text", [None, "branch 2, as the state has it"])
def test_travel_to_a_choice_made_otherwise_reopens(fs: ForkServe, text: str | None) -> None:
    chosen = [0, 2]

    @fs.node
    def branch(state, fork: Branch):
        fork.append(f"branch {state['i']}")

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], chosen.pop(0), text=text)

    build = StateGraph(State)
    build.add_node("branch", branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("branch", {"i": i}) for i in range(3)], ["branch"]
    )
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    graph.invoke(START_STATE, THREAD)
    result = graph.invoke(None, before(graph, "pick").config)
    assert fs.text(result["fork_tip"]) == PROMPT + (text or "")
    assert fs.stats["reopened"] == 1
    assert fs.stats["undecided"] == 0


def test_a_restart_reopens_once_and_aborts_nobody_elses_node(make: Any, tmp_path: Path) -> None:
    """Ids begin at 1 again in the new process: only the engine's own ids may match."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    def fail(i: int, run: int) -> None:
        if i == 2:
            raise Boom

    old = make()
    path = tmp_path / "graph.db"
    with sqlite3.connect(path, check_same_thread=False) as conn:
        graph = old.bind(fan_out(old, fail).compile(checkpointer=SqliteSaver(conn)))
        with pytest.raises(Boom):
            graph.invoke(START_STATE, THREAD)
    conn.close()
    new = make()
    with sqlite3.connect(path, check_same_thread=False) as conn:
        graph = new.bind(fan_out(new, best=2).compile(checkpointer=SqliteSaver(conn)))
        result = graph.invoke(None, THREAD)
    conn.close()
    assert len(result["out"]) == 3
    assert new.stats["reopened"] == 1
    # the prompt as rendered, then what the branch that ran again had: its text is committed
    assert new.text(result["fork_tip"]).startswith(PROMPT + "branch 2. ")
    assert new.stats["undecided"] == 0
    tree = new.engine.tree(result["fork_tip"]["session"])
    assert set(tree.nodes.values()) == set(tree.spine())


def test_siblings_with_a_foreign_parent_reopen_it_once(make: Any) -> None:
    fs = make()
    saver = InMemorySaver()
    graph = fs.bind(fan_out(fs, k=4).compile(checkpointer=saver, interrupt_before=["branch"]))
    graph.invoke(START_STATE, THREAD)
    other = make()
    graph = other.bind(fan_out(other, k=4).compile(checkpointer=saver))
    result = graph.invoke(None, THREAD)
    assert (other.stats["opened"], other.stats["reopened"]) == (1, 1)
    assert other.text(result["fork_tip"]).startswith(PROMPT + "branch 0. ")


def test_a_send_is_rendered_over_the_state_of_the_graph(make: Any) -> None:
    seen: list[Any] = []

    def render(state: Any) -> str:
        seen.append(dict(state))
        return str(state["prompt"])

    saver = InMemorySaver()
    fs = make(render=render)
    graph = fs.bind(fan_out(fs).compile(checkpointer=saver, interrupt_before=["branch"]))
    graph.invoke(START_STATE, THREAD)
    fs = make(render=render)
    fs.bind(fan_out(fs).compile(checkpointer=saver)).invoke(None, THREAD)
    assert all(state["prompt"] == PROMPT for state in seen)
    assert any("i" in state for state in seen)  # the Send's own argument is there as well


def test_a_session_that_was_shut_reopens(make: Any) -> None:
    """Least used threads make room; their next run renders its state."""
    fs = make(keep=2)
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    for number in range(5):
        graph.invoke(START_STATE, {"configurable": {"thread_id": str(number)}})
        assert fs.stats["sessions"] <= 2
    result = graph.invoke(START_STATE, {"configurable": {"thread_id": "0"}})
    assert fs.stats["reopened"] == 1
    assert fs.text(result["fork_tip"]).startswith(PROMPT + "plan. ")


def test_a_cached_node_replays_its_ref_and_its_text_is_copied(fs: ForkServe) -> None:
    calls: list[int] = []
    policy = CachePolicy(key_func=cache_key)
    build = fan_out(fs, lambda i, run: calls.append(i), node={"cache_policy": policy}, best=1)
    graph = fs.bind(build.compile(checkpointer=InMemorySaver(), cache=InMemoryCache()))
    first = graph.invoke(START_STATE, THREAD)
    assert sorted(calls) == [0, 1, 2]
    other: Any = {"configurable": {"thread_id": "other"}}
    second = graph.invoke(START_STATE, other)
    assert sorted(calls) == [0, 1, 2]  # hits: no node was called
    assert second["out"] == first["out"]
    assert fs.stats["copied"] == 1
    assert fs.text(second["fork_tip"]) == fs.text(first["fork_tip"])
    assert second["fork_tip"]["session"] != first["fork_tip"]["session"]
    spine_only(fs, first["fork_tip"])  # the other thread's line was not touched
    spine_only(fs, second["fork_tip"])


def test_a_thread_whose_trunk_came_from_a_cache_is_told_the_next_input(make: Any) -> None:
    """The ref that was replayed is a place in another thread's session, and stays so."""
    from .test_turns import Talk, render, user

    fs = make(render=render)
    seen: list[str] = []

    @fs.node
    def chat(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        fork.append("answer")
        return {"messages": [("ai", "answer")]}

    def key(state: Any, **more: Any) -> str:
        return str([message.content for message in state["messages"]])

    build = StateGraph(Talk)
    build.add_node("chat", chat, cache_policy=CachePolicy(key_func=key))
    build.add_edge(START, "chat")
    saver = InMemorySaver()
    graph = fs.bind(build.compile(checkpointer=saver, cache=InMemoryCache()))
    other: Any = {"configurable": {"thread_id": "other"}}
    first = graph.invoke(user("FIRST"), THREAD)
    replayed = graph.invoke(user("FIRST"), other)
    assert replayed["fork_tip"] == first["fork_tip"]
    own = graph.invoke(user("OTHER"), other)
    assert seen[-1] == "human: FIRST\nai: answer\nhuman: OTHER\nai: "
    assert own["fork_tip"]["session"] != first["fork_tip"]["session"]
    spine_only(fs, first["fork_tip"])
    spine_only(fs, own["fork_tip"])
    graph.invoke(user("SECOND"), THREAD)
    assert seen[-1] == "human: FIRST\nai: answer\nhuman: SECOND\nai: "


def test_a_cached_ref_of_a_run_that_is_gone_reopens(fs: ForkServe) -> None:
    policy = CachePolicy(key_func=cache_key)
    build = fan_out(fs, node={"cache_policy": policy})
    graph = fs.bind(build.compile(cache=InMemoryCache()))
    first = graph.invoke(START_STATE)
    second = graph.invoke(START_STATE)
    assert second["out"] == first["out"]
    assert fs.stats["reopened"] == 1


def test_the_default_cache_key_never_hits_and_ours_does() -> None:
    from langgraph.types import CachePolicy as Policy

    default = Policy().key_func
    args = [{"i": 1, "fork_parent": {"node": n}, "fork_text": "x"} for n in (1, 2)]
    assert default(args[0]) != default(args[1])
    assert cache_key(args[0]) == cache_key(args[1]) == default({"i": 1})
    assert cache_key({"i": 2}) != cache_key({"i": 1})


@pytest.mark.filterwarnings("error")
def test_refs_are_small_plain_json_and_survive_strict_msgpack(
    fs: ForkServe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LANGGRAPH_STRICT_MSGPACK", "true")
    saver = InMemorySaver(serde=JsonPlusSerializer())
    graph = fs.bind(fan_out(fs).compile(checkpointer=saver, interrupt_before=["pick"]))
    graph.invoke(START_STATE, THREAD)
    values = graph.get_state(THREAD).values
    for ref in [values["fork_tip"], *values["fork_refs"]]:
        assert type(ref) is dict
        assert json.loads(json.dumps(ref)) == ref
        assert len(json.dumps(ref)) < 160
    result = graph.invoke(None, THREAD)
    assert fs.stats["reopened"] == 0
    assert "unregistered" not in caplog.text
    spine_only(fs, result["fork_tip"])


def test_exit_durability_writes_one_checkpoint(fs: ForkServe) -> None:
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD, durability="exit")
    assert len(list(graph.get_state_history(THREAD))) == 1
    spine_only(fs, result["fork_tip"])
    again = graph.invoke(START_STATE, THREAD, durability="exit")
    assert fs.stats["opened"] == 1
    assert fs.text(again["fork_tip"]).startswith(fs.text(result["fork_tip"]))


def test_a_dead_ref_cannot_be_read(fs: ForkServe) -> None:
    result = fs.bind(fan_out(fs).compile()).invoke(START_STATE)
    assert not fs.alive(result["fork_tip"])
    with pytest.raises(AdapterError, match="gone"):
        fs.tokens(result["fork_tip"])


def test_a_ref_of_another_engine_or_generation_is_not_ours(fs: ForkServe) -> None:
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    tip = graph.invoke(START_STATE, THREAD)["fork_tip"]
    assert fs.alive(tip)
    for change in ({"engine": "other"}, {"gen": tip["gen"] + 1}, {"node": 999}, {"session": "x"}):
        assert not fs.alive({**tip, **change})


def test_two_adapters_on_one_engine_know_each_others_engine(make: Any) -> None:
    fs = make()
    twin = ForkServe(fs.engine)
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    assert not twin.alive(result["fork_tip"])  # its session belongs to the other
    assert twin._registry.engine_id == fs._registry.engine_id


def test_a_ref_from_before_its_node_grew_is_taken_at_its_length(fs: ForkServe) -> None:
    graph = fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(START_STATE, THREAD)
    tip = result["fork_tip"]
    fs.engine.append(tip["session"], tip["node"], "somebody else's text")
    again = graph.invoke({**START_STATE, "fork_tip": tip}, THREAD)
    assert fs.stats["reopened"] == 1
    assert fs.tokens(again["fork_tip"])[: tip["length"]] == fs.tokens(tip)
    assert "somebody" not in fs.text(again["fork_tip"])
