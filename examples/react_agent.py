"""A ReAct agent with real tools: a library's catalogue in SQLite, and a slow desk.

Run it:  python examples/react_agent.py          (the mock, with scripted replies)
         python examples/react_agent.py smollm2  (needs the `engine` extra)
"""

from __future__ import annotations

import sqlite3
import sys
import time
from contextlib import closing

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.react import (
    Committed,
    Final,
    ReactAgent,
    Speculated,
    TextDelta,
    ToolResult,
)
from forkserve.engine.constraints import ChoiceConstraint

CALLS = tuple(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "{value}"}}}}\n</tool_call>'
    for name, key, value in (
        ("find", "title", "The Lighthouse Keeper"),
        ("desk", "question", "Where is The Lighthouse Keeper?"),
    )
)
ANSWER = "It stands on shelf 12 and is not on loan."


def find(title: str) -> dict[str, object]:
    """Look a book up in the catalogue.

    title: the book's title, or a part of it
    """
    with closing(sqlite3.connect(":memory:")) as books:
        books.execute("CREATE TABLE books (title TEXT, shelf INTEGER, on_loan INTEGER)")
        books.execute("INSERT INTO books VALUES ('The Lighthouse Keeper', 12, 0)")
        row = books.execute(
            "SELECT title, shelf, on_loan FROM books WHERE title LIKE ?", (f"%{title}%",)
        ).fetchone()
    if row is None:
        raise LookupError(f"no book is called {title!r}")
    time.sleep(1.0)  # a catalogue across the network
    return {"title": row[0], "shelf": row[1], "on_loan": bool(row[2])}


async def desk(question: str) -> str:
    """Ask the librarian, who takes a while.

    question: what to ask
    """
    import asyncio

    await asyncio.sleep(0.5)
    return "Shelf 12, on the left."


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M; a thread of its own works while tools run."""
    config = ForkServeConfig(capacity_pages=2048, background=True)
    if name == "mock":
        from forkserve.engine import MockBackend

        return Engine(MockBackend(config, replies=(CALLS[0], ANSWER)))
    from forkserve.engine import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock") -> str:
    """One question; prints what happens and returns the answer."""
    with make_engine(name) as engine:
        tokenizer, eos = engine.backend.tokenizer, engine.backend.info.eos_ids

        def params(turn: int) -> SamplingParams:
            # A model this small needs help: its first turn has to be one of two calls.
            first = ChoiceConstraint(tokenizer, CALLS, eos)
            return SamplingParams(constraint=first if turn == 0 else None)

        agent = ReactAgent(
            engine,
            [find, desk],
            system="You help readers of a library. Answer in one sentence.",
            params=params,
            max_tokens=200,
        )
        for event in agent.stream("Where is the book The Lighthouse Keeper?"):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Speculated):
                print(f"\n  [{event.branch}: {event.admitted} tokens at {event.at}]", end="")
            elif isinstance(event, ToolResult):
                print(f"\n  -> {event.observation.text}  ({event.observation.ms:.0f} ms)")
            elif isinstance(event, Committed):
                stats = event.stats
                print(f"  {event.hit.value}: {stats.cached} of {stats.prompt} tokens were there")
            elif isinstance(event, Final):
                total = event.result.stats
                print(f"\n{total.prefilled} tokens prefilled for {total.prompt} in the prompts")
                return event.result.text
    raise AssertionError("a run ends with Final")


if __name__ == "__main__":
    main(*sys.argv[1:])
