"""A chat model drop-in: code written for any LangChain chat model, on ForkServe.

Run it:  python examples/langchain_chat.py          (the mock, with scripted replies)
         python examples/langchain_chat.py smollm2  (needs the `engine` extra)
"""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from pydantic import BaseModel

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langchain import ChatForkServe

RULES = (
    "You work at the desk of a repair shop for bicycles. The shop opens at nine and closes at six. "
    "A puncture takes a day, a wheel two, anything else a week. Answer in one short sentence."
)
QUESTIONS = ("How long does a new tube take?", "And a bent wheel?", "Thank you. When do you close?")
REPLIES = ("A day.", "Two days.", "At six.", '{"part":"wheel","days":2}')


class Job(BaseModel):
    """A repair."""

    part: Literal["tube", "wheel", "other"]
    days: Literal[1, 2, 7]


def desk(model: BaseChatModel) -> Job:
    """Knows nothing of ForkServe: any chat model would do."""
    history: list[AnyMessage] = [SystemMessage(RULES)]
    for question in QUESTIONS:
        history.append(HumanMessage(question))
        print(f"> {question}")
        reply = None
        for chunk in model.stream(history):
            print(chunk.text, end="", flush=True)
            reply = chunk if reply is None else reply + chunk
        assert reply is not None
        history.append(AIMessage(reply.text))
        usage = reply.usage_metadata or {}
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"\n  [{cached} of {usage.get('input_tokens')} prompt tokens were there already]")
    history.append(HumanMessage("Write the job of the wheel down as JSON."))
    job = model.with_structured_output(Job).invoke(history)
    assert isinstance(job, Job)
    return job


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M."""
    config = ForkServeConfig(capacity_pages=2048)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config, replies=REPLIES))
    from forkserve.engine.local import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock") -> Job:
    """A conversation of three turns, then a reply that fits a schema."""
    with make_engine(name) as engine:
        model = ChatForkServe(engine=engine, model=name, max_tokens=48, temperature=0)
        job = desk(model)
        print(job)
        model.close()
        return job


if __name__ == "__main__":
    main(*sys.argv[1:2])
