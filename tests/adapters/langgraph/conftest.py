"""Engines under a LangGraph adapter: at the end of every test nothing may be left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("langgraph")

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langgraph import ForkServe
from forkserve.engine import MockBackend
from tests.waiting import at_rest

Make = Callable[..., ForkServe]


@pytest.fixture(params=[False, True], ids=["stepped", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(background: bool) -> Iterator[Make]:
    """Make an adapter on an engine of its own: **options of ForkServe, config= of the engine.

    slow_ms: each pass lasts that long.
    """
    made: list[ForkServe] = []

    def build(
        *, config: dict[str, Any] | None = None, slow_ms: float = 0, **options: Any
    ) -> ForkServe:
        settings = {"page_size": 4, "capacity_pages": 8192, "prefix_index": False}
        backend = MockBackend(
            ForkServeConfig(**(settings | {"background": background} | (config or {}))),
            on_batch=lambda batch: time.sleep(slow_ms / 1e3),
        )
        made.append(ForkServe(Engine(backend), **options))
        return made[-1]

    yield build
    for fs in made:
        fs.engine.check()
        assert fs.stats["running"] == 0
        for live in list(fs._registry.sessions.values()):
            assert live.users == 0
            fs._registry.close(live)
        assert not fs._registry.tasks
        assert not fs._sweeper._members
        assert not fs.engine.sessions()
        at_rest(fs.engine)  # rows that are being copied are pinned until the next pass
        stats = fs.engine.stats()
        assert (stats.live_pages - stats.index_pages, stats.queued, stats.nodes) == (0, 0, 0)
        fs.engine.check()
        fs.engine.shutdown()


@pytest.fixture
def fs(make: Make) -> ForkServe:
    return make()
