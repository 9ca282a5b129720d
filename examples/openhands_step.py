"""An OpenHands agent on an engine in this process: a step, a fork from an event, a step back.

Run it:  python examples/openhands_step.py          (the mock, with scripted replies)
         python examples/openhands_step.py smollm2  (needs the `engine` extra)
Needs Python 3.12 and the extra `openhands`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it is fetched at each import
os.environ.setdefault("OPENHANDS_SUPPRESS_BANNER", "1")

from openhands.sdk import Agent, Conversation, Tool
from openhands.sdk.event import ObservationEvent
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.openhands import OpenHandsAdapter

SYSTEM = "You look after a small library. Look a book up before you answer. " * 4


def says(name: str, **arguments: str) -> str:
    """A call as models write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


REPLIES = (
    "I look it up. " + says("find", title="The Lighthouse Keeper"),
    "It stands on shelf 12.",
    "It is not on loan.",
    "Shelf 12, on the left.",
)


class FindAction(Action):
    """What to look for."""

    title: str


class FindObservation(Observation):
    """Where it is."""


class _Find(ToolExecutor):
    def __call__(self, action: FindAction, conversation: Any = None) -> FindObservation:
        time.sleep(0.5)  # a catalogue across the network
        return FindObservation.from_text(f"{action.title}: shelf 12, not on loan")


class FindTool(ToolDefinition[FindAction, FindObservation]):
    """The catalogue."""

    @classmethod
    def create(cls, conv_state: Any = None, **params: Any) -> Sequence[FindTool]:
        return [
            cls(
                description="Find a book in the catalogue.",
                action_type=FindAction,
                observation_type=FindObservation,
                executor=_Find(),
            )
        ]


register_tool("FindTool", FindTool)


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M; a thread of its own works while the tool runs."""
    config = ForkServeConfig(capacity_pages=2048, background=True)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config, replies=REPLIES))
    from forkserve.engine import LocalBackend

    return Engine(LocalBackend(config, name))


def answer(conversation: Any) -> str:
    """The last thing that was said."""
    event = list(conversation.state.events)[-1]
    message = getattr(event, "llm_message", None)
    return message.content[0].text if message is not None else type(event).__name__


def main(name: str = "mock") -> None:
    """One question, then two other ways on from the tool's result."""
    logging.getLogger("openhands").setLevel(logging.ERROR)
    os.environ.setdefault("ALLOW_SHORT_CONTEXT_WINDOWS", "1")  # SmolLM2 reads 8192 tokens
    with make_engine(name) as engine, OpenHandsAdapter(engine, max_tokens=96) as adapter:
        llm = adapter.llm(num_retries=0)
        agent = Agent(
            llm=llm,
            tools=[Tool(name="FindTool")],
            include_default_tools=[],
            system_prompt=SYSTEM,
            condenser=adapter.condenser(llm),
        )
        talk = Conversation(
            agent,
            workspace=tempfile.mkdtemp(),
            callbacks=[adapter.watch()],
            visualizer=None,
            max_iteration_per_run=3,
        )
        talk.send_message("Where is the book The Lighthouse Keeper?")
        talk.run()
        print("answer:", answer(talk))
        stats = adapter.stats
        print(f"{stats.cached} of {stats.prompt} prompt tokens were there")
        print(f"{stats.speculated} were speculated on while the tool ran")

        results = [e for e in talk.state.events if isinstance(e, ObservationEvent)]
        here = results[0].id if results else talk.state.leaf_event_id
        rows = engine.stats().prefilled_tokens.committed
        fork = adapter.fork(talk, from_event_id=here)
        fork.send_message("Is it on loan?")
        fork.run()
        print("fork:  ", answer(fork))

        talk.navigate_to(here)
        talk.send_message("Where exactly?")
        talk.run()
        print("back:  ", answer(talk))
        more = engine.stats().prefilled_tokens.committed - rows
        print(f"{more} rows for both, in {engine.stats().sessions} session")


if __name__ == "__main__":
    main(*sys.argv[1:2])
