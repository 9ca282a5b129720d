"""Memory runs out in the engine's own tables, beside any pass: no token changes, nothing dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import forkserve.control.boarding as boarding_module
import forkserve.control.loop as loop_module
from forkserve import Engine
from forkserve.control.core import Core
from forkserve.control.fairness import FairMeter
from forkserve.control.landing import Landing
from forkserve.control.scheduler import Scheduler
from forkserve.errors import BackendError
from forkserve.tree.pool import PagePool
from tests.waiting import at_rest

from .harness import assert_nothing_left, assert_same_as_cold, cold, core, engine, loop
from .scenarios import OTHER, PROMPT, WRAP

BOTH = pytest.mark.parametrize("background", [False, True])
# Where a step may find no memory: all of it but the pass and what one work needs.
SPOTS: dict[str, tuple[Any, str]] = {
    "expire": (Core, "expire"),
    "sweep": (Core, "sweep"),
    "share": (boarding_module, "share_prompts"),
    "plan": (Scheduler, "plan"),
    "tick": (FairMeter, "tick"),
    "pin": (PagePool, "pin"),
    "care": (loop_module, "care"),
    "land": (Landing, "land"),
    "note": (Landing, "_note_miss"),
}


@contextmanager
def short_of_memory(spot: str, at: Callable[[int], bool]) -> Iterator[list[int]]:
    """The calls of a spot for whose number `at` holds find no memory."""
    target, name = SPOTS[spot]
    real, calls = getattr(target, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if at(calls[0]):
            raise MemoryError("no memory")
        return real(*args, **options)

    with patch.object(target, name, call):
        yield calls


def work(eng: Engine) -> list[list[int]]:
    """Some of everything."""
    a, b = eng.open(PROMPT).id, eng.open(OTHER).id
    kid = eng.fork(a, 1, "k", WRAP)
    eng.speculate(a, kid)
    eng.drain_slack()
    said = eng.generate_many([a, b], 4)
    eng.commit(b, eng.tip(b), WRAP)
    return [*said, eng.generate(b, 3)]


@BOTH
@pytest.mark.parametrize("spot", SPOTS)
@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_a_step_that_finds_no_memory_is_tried_again(
    spot: str, number: int, background: bool
) -> None:
    first, second = cold(PROMPT, 4), cold(OTHER, 4)
    want = [first, second, cold([*OTHER, *second, *WRAP], 3)]
    eng = engine(background=background, prefill_chunk=8)
    with short_of_memory(spot, lambda n: n == number):
        assert work(eng) == want
    for s in eng.sessions():
        assert_same_as_cold(eng, s)
    at_rest(eng)
    if not background:
        assert_nothing_left(eng)
    eng.shutdown()
    assert core(eng).pool.live_pages == 0


@BOTH
@pytest.mark.parametrize("spot", ["share", "plan", "pin", "land"])
def test_memory_that_does_not_come_back_ends_the_works_and_not_the_engine(
    spot: str, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    eng = engine(background=background)
    s = eng.open(PROMPT).id
    with (
        short_of_memory(spot, lambda n: True),
        caplog.at_level(logging.WARNING),
        pytest.raises(BackendError, match="own tables in 3 steps: MemoryError") as caught,
    ):
        eng.generate(s, 3)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert "no memory for the engine's own tables" in caplog.text
    assert not core(eng).tasks
    assert eng.stats().failed_passes >= 3
    assert_same_as_cold(eng, s)
    eng.check()
    eng.shutdown()


@BOTH
def test_a_step_that_fails_otherwise_is_a_typed_error(background: bool) -> None:
    eng = engine(background=background)
    s = eng.open(PROMPT).id
    bug = patch.object(loop(eng)._boarding, "depart", side_effect=KeyError("a bug"))
    with bug, pytest.raises(BackendError) as caught:
        eng.generate(s, 3)
    if not background:
        assert isinstance(caught.value.__cause__, KeyError)
        assert_same_as_cold(eng, s)
        assert_nothing_left(eng)
    eng.shutdown()


def test_a_generation_that_could_not_be_queued_does_not_hold_its_place() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    eng.commit(s, 1, WRAP)  # its tail waits for a generation
    with patch.object(Scheduler, "submit", side_effect=MemoryError), pytest.raises(MemoryError):
        eng.start(s, 3)
    assert not core(eng).tasks
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)
