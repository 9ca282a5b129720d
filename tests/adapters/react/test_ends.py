"""However a run ends, nothing is left: pages, branches, tasks, threads."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from forkserve import Engine
from forkserve.adapters.react import (
    Committed,
    Final,
    ReactAgent,
    Speculated,
    ToolCalled,
    ToolResult,
    ToolStarted,
)
from forkserve.adapters.tools import Tool
from forkserve.errors import BackendError
from tests.waiting import until

from .agents import gaze
from .conftest import Make, spoken

REPLIES = [
    "So." + spoken([("gaze", {"at": "a"}), ("rest", {})]),
    "Well." + spoken({"gaze": {"at": "b"}}),
]


async def rest() -> str:
    """Rest."""
    await asyncio.sleep(0.35)
    return "rested"


def kinds() -> list[Callable[[Any], bool]]:
    def nth(kind: type, count: int) -> Callable[[Any], bool]:
        left = [count]

        def matches(event: Any) -> bool:
            left[0] -= isinstance(event, kind)
            return left[0] == 0

        return matches

    return [
        nth(object, 1),
        nth(object, 5),
        nth(ToolCalled, 1),
        nth(ToolStarted, 2),
        nth(Speculated, 1),
        nth(ToolResult, 1),
        nth(ToolResult, 2),
        nth(Committed, 1),
        nth(Committed, 2),
        nth(Final, 1),
    ]


@pytest.mark.parametrize("place", range(10))
def test_leaving_a_stream(make: Make, place: int, cancels: list[int]) -> None:
    eng = make(*REPLIES, "Done.")
    run = ReactAgent(eng, [gaze, rest]).stream("Go.")
    stop = kinds()[place]
    for event in run:
        if stop(event):
            break
    run.close()
    assert len(cancels) <= 1
    assert eng.sessions() == []
    aborts = eng.stats().aborts
    run.close()
    assert (eng.stats().aborts, len(cancels)) == (aborts, len(set(cancels)))


@pytest.mark.parametrize("place", range(10))
async def test_leaving_an_async_stream(make: Make, place: int, cancels: list[int]) -> None:
    eng = make(*REPLIES, "Done.")
    before = asyncio.all_tasks()
    run = ReactAgent(eng, [gaze, rest]).astream("Go.")
    stop = kinds()[place]
    async for event in run:
        if stop(event):
            break
    await run.aclose()
    assert len(cancels) <= 1
    assert eng.sessions() == []
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7])
async def test_cancelling_a_task(make: Make, after: float, twice: bool, cancels: list[int]) -> None:
    ended: list[str] = []

    async def nap() -> str:
        """Nap."""
        try:
            await asyncio.sleep(0.4)
        finally:
            await asyncio.sleep(0)
            ended.append("nap")
        return "slept"

    eng = make(spoken([("nap", {}), ("nap", {})]) + "x" * 30, "y" * 40, slow_ms=1)
    before = asyncio.all_tasks()
    task = asyncio.create_task(ReactAgent(eng, [nap]).arun("Go."))
    await asyncio.sleep(after)
    over = task.done()
    task.cancel()
    if twice:
        await asyncio.sleep(0)
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled() or over
    await until(lambda: asyncio.all_tasks() == before)
    assert len(cancels) <= 1
    assert eng.sessions() == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_failing_engine(make: Make, how: str) -> None:
    eng = make(spoken({"gaze": {"at": "a"}}), "Done.")
    agent = ReactAgent(eng, [gaze], speculate=False)

    def broken(batch: Any) -> None:
        raise BackendError("the mock was told to fail")

    def fail(event: Any) -> None:
        if isinstance(event, Committed):  # every pass: the next may be that of the tail alone
            eng.backend._on_batch = broken  # type: ignore[attr-defined]

    async def consume() -> None:
        async for event in agent.astream("Go."):
            fail(event)

    def consume_in_thread() -> None:
        for event in agent.stream("Go."):
            fail(event)

    run = consume_in_thread if how == "sync" else lambda: asyncio.run(consume())
    with pytest.raises(BackendError, match="told to fail"):
        run()
    assert eng.sessions() == []


def test_speculation_that_fails_is_no_failure(make: Make) -> None:
    eng = make(spoken({"gaze": {"at": "a"}}), "Done.", max_context=420)
    agent = ReactAgent(eng, [gaze], error_prefix="Error: " + "very " * 300)
    result = agent.run("Go.")
    assert result.text == "Done."
    assert "ContextOverflow" in result.turns[1].stats.refused


# --- many at once --------------------------------------------------------------------------------


def chaos(draw: random.Random) -> list[Tool]:
    """Tools that fail, dawdle and succeed at random."""

    def odd(n: int) -> str:
        """A sync tool."""
        time.sleep(draw.random() * 0.004)
        if draw.random() < 0.3:
            raise RuntimeError(f"bad luck with {n}")
        return f"ok {n}"

    async def even(n: int) -> str:
        """An async tool."""
        await asyncio.sleep(draw.random() * 0.004)
        if draw.random() < 0.3:
            raise RuntimeError(f"bad luck with {n}")
        return f"ok {n}"

    return [Tool.of(odd, timeout_s=0.003), Tool.of(even, timeout_s=0.003)]


CHAOS = [spoken([("odd", {"n": 1}), ("even", {"n": 2})]), spoken({"even": {"n": 3}}), "Done."]


def agents(eng: Engine, draw: random.Random) -> ReactAgent:
    mock = eng.backend

    def scripted(spec: Any) -> int:
        """A reply by turn rather than by order: many runs are interleaved."""
        key = (spec.seed, spec.position - spec.step)
        turn = turns.setdefault(spec.seed, {}).setdefault(key, len(turns[spec.seed]))
        ids = texts[min(turn, len(texts) - 1)]
        return ids[spec.step] if spec.step < len(ids) else mock.info.eos_ids[0]

    turns: dict[int, dict[Any, int]] = {}
    texts = [mock.tokenizer.encode(text) for text in CHAOS]
    mock._scripted = scripted  # type: ignore[attr-defined]
    return ReactAgent(eng, chaos(draw), p_error=0.3)


@pytest.mark.slow
def test_200_runs_in_threads(make: Make) -> None:
    draw = random.Random(7)
    eng = make(capacity_pages=20_000)
    agent = agents(eng, draw)
    errors: list[BaseException] = []

    def work(count: int) -> None:
        try:
            for number in range(count):
                run = agent.stream(f"Task {number}")
                leave = draw.randrange(400)
                for place, event in enumerate(run):
                    if place == leave:
                        break
                    if isinstance(event, Final):
                        assert event.result.text == "Done."
                run.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(25,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(agent._times._times) == 2


@pytest.mark.slow
async def test_200_async_runs(make: Make) -> None:
    draw = random.Random(8)
    eng = make(capacity_pages=20_000)
    agent = agents(eng, draw)
    before = asyncio.all_tasks()
    ends = {"done": 0, "cancelled": 0}

    async def work(number: int) -> None:
        task = asyncio.create_task(agent.arun(f"Task {number}"))
        if draw.random() < 0.4:
            await asyncio.sleep(draw.random() * 0.5)
            task.cancel()
        try:
            assert (await task).text == "Done."
            ends["done"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1

    for batch in range(10):
        await asyncio.gather(*(work(batch * 20 + n) for n in range(20)))
    await until(lambda: asyncio.all_tasks() == before)
    assert sum(ends.values()) == 200
    assert ends["done"] > 20
