"""Engines that are checked and found empty at the end of every test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.types import Batch

Make = Callable[..., Engine]
LATE = 150


@pytest.fixture(params=[False, True], ids=["stepped", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(background: bool) -> Iterator[Make]:
    """Make an engine: replies=, slow_ms= (a pass lasts that long), **config.

    After `LATE` slow passes each takes fifty times as long: what a test is about to cancel still
    runs when the test comes to it, however late.
    """
    made: list[Engine] = []

    def build(*replies: str | list[int], slow_ms: float = 0, **config: Any) -> Engine:
        def on_batch(batch: Batch) -> None:
            sizes.append(len(batch.works))
            time.sleep(slow_ms / 1e3 * (1 if next(passes) < LATE else 50))

        sizes: list[int] = []
        passes = count()
        settings = {"prefix_index": False, "page_size": 4, "capacity_pages": 4096} | config
        backend = MockBackend(
            ForkServeConfig(background=background, **settings), replies=replies, on_batch=on_batch
        )
        backend.sizes = sizes  # type: ignore[attr-defined]
        made.append(Engine(backend))
        return made[-1]

    yield build
    for eng in made:
        eng.check()
        for session in eng.sessions():
            eng.close(session)
        eng.check()
        eng.shutdown()  # rows that were being re-aligned are pinned until here
        stats = eng.stats()
        assert (stats.live_pages, stats.queued, stats.nodes) == (0, 0, 0)
        eng.check()


@pytest.fixture
def eng(make: Make) -> Engine:
    return make()
