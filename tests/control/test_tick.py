"""What the control plane does for a token, in instructions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.engine import MockBackend
from forkserve.types import Batch, BatchResult, WorkResult
from tests.instructions import instructions

WORKS, TICKS = 16, 8
FREE = SamplingParams(ignore_eos=True)


class Idle(MockBackend):
    """A pass that costs nothing; how many works it had."""

    works = 0

    def execute(self, batch: Batch) -> BatchResult:
        self.works = len(batch.works)
        return BatchResult([WorkResult(97) for _ in batch.works])


def sessions(eng: Engine) -> None:
    for i in range(WORKS):
        handle = eng.open([i, *[1] * 40])
        eng.start(handle.id, 100, params=FREE)


def branches(eng: Engine) -> None:
    handle = eng.open([1] * 40)
    for i in range(WORKS):
        child = eng.fork(handle.id, handle.tip, "b", [i, 2, 3])
        eng.attempt(handle.id, child)
        eng.start(handle.id, 100, node=child, params=FREE)


@pytest.mark.parametrize("start", [sessions, branches])
def test_a_token_costs_some_two_thousand_instructions(start: Callable[[Engine], None]) -> None:
    backend = Idle(ForkServeConfig())
    eng = Engine(backend)
    start(eng)

    def ticks() -> None:
        for _ in range(TICKS):
            eng._loop.tick(wake=True)

    ticks()
    assert backend.works == WORKS
    assert instructions(ticks) < 2_450 * WORKS * TICKS
    eng.shutdown()
