"""Map and reduce with LangGraph: k branches share one prefill, the join keeps one.

Run it:  python examples/langgraph_map_reduce.py          (the mock: instant, speaks nonsense)
         python examples/langgraph_map_reduce.py smollm2  (needs the `engine` extra)
"""

from __future__ import annotations

import asyncio
import operator
import sys
from typing import Annotated, Any

from langgraph.graph import START, StateGraph

from forkserve import Engine, ForkServeConfig, PromptText, plain
from forkserve.adapters.langgraph import Branch, ForkServe, ForkState

TOPICS = ["the harbour", "the old town", "the hills"]


class State(ForkState, total=False):
    """The question, the topics, and what was drafted."""

    messages: list[dict[str, str]]
    topics: list[str]
    drafts: Annotated[list[str], operator.add]
    best: str


def build(engine: Engine) -> Any:
    """plan -> one draft for each topic -> the longest wins."""
    fs = ForkServe(engine)

    def ask(text: str) -> PromptText:  # a topic is content, whatever it says
        head, tail = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        return head + plain(text) + tail

    @fs.node
    async def plan(state: State, fork: Branch) -> None:
        await fork.agenerate(24)

    def fan(state: State) -> list[Any]:
        tip = state["fork_tip"]
        return [fs.send("draft", {"topic": t}, parent=tip) for t in state["topics"]]

    @fs.node
    async def draft(state: Any, fork: Branch) -> dict[str, Any]:
        fork.append(ask(f"Write one sentence about {state['topic']}."))
        reply = await fork.agenerate(24)
        return {"drafts": [reply.text.strip()]}

    @fs.node(role="join")
    def pick(state: State) -> dict[str, Any]:
        drafts = state["drafts"]
        best = max(range(len(drafts)), key=lambda i: len(drafts[i]))
        return {**fs.commit_winner(state["fork_refs"], best), "best": drafts[best]}

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("draft", draft)
    builder.add_node("pick", pick)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", fan, ["draft"])
    builder.add_edge("draft", "pick")
    return fs.bind(builder.compile())


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M."""
    config = ForkServeConfig(capacity_pages=2048)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config))
    from forkserve.engine.local import LocalBackend

    return Engine(LocalBackend(config, name))


async def main(name: str = "mock") -> None:
    """Run the graph once and say what it cost."""
    with make_engine(name) as engine:
        graph = build(engine)
        question = {"role": "user", "content": "I have one day in Lisbon. Make a short plan. " * 8}
        before = engine.stats().prefilled_tokens.committed
        result = await graph.ainvoke({"messages": [question], "topics": TOPICS})
        for topic, text in zip(TOPICS, result["drafts"], strict=True):
            print(f"{topic:14} {text!r}")
        prompt = len(engine.backend.tokenizer.encode(str(question["content"])))
        rows = engine.stats().prefilled_tokens.committed - before
        alone = len(TOPICS) + 1
        print(f"prompt of {prompt} tokens, {alone} model calls: {rows} rows computed in all")
        print(f"without sharing the prompt alone would be {prompt * alone}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
