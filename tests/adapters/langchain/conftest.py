"""Engines for the chat model: checked, and found empty, at the end of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("langchain_core")

from forkserve.adapters.langchain import ChatForkServe

from .rules import RuleEngine


@pytest.fixture
def engine() -> Iterator[RuleEngine]:
    made = RuleEngine()
    yield made
    made.check()
    for session in made.sessions():
        made.close(session)
    stats = made.stats()
    assert (stats.live_pages - stats.index_pages, stats.queued, stats.nodes) == (0, 0, 0)
    made.shutdown()


@pytest.fixture
def model(engine: RuleEngine) -> ChatForkServe:
    return ChatForkServe(engine=engine, model="mock")
