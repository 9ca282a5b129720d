"""Time travel with LangGraph: an old checkpoint is an old place in the tree.

Run it:  python examples/langgraph_time_travel.py          (the mock: instant, speaks nonsense)
         python examples/langgraph_time_travel.py smollm2  (needs the `engine` extra)
"""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from forkserve import Engine, ForkServeConfig, plain
from forkserve.adapters.langgraph import Branch, ForkServe, ForkState


class State(ForkState, total=False):
    """The opening, the city, and what was said."""

    messages: list[dict[str, str]]
    city: str
    said: Annotated[list[str], operator.add]


def build(fs: ForkServe) -> Any:
    """Two turns on the trunk; the second asks about the city that the state names."""

    def ask(fork: Branch, text: str) -> dict[str, Any]:
        head, tail = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        fork.append(head + plain(text) + tail)  # a city is content, whatever it says
        return {"said": [fork.generate(16).text.strip()]}

    @fs.node
    def first(state: State, fork: Branch) -> dict[str, Any]:
        return ask(fork, "What makes a city good to visit?")

    @fs.node
    def second(state: State, fork: Branch) -> dict[str, Any]:
        return ask(fork, f"Is {state['city']} such a city?")

    builder = StateGraph(State)
    builder.add_node("first", first)
    builder.add_node("second", second)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    return fs.bind(builder.compile(checkpointer=InMemorySaver()))


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M."""
    config = ForkServeConfig(capacity_pages=2048)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config))
    from forkserve.engine.local import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock") -> None:
    """Run to the end, go back to before the second turn, change the city, run again."""
    with make_engine(name) as engine:
        fs = ForkServe(engine)
        graph = build(fs)
        config: Any = {"configurable": {"thread_id": "trip"}}
        opening = [{"role": "user", "content": "You are a travel guide. " * 12}]
        one = graph.invoke({"messages": opening, "city": "Lisbon"}, config)
        rows = engine.stats().prefilled_tokens.committed
        print(f"first history:  {one['said'][-1]!r}, {rows} rows computed")

        history = graph.get_state_history(config)
        past = next(snapshot for snapshot in history if snapshot.next == ("second",))
        edited = graph.update_state(past.config, {"city": "Porto"}, as_node="first")
        two = graph.invoke(None, edited)
        more = engine.stats().prefilled_tokens.committed - rows
        print(f"second history: {two['said'][-1]!r}, {more} more rows computed")
        shared = past.values["fork_tip"]["length"]
        print(f"{shared} tokens are shared by both; sessions opened: {fs.stats['opened']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
