"""An agent of `langchain.agents` on a ForkServe chat model: speculation fills the tools' time.

Run it:  python examples/langgraph_agent.py          (the mock, with scripted replies)
         python examples/langgraph_agent.py smollm2  (needs the `engine` extra)
"""

from __future__ import annotations

import sys
import time
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langchain import ChatForkServe
from forkserve.adapters.langgraph import ForkServeMiddleware

CALL = '<tool_call>{"name": "departures", "arguments": {"station": "Oriente"}}</tool_call>'
REPLIES = (CALL, "The next train leaves at 14:09.")


@tool
def departures(station: str) -> str:
    """The next trains from a station."""
    time.sleep(0.3)
    return f"from {station}: 14:09 Porto, 14:39 Faro"


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M; a thread of its own works while the tool runs."""
    config = ForkServeConfig(capacity_pages=2048, background=True)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config, replies=REPLIES))
    from forkserve.engine.local import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock") -> None:
    """One question, and what each turn cost."""
    with make_engine(name) as engine:
        model = ChatForkServe(engine=engine, model=name, max_tokens=128)
        agent: Any = create_agent(
            model,
            [departures],
            system_prompt="You help travellers. Look departures up before you answer. " * 6,
            middleware=[ForkServeMiddleware()],
        )
        question = {"messages": [{"role": "user", "content": "When does the next train leave?"}]}
        for mode, event in agent.stream(question, stream_mode=["custom", "updates"]):
            if mode == "custom":
                print("turn:", event["forkserve"])
            else:
                for update in event.values():
                    for message in (update or {}).get("messages", []):
                        print(f"{message.type:5} {message.text or message.tool_calls}")
        model.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
