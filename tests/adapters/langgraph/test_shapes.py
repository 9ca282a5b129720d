"""Every kind of node, state and update that LangGraph takes."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, StreamWriter
from pydantic import Field

from forkserve.adapters.langgraph import (
    Branch,
    ForkBranchState,
    ForkModel,
    ForkServe,
    ForkState,
)
from forkserve.adapters.langgraph.state import Ref, TipChannel, merge_refs
from forkserve.errors import AdapterError, ConfigError

from .graphs import PROMPT, START_STATE, THREAD, State, one, spine_only


@pytest.mark.parametrize("wrong", [None, "engine", 5])
def test_what_is_no_engine_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"needs an Engine, not {type(wrong).__name__}"):
        ForkServe(wrong)


# ------------------------------------------------------------------ callables


class Agent:
    def __init__(self, fs: ForkServe) -> None:
        self.word = "method"
        self.bound = fs.node(self.work)
        self.abound = fs.node(self.awork)

    def work(self, state: State, fork: Branch):
        fork.append(self.word)

    async def awork(self, state: State, fork: Branch):
        fork.append(self.word)


class Callable_:
    def __call__(self, state: State, fork: Branch) -> dict[str, Any]:
        fork.append("callable")
        return {}


class AsyncCallable:
    async def __call__(self, state: State, fork: Branch) -> dict[str, Any]:
        fork.append("callable")
        return {}


def with_word(word: str, state: State, fork: Branch) -> None:
    fork.append(word)


async def awith_word(word: str, state: State, fork: Branch) -> None:
    fork.append(word)


@pytest.mark.parametrize(
    ("pick", "word"),
    [
        (lambda fs: Agent(fs).bound, "method"),
        (lambda fs: Agent(fs).abound, "method"),
        (lambda fs: fs.node(Callable_()), "callable"),
        (lambda fs: fs.node(AsyncCallable()), "callable"),
        (lambda fs: fs.node(partial(with_word, "partial")), "partial"),
        (lambda fs: fs.node(partial(awith_word, "partial")), "partial"),
    ],
    ids=["method", "async-method", "callable", "async-callable", "partial", "async-partial"],
)
def test_methods_partials_and_callable_objects(fs: ForkServe, pick: Any, word: str) -> None:
    graph = one(fs, pick(fs))
    result = asyncio.run(graph.ainvoke(START_STATE, THREAD))
    assert fs.text(result["fork_tip"]) == PROMPT + word


def test_a_method_decorated_in_its_class(fs: ForkServe) -> None:
    class Worker:
        @fs.node
        def work(self, state: State, fork: Branch):
            fork.append("in class")

    result = one(fs, Worker().work).invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "in class"


def test_a_node_gets_what_it_asks_for_and_nothing_else(fs: ForkServe) -> None:
    seen: dict[str, Any] = {}

    @fs.node
    def node(
        state: State,
        config: RunnableConfig,
        runtime: Runtime,
        store: BaseStore,
        writer: StreamWriter,
        fork: Branch,
    ):
        seen.update(config=config, runtime=runtime, store=store, writer=writer, fork=fork)

    one(fs, node, store=InMemoryStore()).invoke(START_STATE, THREAD)
    assert seen["config"]["metadata"]["langgraph_node"] == "n"
    assert seen["runtime"].execution_info.thread_id == "t"
    assert isinstance(seen["store"], InMemoryStore)
    assert callable(seen["writer"])
    assert seen["fork"].role == "trunk"


def test_the_branch_may_have_another_name(fs: ForkServe) -> None:
    @fs.node(inject="kv")
    def node(state: State, kv: Branch):
        kv.append("by another name")

    assert fs.text(one(fs, node).invoke(START_STATE, THREAD)["fork_tip"]).endswith("another name")


class Narrow(TypedDict):
    prompt: str


def test_hints_of_the_node_still_reach_langgraph(fs: ForkServe) -> None:
    @fs.node
    def route(state: Narrow, fork: Branch) -> Command[Literal["there"]]:
        assert set(state) == {"prompt"}
        return Command(goto="there")

    @fs.node
    def there(state: State):
        return {"out": ["there"]}

    build = StateGraph(State)
    build.add_node("route", route)
    build.add_node("there", there)
    build.add_edge(START, "route")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    assert ("route", "there") in {(e.source, e.target) for e in graph.get_graph().edges}
    assert graph.invoke(START_STATE, THREAD)["out"] == ["there"]


def test_an_unknown_role_is_refused(fs: ForkServe) -> None:
    with pytest.raises(AdapterError, match="unknown role"):
        fs.node(role="leaf")(lambda state: None)  # type: ignore[call-overload]


def test_a_render_function_belongs_to_the_adapter(fs: ForkServe) -> None:
    """`ForkServe` takes a function, a node whether to call it."""
    with pytest.raises(ConfigError, match=r"render=<function .* must be True or False"):
        fs.node(render=lambda state: "text")(lambda state: None)  # type: ignore[call-overload]


# ------------------------------------------------------------------ what a node returns


@pytest.mark.parametrize(
    "out",
    [
        None,
        {},
        {"out": ["x"]},
        Command(update={"out": ["x"]}),
        Command(update=[("out", ["x"])]),
        [Command(update={"out": ["x"]}), {"out": ["y"]}],
        Command(),
    ],
    ids=["none", "empty", "dict", "command", "pairs", "list", "bare-command"],
)
def test_every_form_of_update(fs: ForkServe, out: Any) -> None:
    @fs.node
    def node(state: State, fork: Branch):
        fork.append("said")
        return out

    result = one(fs, node).invoke(START_STATE, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "said"
    assert result["out"] == (
        ["x", "y"] if isinstance(out, list) else ["x"] if "x" in str(out) else []
    )


def test_a_node_that_returns_its_whole_state_does_not_undo_the_tip(fs: ForkServe) -> None:
    @fs.node
    def node(state: State, fork: Branch):
        fork.append("said ")
        return {**state, "out": []}

    graph = one(fs, node)
    tip = graph.invoke(START_STATE, THREAD)["fork_tip"]
    result = graph.invoke({**START_STATE, "fork_tip": tip}, THREAD)
    assert fs.text(result["fork_tip"]) == PROMPT + "said said "


# ------------------------------------------------------------------ states


class Model(ForkModel):
    prompt: str
    out: Annotated[list[str], operator.add] = Field(default_factory=list)


@dataclass
class Data:
    prompt: str
    fork_tip: Annotated[Any, TipChannel] = None
    fork_refs: Annotated[list[Any], merge_refs] = field(default_factory=list)
    out: Annotated[list[str], operator.add] = field(default_factory=list)


@pytest.mark.parametrize("schema", [Model, Data], ids=["pydantic", "dataclass"])
@pytest.mark.parametrize("whole", [False, True], ids=["update", "whole-state"])
def test_models_and_dataclasses_as_state(fs: ForkServe, schema: Any, whole: bool) -> None:
    def plan(state: Any, fork: Branch):
        assert isinstance(state, schema)
        fork.append("plan ")
        return schema(prompt=state.prompt, out=["plan"]) if whole else {"out": ["plan"]}

    def fan(state: Any):
        return [fs.send("branch", {"i": i}, parent=state.fork_tip) for i in range(2)]

    @fs.node
    def branch(state, fork: Branch):
        fork.append(f"branch {state['i']}")
        return {"out": [str(state["i"])]}

    def pick(state: Any):
        return fs.commit_winner(state.fork_refs, 1)

    plan.__annotations__["state"] = fan.__annotations__["state"] = schema
    pick.__annotations__["state"] = schema
    build = StateGraph(schema)
    build.add_node("plan", fs.node(plan))
    build.add_node("branch", branch)
    build.add_node("pick", fs.node(role="join")(pick))
    build.add_edge(START, "plan")
    build.add_conditional_edges("plan", fan, ["branch"])
    build.add_edge("branch", "pick")
    graph = fs.bind(build.compile(checkpointer=InMemorySaver()))
    result = graph.invoke({"prompt": PROMPT}, THREAD)
    assert result["out"] == ["plan", "0", "1"]
    assert fs.text(result["fork_tip"]) == PROMPT + "plan branch 1"
    spine_only(fs, result["fork_tip"])


class Task(ForkModel):
    i: int
    fork_parent: Any = None


def test_a_model_as_the_argument_of_a_send(fs: ForkServe) -> None:
    @fs.node
    def branch(state: Task, fork: Branch):
        assert isinstance(state, Task)
        fork.append(f"branch {state.i}")

    send = fs.send("branch", Task(i=3), parent=Ref(**REF))
    assert send.arg.fork_parent["node"] == REF["node"]
    assert send.arg.i == 3
    with pytest.raises(AdapterError, match="no field fork_parent"):
        fs.send("branch", Data("x"), parent=Ref(**REF))
    with pytest.raises(AdapterError, match="send a dict"):
        fs.send("branch", 7, parent=Ref(**REF))


REF: Any = {
    "engine": "e",
    "session": "s",
    "gen": 1,
    "node": 7,
    "length": 9,
    "branch": 7,
    "index": 0,
}


def test_the_reducer_of_refs() -> None:
    later = {**REF, "node": 8, "length": 12}
    other = {**REF, "node": 9, "branch": 9}
    assert merge_refs(None, [REF]) == [REF]
    assert merge_refs([REF], [REF]) == [REF]
    assert merge_refs([REF, other], [later]) == [later, other]  # the branch went on
    assert merge_refs([REF], [other]) == [REF, other]
    assert merge_refs([REF], [{**REF, "engine": "f"}]) == [REF, {**REF, "engine": "f"}]
    assert merge_refs([REF], None) == []
    assert merge_refs([REF], {"set": [other]}) == [other]


def test_a_state_derives_from_langgraphs_own_too(fs: ForkServe) -> None:
    """Python before 3.12 has two kinds of TypedDict, and one state cannot derive from both."""

    class Talk(ForkState, MessagesState):
        pass

    class Part(ForkBranchState, MessagesState):
        pass

    @fs.node
    def chat(state: Talk, fork: Branch):
        return {"messages": [("ai", fork.generate(3).text)]}

    result = one(fs, chat, Talk).invoke({"messages": [("user", "Hello.")]}, THREAD)
    assert [m.type for m in result["messages"]] == ["human", "ai"]
    assert fs.alive(result["fork_tip"])
    assert "fork_parent" in Part.__annotations__
