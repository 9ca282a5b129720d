"""Whose turn it is when pages or tokens are short: nobody starves, and what fits is served."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forkserve import Engine
from forkserve.control.generation import Generation
from forkserve.control.task import Task

from .harness import assert_nothing_left, cold, core, engine, loop, tick
from .scenarios import OTHER, PROMPT


def task_of(eng: Engine, session: str) -> Task:
    return core(eng).tasks[session, 1]


def rescue(eng: Engine, ahead: str, waiting: Sequence[str] = ()) -> None:
    """As after a tick in which nobody could go on: one is ahead, these wait until it is done."""
    with core(eng).lock:
        task_of(eng, ahead).privileged = True
        for session in waiting:
            loop(eng)._boarding._park(task_of(eng, session))


@pytest.mark.parametrize("tenant", ["a", "b"])
@pytest.mark.parametrize("later", [1, 2, 3])
def test_who_is_ahead_takes_the_pages_of_what_came_later(tenant: str, later: int) -> None:
    """Also where that boards before it in every tick."""
    eng = engine(capacity_pages=10, page_size=4, prefix_index=False)
    assert len(PROMPT) < 16
    one = eng.open(PROMPT, tenant="a").id
    long = eng.start(one, 38 - len(PROMPT))
    tick(eng)
    rescue(eng, one)
    others: list[tuple[list[int], Generation]] = []
    for number in range(later):
        prompt = [number, 1, 2]
        others.append((prompt, eng.start(eng.open(prompt, tenant=tenant).id, 9)))
    assert long.result() == cold(PROMPT, 38 - len(PROMPT))
    for prompt, other in others:
        assert other.result() == cold(prompt, 9)
    assert_nothing_left(eng)


def test_who_waits_takes_nothing_from_who_is_ahead() -> None:
    """Questions that end need no pages; each would let the waiting take the rows of the other."""
    eng = engine(capacity_pages=64)
    old, ahead, asked = (eng.open(p).id for p in (PROMPT, OTHER, [1, 2, 3]))
    waiting, running = eng.start(old, 4), eng.start(ahead, 12)
    tick(eng)
    rescue(eng, ahead, [old])
    for _ in range(3):
        eng.choice_mass(asked, 1, {"a": [1], "b": [2]})
        assert task_of(eng, old).parked
    assert not waiting.done
    assert running.result() == cold(OTHER, 12)
    assert waiting.result() == cold(PROMPT, 4)
    assert_nothing_left(eng)


def test_a_branch_that_is_ahead_does_not_wait_for_a_parent_that_waits_for_it() -> None:
    eng = engine(capacity_pages=64, prefill_chunk=4)
    s = eng.open(PROMPT, prefill=False).id
    kid = eng.fork(s, 1, "kid", [5, 6])
    eng.attempt(s, kid)
    other = eng.start(eng.open(OTHER).id, 40)  # it runs all the time
    running, above = eng.start(s, 3, node=kid), eng.start(s, 3)
    with core(eng).lock:
        core(eng).tasks[s, kid].privileged = True
        loop(eng)._boarding._park(task_of(eng, s))
    assert running.result() == cold([*PROMPT, 5, 6], 3)
    assert not other.done
    assert above.result() == cold(PROMPT, 3)
    other.cancel()
    assert_nothing_left(eng)


@pytest.mark.parametrize("aging_ms", [5.0, 1e9])
def test_a_question_longer_than_its_share_of_a_tick_is_asked_all_the_same(aging_ms: float) -> None:
    """A generation is aboard each tick; the question saves up until its text fits."""
    eng = engine(capacity_pages=128, prefill_chunk=4, aging_ms=aging_ms)
    s, other = eng.open(PROMPT).id, eng.open(OTHER).id
    running = eng.start(other, 60)
    tick(eng)
    shared = list(range(20))
    masses = eng.choice_mass(s, 1, {"a": [*shared, 1], "b": [*shared, 2]})
    assert sum(masses.values()) == pytest.approx(1)
    assert len(running.tokens) < 12
    assert running.result() == cold(OTHER, 60)
    assert_nothing_left(eng)
