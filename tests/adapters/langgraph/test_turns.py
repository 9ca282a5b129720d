"""A thread is told something new: the model sees it, after what the trunk shares with it."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from forkserve.adapters.langgraph import Branch, ForkServe, ForkState
from forkserve.errors import ConfigError

from .graphs import THREAD, Boom, one


class Talk(ForkState, MessagesState):
    pass


def render(state: Any) -> str:
    """One line for each message: what is said later is appended."""
    return "".join(f"{m.type}: {m.content}\n" for m in state["messages"]) + "ai: "


def user(text: str) -> Any:
    return {"messages": [("user", text)]}


def talk(make: Any, seen: list[str], **more: Any) -> tuple[ForkServe, Any]:
    fs = make(render=render)

    @fs.node
    def chat(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        fork.append(f"answer {len(state['messages'])}")
        return {"messages": [("ai", f"answer {len(state['messages'])}")]}

    return fs, one(fs, chat, Talk, **more)


def test_what_a_thread_is_told_later_is_rendered(make: Any) -> None:
    seen: list[str] = []
    fs, graph = talk(make, seen)
    for text in ("FIRST", "SECOND", "THIRD"):
        result = graph.invoke(user(text), THREAD)
        assert seen[-1] == render({"messages": result["messages"][:-1]})
        assert fs.text(result["fork_tip"]) == seen[-1] + result["messages"][-1].content
    assert (fs.stats["opened"], fs.stats["reopened"], fs.stats["turns"]) == (1, 0, 2)
    # the trunk ended in the reply, so all of it is shared, and it is one line
    tree = fs.engine.tree(result["fork_tip"]["session"])
    assert set(tree.nodes.values()) == set(tree.spine())


def test_a_begin_of_text_token_stands_before_every_prompt(make: Any) -> None:
    """One that the model's tokenizer wants: each turn's prompt is a whole text."""
    fs, graph = talk(make, [])
    tokenizer = fs.engine.backend.tokenizer
    tokenizer.begin_ids = tuple(tokenizer.encode("<|im_start|>"))  # type: ignore[attr-defined]
    for text in ("FIRST", "SECOND"):
        result = graph.invoke(user(text), THREAD)
        tip = result["fork_tip"]
        tokens = fs.engine.tokens(tip["session"])
        assert tuple(tokens[:1]) == tokenizer.begin_ids  # type: ignore[attr-defined]
        assert tokens.count(tokens[0]) == 1
    assert (fs.stats["opened"], fs.stats["reopened"], fs.stats["turns"]) == (1, 0, 1)


def test_only_what_is_new_is_computed(make: Any) -> None:
    fs = make(render=render)

    @fs.node
    def chat(state: Talk, fork: Branch):
        fork.generate(4)
        return {"messages": [("ai", "another reply than the generated one")]}

    graph = one(fs, chat, Talk)
    graph.invoke(user("A first message that is long. " * 9), THREAD)
    was = fs.engine.stats().prefilled_tokens.committed
    graph.invoke(user("SECOND"), THREAD)
    new = "another reply than the generated one\nhuman: SECOND\nai: "
    assert fs.engine.stats().prefilled_tokens.committed - was <= len(new) + 4


def test_a_state_that_was_shortened_is_seen_so(make: Any) -> None:
    from langchain_core.messages import RemoveMessage
    from langgraph.graph.message import REMOVE_ALL_MESSAGES

    seen: list[str] = []
    fs, graph = talk(make, seen)
    graph.invoke(user("FIRST"), THREAD)
    graph.invoke({"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), ("user", "FIRST")]}, THREAD)
    graph.invoke({"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), ("user", "Else")]}, THREAD)
    assert seen == ["human: FIRST\nai: ", "human: FIRST\nai: ", "human: Else\nai: "]
    assert fs.stats["opened"] == 1


def test_a_prompt_that_shares_nothing_opens_a_session(make: Any) -> None:
    fs = make()

    @fs.node
    def say(state: Any, fork: Branch):
        return {"out": [fork.full_text]}

    from .graphs import State

    graph = one(fs, say, State)
    graph.invoke({"prompt": "one"}, THREAD)
    assert graph.invoke({"prompt": "two"}, THREAD)["out"] == ["one", "two"]
    assert fs.stats["opened"] == 2


def test_to_resume_renders_nothing_anew(make: Any) -> None:
    """Also when the state has messages that the trunk does not."""
    seen: list[str] = []
    fs = make(render=render)

    @fs.node
    def first(state: Talk, fork: Branch):
        fork.append("[thought]")
        return {"messages": [("ai", "said")]}

    @fs.node
    def second(state: Talk, fork: Branch):
        interrupt("?")
        seen.append(fork.full_text)

    build = StateGraph(Talk)
    build.add_node("first", first)
    build.add_node("second", second)
    build.add_edge(START, "first")
    build.add_edge("first", "second")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
        graph.invoke(Command(resume=1), THREAD)
    told = "human: FIRST\nai: "
    assert seen == [f"{told}[thought]", f"{told}said\nhuman: SECOND\nai: [thought]"]


@pytest.mark.parametrize("edited", [False, True])
def test_a_turn_that_waits_before_its_first_node_is_not_lost(make: Any, edited: bool) -> None:
    seen: list[str] = []
    _, graph = talk(make, seen, interrupt_before=["n"])
    graph.invoke(user("FIRST"), THREAD)
    graph.invoke(None, THREAD)
    graph.invoke(user("SECOND"), THREAD)
    config = graph.update_state(THREAD, user("and THIS")) if edited else THREAD
    graph.invoke(None, config)
    more = "human: and THIS\n" if edited else ""
    assert seen[-1] == f"human: FIRST\nai: answer 1\nhuman: SECOND\n{more}ai: "


def test_a_turn_whose_first_node_failed_is_not_lost(make: Any) -> None:
    fs = make(render=render)
    seen: list[str] = []

    @fs.node
    def chat(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        if len(seen) == 2:
            raise Boom
        return {"messages": [("ai", "answer")]}

    graph = one(fs, chat, Talk)
    graph.invoke(user("FIRST"), THREAD)
    with pytest.raises(Boom):
        graph.invoke(user("SECOND"), THREAD)
    graph.invoke(None, THREAD)
    assert seen[1] == seen[2] == "human: FIRST\nai: answer\nhuman: SECOND\nai: "
    graph.invoke(user("THIRD"), THREAD)
    assert seen[3] == "human: FIRST\nai: answer\nhuman: SECOND\nai: answer\nhuman: THIRD\nai: "


def test_time_travel_goes_where_the_checkpoint_says(make: Any) -> None:
    seen: list[str] = []
    fs = make(render=render)

    @fs.node
    def say(state: Talk, fork: Branch):
        seen.append(fork.full_text)
        fork.append("x")

    build = StateGraph(Talk)
    build.add_node("a", say)
    build.add_node("b", say)
    build.add_edge(START, "a")
    build.add_edge("a", "b")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    graph.invoke(user("FIRST"), THREAD)
    old = next(s for s in graph.get_state_history(THREAD) if s.next == ("b",))
    graph.invoke(user("SECOND"), THREAD)
    graph.invoke(None, old.config)
    assert seen[1] == seen[-1] == "human: FIRST\nai: x"
    # told something at an old place: its state is what is rendered
    graph.invoke(user("ELSE"), old.config)
    assert seen[-2:] == ["human: FIRST\nhuman: ELSE\nai: ", "human: FIRST\nhuman: ELSE\nai: x"]


def drafts(fs: Any, seen: list[str], *, named: bool = True, **options: Any) -> Any:
    """A graph of two drafts and their join; named: its Sends name the trunk's old end."""

    @fs.node
    def draft(state: Any, fork: Branch):
        seen.append(fork.full_text)
        fork.append(f"draft {state['i']}")

    @fs.node(role="join")
    def pick(state: Talk):
        said = {"messages": [("ai", "draft 1")]}
        return {**fs.commit_winner(state["fork_refs"], lambda refs: refs[1]), **said}

    def fan(state: Any) -> list[Any]:
        tip = state.get("fork_tip") if named else None
        return [fs.send("draft", {"i": i}, parent=tip) for i in range(2)]

    build = StateGraph(Talk)
    build.add_node("draft", draft)
    build.add_node("pick", pick)
    build.add_conditional_edges(START, fan, ["draft"])
    build.add_edge("draft", "pick")
    return fs.bind(build.compile(checkpointer=InMemorySaver(), **options))


@pytest.mark.parametrize("named", [False, True])
def test_a_fan_out_at_the_start_leaves_from_what_was_said(make: Any, named: bool) -> None:
    """Whether its Sends name the trunk's old end or nothing; the join stands there too."""
    fs = make(render=render)
    seen: list[str] = []
    graph = drafts(fs, seen, named=named)
    graph.invoke(user("FIRST"), THREAD)
    result = graph.invoke(user("SECOND"), THREAD)
    told = "human: FIRST\nai: draft 1\nhuman: SECOND\nai: "
    assert seen[2:] == [told, told]
    assert fs.text(result["fork_tip"]) == told + "draft 1"
    assert fs.stats["copied"] == 0


def test_a_tip_that_the_input_names_is_meant(make: Any) -> None:
    seen: list[str] = []
    _, graph = talk(make, seen)
    tip = graph.invoke(user("FIRST"), THREAD)["fork_tip"]
    graph.invoke({**user("SECOND"), "fork_tip": tip}, THREAD)
    assert seen[-1] == "human: FIRST\nai: answer 1"


def test_a_fan_out_that_waited_has_one_place_to_leave_from(make: Any) -> None:
    """The branches were held before they ran, and the join stands where they left from."""
    fs = make(render=render)
    seen: list[str] = []
    graph = drafts(fs, seen, interrupt_before=["draft", "pick"])
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
        graph.invoke(None, THREAD)
        result = graph.invoke(None, THREAD)
    told = "human: FIRST\nai: draft 1\nhuman: SECOND\nai: "
    assert seen[2:] == [told, told]
    assert fs.text(result["fork_tip"]) == told + "draft 1"
    assert (fs.stats["copied"], fs.stats["unchosen"]) == (0, 0)


def test_a_place_that_a_node_of_a_resumed_run_chose_is_meant(make: Any) -> None:
    """It is where the turn found the trunk, and the trunk has moved meanwhile."""
    fs = make(render=render)
    seen: list[str] = []
    old: list[Any] = []

    @fs.node
    def first(state: Talk, fork: Branch):
        old.append(state.get("fork_tip"))
        fork.append("[first]")

    @fs.node
    def later(state: Any, fork: Branch):
        seen.append(fork.full_text)

    build = StateGraph(Talk)
    build.add_node("first", first)
    build.add_node("later", later)
    build.add_edge(START, "first")
    build.add_conditional_edges(
        "first", lambda s: [fs.send("later", {}, parent=old[-1] or s["fork_tip"])], ["later"]
    )
    stops = ["first"]
    graph = fs.bind(build.compile(checkpointer=InMemorySaver(), interrupt_before=stops))
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
        graph.invoke(None, THREAD)
    assert seen == ["human: FIRST\nai: [first]"] * 2


def test_a_node_that_renders_sees_what_the_state_got_meanwhile(make: Any) -> None:
    """A loop of model and tools: results are in the state, and no node put them in the trunk."""
    seen: dict[bool, list[str]] = {False: [], True: []}
    for renders in (False, True):
        fs = make(render=render)

        @fs.node(render=renders)
        def chat(state: Talk, fork: Branch, see: Any = seen[renders].append):
            see(fork.full_text)
            fork.append(f"answer {len(state['messages'])}")
            return {"messages": [("ai", f"answer {len(state['messages'])}")]}

        build = StateGraph(Talk)
        build.add_node("chat", chat)
        build.add_node("tool", lambda state: {"messages": [("human", "RESULT")]})
        build.add_edge(START, "chat")
        build.add_conditional_edges("chat", lambda s: "tool" if len(s["messages"]) < 4 else END)
        build.add_edge("tool", "chat")
        graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
        result = graph.invoke(user("FIRST"), THREAD)
        assert fs.text(result["fork_tip"]) == seen[renders][-1] + "answer 3"
        tree = fs.engine.tree(result["fork_tip"]["session"])
        assert set(tree.nodes.values()) == set(tree.spine())
        assert fs.bind(build.compile()).invoke(user("FIRST"))  # without a thread as well
    told = "human: FIRST\nai: "
    assert seen[False][:2] == [told, told + "answer 1"]
    assert seen[True][:2] == [told, told + "answer 1\nhuman: RESULT\nai: "]
    assert seen[True][2:] == seen[True][:2]


def test_a_thread_without_a_saver_keeps_no_session(make: Any) -> None:
    fs = make(render=render)

    @fs.node
    def chat(state: Talk, fork: Branch):
        fork.append("x")

    build = StateGraph(Talk)
    build.add_node("n", chat)
    build.add_edge(START, "n")
    graph = fs.bind(build.compile())
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
        assert fs.stats["sessions"] == 0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, "not NoneType"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "tool_calls=5"),
        ([1 << 40], "vocabulary"),
        ([], "at least one token"),
    ],
)
def test_what_is_no_prompt_is_refused_in_a_later_turn_too(make: Any, said: Any, why: str) -> None:
    answers = ["human: FIRST", said]
    fs = make(render=lambda state: answers[len(state["messages"]) > 1])

    @fs.node
    def chat(state: Talk, fork: Branch):
        fork.append("x")

    graph = one(fs, chat, Talk)
    graph.invoke(user("FIRST"), THREAD)
    with pytest.raises(ConfigError, match=why):
        graph.invoke(user("SECOND"), THREAD)
