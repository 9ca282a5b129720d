"""Fork, seal, join: one trunk prefill, k forks, the winner's text, nothing left over."""

from __future__ import annotations

import codecs
import operator
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from forkserve.adapters.langchain.current import current_branch
from forkserve.adapters.langgraph import Branch, ForkServe, ForkState
from forkserve.errors import AdapterError
from forkserve.types import NodeMode
from tests.waiting import wait_for

from .graphs import START_STATE, THREAD, fan_out

PROMPT = "You plan a trip to the sea. " * 4


class State(ForkState, total=False):
    prompt: str
    topics: list[str]
    out: Annotated[list[str], operator.add]
    best: int


def builder(
    fs: ForkServe, *, join: str = "winner", seen: list[Branch] | None = None, best: Any = None
) -> Any:
    @fs.node
    def plan(state: State, fork: Branch):
        fork.append("plan: ")
        return {"out": [fork.generate(6).text]}

    def fan(state: State):
        tip = state["fork_tip"]
        return [fs.send("research", {"topic": t}, parent=tip) for t in state["topics"]]

    @fs.node
    def research(state, fork: Branch):
        assert current_branch() is fork
        if seen is not None:
            seen.append(fork)
        fork.append(f"[{state['topic']}] ")
        return {"out": [fork.generate(5).text]}

    @fs.node(role="join")
    def pick(state: State, fork: Branch):
        refs = state["fork_refs"]
        if join == "winner":
            chosen = best if best is not None else state.get("best", 0)
            return {**fs.commit_winner(refs, chosen), "out": ["won"]}
        if join == "all":
            return fs.join(refs)
        if join == "scaffold":
            return fs.join(refs, "all: ")
        return fs.join_text(refs, "summary of all")

    build = StateGraph(State)
    build.add_node("plan", plan)
    build.add_node("research", research)
    build.add_node("pick", pick)
    build.add_edge(START, "plan")
    build.add_conditional_edges("plan", fan, ["research"])
    build.add_edge("research", "pick")
    build.add_edge("pick", END)
    return build


def cold(fs: ForkServe, prompt: list[int], count: int) -> list[int]:
    """What an engine without forks says after a prompt."""
    handle = fs.engine.open(prompt)
    said = fs.engine.generate(handle.id, count)
    fs.engine.close(handle.id)
    return said


def inputs(k: int = 3, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "topics": [f"topic {i}" for i in range(k)], **more}


@pytest.mark.parametrize("k", [1, 3, 8])
def test_one_trunk_prefill_and_k_forks(fs: ForkServe, k: int) -> None:
    graph = fs.bind(builder(fs).compile())
    before = fs.engine.stats()
    result = graph.invoke(inputs(k))
    stats = fs.engine.stats()
    assert len(result["out"]) == k + 2
    # plan, k branches, and the join's own scratch branch
    assert stats.forks - before.forks == 1 + k + 1
    residuals = len("plan: ") + k * len("[topic 0] ")
    sampled = 6 + 5 * k
    # every sampled token but the last of its line becomes a row when the next one is drawn
    prefilled = stats.prefilled_tokens.committed - before.prefilled_tokens.committed
    assert len(PROMPT) + residuals <= prefilled <= len(PROMPT) + residuals + sampled
    assert fs.stats["committed"] == 2
    assert fs.stats["aborted"] == k - 1 + 1
    assert fs.stats["reopened"] == 0


@pytest.mark.parametrize("best", [0, 2])
def test_committed_tokens_equal_those_of_a_cold_engine(fs: ForkServe, best: int) -> None:
    graph = fs.bind(builder(fs).compile(checkpointer=InMemorySaver()))
    config = {"configurable": {"thread_id": "t"}}
    result = graph.invoke(inputs(best=best), config)
    encode = fs.engine.backend.tokenizer.encode
    trunk = [*encode(PROMPT), *encode("plan: ")]
    trunk += cold(fs, trunk, 6)
    trunk += encode(f"[topic {best}] ")
    trunk += cold(fs, trunk, 5)
    assert fs.tokens(result["fork_tip"]) == trunk
    session = fs.engine.tree(result["fork_tip"]["session"])
    assert session.tip.id == result["fork_tip"]["node"]
    assert result["fork_refs"] == []


def test_only_the_committed_spine_is_left(fs: ForkServe) -> None:
    graph = fs.bind(builder(fs).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(inputs(5, best=3), {"configurable": {"thread_id": "t"}})
    tree = fs.engine.tree(result["fork_tip"]["session"])
    assert set(tree.nodes.values()) == set(tree.spine())
    assert all(node.mode is NodeMode.COMMIT for node in tree)

    def nothing_else() -> bool:  # a loop of its own may be re-aligning rows: both homes live then
        with fs.engine._core.lock:
            held = {page for node in tree for segment in node.segments for page in segment.pages}
            return fs.engine.stats().live_pages == len(held)

    wait_for(nothing_else, "pages that no node holds")
    assert fs.stats["undecided"] == 0
    assert fs.stats["sessions"] == 1
    assert fs.forget("t") == 1
    assert fs.engine.stats().nodes == 0


def test_a_run_without_a_thread_leaves_nothing(fs: ForkServe) -> None:
    graph = fs.bind(builder(fs).compile())
    graph.invoke(inputs())
    assert fs.stats["sessions"] == 0
    assert fs.engine.stats().nodes == 0


@pytest.mark.parametrize("join", ["winner", "all", "scaffold", "text"])
@pytest.mark.parametrize("background", [False], indirect=True)
def test_state_equals_that_of_the_undecorated_graph(fs: ForkServe, join: str) -> None:
    """Each node's prompt is what a program without forks would send."""
    graph = fs.bind(builder(fs, join=join).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(inputs(), {"configurable": {"thread_id": "t"}})
    engine = fs.engine
    encode = engine.backend.tokenizer.encode

    def say(prompt: list[int], count: int) -> tuple[list[int], str]:
        ids = cold(fs, prompt, count)
        data = engine.backend.tokenizer.decode_bytes(ids, skip_special=True)
        # A character that the reply leaves unfinished is no part of it.
        return ids, codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    trunk = [*encode(PROMPT), *encode("plan: ")]
    ids, text = say(trunk, 6)
    trunk, out, bodies = trunk + ids, [text], []
    for topic in inputs()["topics"]:
        body = encode(f"[{topic}] ")
        ids, text = say(trunk + body, 5)
        out.append(text)
        bodies.append(body + ids)
    if join == "winner":
        trunk += bodies[0]
        out.append("won")
    elif join in ("all", "scaffold"):
        trunk += encode("all: ") if join == "scaffold" else []
        trunk += [token for body in bodies for token in body]
    else:
        trunk += encode("summary of all")
    assert result["out"] == out
    assert fs.tokens(result["fork_tip"]) == trunk
    engine.check()


@pytest.mark.parametrize("join", ["all", "scaffold", "text"])
def test_a_text_join_aborts_every_branch(fs: ForkServe, join: str) -> None:
    graph = fs.bind(builder(fs, join=join).compile(checkpointer=InMemorySaver()))
    result = graph.invoke(inputs(), {"configurable": {"thread_id": "t"}})
    tree = fs.engine.tree(result["fork_tip"]["session"])
    assert set(tree.nodes.values()) == set(tree.spine())


def test_a_plain_send_leaves_from_the_tip_of_the_graph(fs: ForkServe) -> None:
    seen: list[Branch] = []
    build = builder(fs, seen=seen)
    build.branches["plan"].clear()
    build.add_conditional_edges(
        "plan", lambda s: [Send("research", {"topic": t}) for t in s["topics"]], ["research"]
    )
    fs.bind(build.compile()).invoke(inputs())
    assert {b.role for b in seen} == {"branch"}
    assert sorted(b.index for b in seen) == [0, 1, 2]
    assert len({b.base["node"] for b in seen}) == 1
    assert fs.stats["opened"] == 1


def test_a_winner_by_function_and_by_ref(fs: ForkServe) -> None:
    for best in (lambda refs: refs[2], lambda refs: 2):
        graph = fs.bind(builder(fs, best=best).compile(checkpointer=InMemorySaver()))
        result = graph.invoke(inputs(), {"configurable": {"thread_id": "t"}})
        assert "[topic 2] " in fs.text(result["fork_tip"])


def test_a_winner_that_is_none_of_the_refs_is_refused(fs: ForkServe) -> None:
    graph = fs.bind(builder(fs).compile())
    with pytest.raises(AdapterError, match="not one of the 3 refs"):
        graph.invoke(inputs(best=7))


@pytest.mark.parametrize("best", ["first", True, None, {"node": 3}, lambda refs: "first"])
def test_a_winner_that_names_no_branch_is_refused(fs: ForkServe, best: Any) -> None:
    build = builder(fs)

    @fs.node(role="join")
    def pick(state: State):
        with pytest.raises(AdapterError, match=r"the winner is|is no ref"):
            fs.commit_winner(state["fork_refs"], best)
        with pytest.raises(AdapterError, match="is no ref"):
            fs.commit_winner([{"node": 3}, *state["fork_refs"]], 1)  # type: ignore[list-item]
        return fs.commit_winner(state["fork_refs"], 0)

    build.add_node("choose", pick)
    build.edges.discard(("research", "pick"))
    build.add_edge("research", "choose")
    fs.bind(build.compile()).invoke(inputs())


def test_losers_go_with_the_choice_not_with_the_run(fs: ForkServe) -> None:
    seen: list[Any] = []
    build = builder(fs)

    @fs.node(role="join")
    def pick(state: State):
        seen.extend(state["fork_refs"])
        return fs.commit_winner(state["fork_refs"], 1)

    @fs.node
    def after(state: State):
        assert [fs.alive(ref) for ref in seen] == [False, True, False]

    build.add_node("choose", pick)
    build.add_node("after", after)
    build.edges.discard(("research", "pick"))
    build.add_edge("research", "choose")
    build.add_edge("choose", "after")
    fs.bind(build.compile()).invoke(inputs())
    assert len(seen) == 3


def test_a_join_that_fails_changes_nothing(fs: ForkServe) -> None:
    """The choice is carried out when the node has ended well, not before."""
    failures = [RuntimeError("after choosing"), None]
    saver = InMemorySaver()

    @fs.node
    def branch(state, fork: Branch):
        fork.append(f"branch {state['i']}")

    @fs.node(role="join")
    def pick(state: State, fork: Branch):
        fork.append("thinking about it")  # scratch
        update = fs.commit_winner(state["fork_refs"], state["best"])
        failure = failures.pop(0)
        if failure:
            raise failure
        return update

    build = StateGraph(State)
    build.add_node("branch", branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(
        START, lambda s: [fs.send("branch", {"i": i}) for i in range(3)], ["branch"]
    )
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile(checkpointer=saver))
    config: Any = {"configurable": {"thread_id": "t"}}
    with pytest.raises(RuntimeError, match="after choosing"):
        graph.invoke({"prompt": PROMPT, "best": 0}, config)
    refs = graph.get_state(config).values["fork_refs"]
    assert all(fs.alive(ref) for ref in refs)
    graph.update_state(config, {"best": 1})
    result = graph.invoke(None, config)
    assert fs.text(result["fork_tip"]) == PROMPT + "branch 1"
    tree = fs.engine.tree(result["fork_tip"]["session"])
    assert set(tree.nodes.values()) == set(tree.spine())


def test_a_node_that_adds_nothing_leaves_the_tip_where_it_was(fs: ForkServe) -> None:
    @fs.node
    def look(state: State):
        return {"out": ["looked"]}

    build = StateGraph(State)
    for name in ("a", "b", "c"):
        build.add_node(name, look)
    build.add_edge(START, "a")
    build.add_edge("a", "b")  # b and c run side by side: both leave the tip alone
    build.add_edge("a", "c")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke({"prompt": PROMPT}, {"configurable": {"thread_id": "t"}})
    assert result["fork_tip"]["node"] == 1
    assert len(fs.engine.tree(result["fork_tip"]["session"]).nodes) == 1


def test_a_node_that_adds_nothing_leaves_nothing(fs: ForkServe) -> None:
    nodes: list[int] = []

    @fs.node
    def look(state: State, fork: Branch):
        nodes.append(len(fs.engine.tree(fork.session.id).nodes))

    build = StateGraph(State)
    for number in range(5):
        build.add_node(f"n{number}", look)
        build.add_edge(START if not number else f"n{number - 1}", f"n{number}")
    fs.bind(build.compile()).invoke({"prompt": PROMPT})
    assert nodes == [2] * 5  # the root, and the node's own


def test_two_trunk_nodes_in_one_step_are_told_what_to_do(fs: ForkServe) -> None:
    @fs.node
    def grow(state: State, fork: Branch):
        fork.append("more")

    build = StateGraph(State)
    build.add_node("a", grow)
    build.add_node("b", grow)
    build.add_edge(START, "a")
    build.add_edge(START, "b")
    with pytest.raises(AdapterError, match="role='branch'"):
        fs.bind(build.compile()).invoke({"prompt": PROMPT})


def test_nodes_side_by_side_may_be_branches(fs: ForkServe) -> None:
    @fs.node(role="branch")
    def grow(state: State, fork: Branch):
        fork.append(f"more of {fork.name}")

    @fs.node(role="join")
    def pick(state: State):
        return fs.commit_winner(state["fork_refs"], 1)

    build = StateGraph(State)
    for name in ("a", "b"):
        build.add_node(name, grow)
        build.add_edge(START, name)
        build.add_edge(name, "pick")
    build.add_node("pick", pick)
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke({"prompt": PROMPT}, {"configurable": {"thread_id": "t"}})
    assert fs.text(result["fork_tip"]) == PROMPT + "more of b"
    assert fs.stats["opened"] == 1  # both leave from one session


def test_an_unbound_graph_is_refused(fs: ForkServe) -> None:
    with pytest.raises(AdapterError, match=r"fs\.bind"):
        builder(fs).compile().invoke(inputs())


def test_a_decision_outside_a_join_is_refused(fs: ForkServe) -> None:
    with pytest.raises(AdapterError, match="role='join'"):
        fs.commit_winner([], 0)


def test_a_state_that_cannot_be_rendered_is_told_so(fs: ForkServe) -> None:
    graph = fs.bind(builder(fs).compile())
    with pytest.raises(AdapterError, match="render="):
        graph.invoke({"topics": []})


@pytest.mark.parametrize("looks", [True, False])
def test_a_join_that_decides_nothing_is_told_of(
    fs: ForkServe, caplog: pytest.LogCaptureFixture, looks: bool
) -> None:
    """Without a join, branches that leave their text in the state are nobody's mistake."""

    @fs.node
    def branch(state: Any, fork: Branch):
        fork.append("text that only the tree has")

    @fs.node(role="join" if looks else "trunk")
    def pick(state: State):
        return {"out": ["looked"]}

    build = StateGraph(State)
    build.add_node("branch", branch)
    build.add_node("pick", pick)
    build.add_conditional_edges(START, lambda s: [fs.send("branch") for _ in range(3)], ["branch"])
    build.add_edge("branch", "pick")
    fs.bind(build.compile(checkpointer=InMemorySaver())).invoke(START_STATE, THREAD)
    assert (fs.stats["unchosen"], fs.stats["undecided"]) == (3, 0)
    told = [r.getMessage() for r in caplog.records if r.name.startswith("forkserve.adapters")]
    assert len(told) == looks
    assert all("3 branches" in text and "'pick'" in text for text in told)


def test_a_join_that_decides_later_is_not_told_of(
    fs: ForkServe, caplog: pytest.LogCaptureFixture
) -> None:
    fs.bind(fan_out(fs).compile(checkpointer=InMemorySaver())).invoke(START_STATE, THREAD)
    assert fs.stats["unchosen"] == 0
    assert not [r for r in caplog.records if r.name.startswith("forkserve.adapters")]
