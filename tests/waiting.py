"""Waiting for what another thread, task or process does, however slow the machine is.

A limit here says when a test hangs, never how fast anything is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forkserve import Engine

__all__ = ["HANGS_S", "at_rest", "held", "until", "wait_for"]

HANGS_S = 240.0


def wait_for(condition: Callable[[], object], what: str = "it never happened") -> None:
    """Return as soon as `condition()` holds; the test fails with `what` if it never does."""
    end = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


async def until(condition: Callable[[], object], what: str = "it never happened") -> None:
    """`wait_for` in a task: the others go on meanwhile."""
    end = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.001)


def at_rest(eng: Engine) -> None:
    """Wait until no pass runs and no copy of rows is to run: both hold pages that nobody owns."""
    core = eng._core
    eng._loop.run_until(lambda: not core.flying and not core.in_flight and not core.pending)


@contextmanager
def held(eng: Engine) -> Iterator[None]:
    """No pass departs in the block: what is started in it departs together afterwards."""
    core = eng._core
    with core.lock:
        core.waiting += 1
    try:
        yield
    finally:
        with core.lock:
            core.waiting -= 1
            core.changed.notify_all()
