"""However a search ends, no branch and no page stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forkserve.adapters.tot import (
    Budget,
    Trunks,
    amcts,
    atot_bfs,
    atot_dfs,
    beam,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.adapters.tot import run as running
from forkserve.errors import BackendError, ContextOverflow, OutOfPages, SessionError
from tests.waiting import HANGS_S, until

from .conftest import Letters, Make, bare, empty, speller

MODES = ["template", "append"]
stepped = pytest.mark.parametrize("background", [False], indirect=True)  # one is enough


class Broken(Exception):
    """What a task of these tests raises."""


# --- budgets -------------------------------------------------------------------------------------


@stepped
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("search", [tot_bfs, tot_dfs, beam, mcts])
def test_nodes(make: Make, search: Callable[..., Any], mode: str) -> None:
    eng = make(speller("abcd"))
    for limit in (1, 4, 5, 10):
        found = search(eng, Letters(), "x", mode=mode, budget=Budget(max_nodes=limit))
        assert sum(1 for _ in found.tree.walk()) - 1 <= limit
        if found.stopped == "nodes":
            assert found.best is not None
    assert found.trace


@stepped
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("search", [tot_bfs, tot_dfs, beam, mcts])
def test_tokens_are_a_hard_limit(make: Make, search: Callable[..., Any], mode: str) -> None:
    eng = make(speller("abcd", lambda word: 100 + len(word)))
    whole = search(eng, Letters(), "x", mode=mode)
    steps = []
    for limit in (1, 5, 20, 60, 150, 10_000):
        found = search(eng, Letters(), "x", mode=mode, budget=Budget(max_tokens=limit))
        assert found.usage.decoded <= limit
        assert found.stopped == "tokens" or found.text == whole.text
        steps.append(len(found.trace))
    assert steps == sorted(steps)
    assert steps[0] == 0 < steps[-1]
    assert search(eng, Letters(), "x", budget=Budget(max_tokens=1)).best is None


class Clock:
    """Time that passes when it is looked at."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_deadline(make: Make, mode: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eng = make(speller("abcd"))

    def run(limit: float) -> Any:
        options: dict[str, Any] = {"mode": mode, "budget": Budget(deadline_s=limit)}
        if kind == "sync":
            return tot_bfs(eng, Letters(), "x", **options)
        return asyncio.run(atot_bfs(eng, Letters(), "x", **options))

    assert run(0).stopped == "deadline"
    assert run(3600).stopped == "exhausted"
    monkeypatch.setattr(running, "time", Clock(0.1))
    stopped = run(1.0)  # the clock is looked at after every pass: some passes, then it is over
    assert stopped.stopped == "deadline"
    assert stopped.usage.decoded > 0
    eng.check()


@stepped
def test_a_budget_keeps_the_best_so_far(make: Make) -> None:
    eng = make(speller("abc", lambda word: word.count("b")))
    with eng.session("So far. ") as s:
        found = tot_bfs(eng, Letters(), "x", session=s, budget=Budget(max_nodes=4), beam=1)
        assert found.stopped == "nodes"
        assert found.text == "b\na"
        assert s.text == "So far. b\na\n"
        bare(eng, s.id)


# --- faults --------------------------------------------------------------------------------------


def broken(method: str, after: int) -> Letters:
    """A task of which one method raises, after so many calls."""
    task, calls = Letters(), [0]
    whole = getattr(task, method)

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise Broken(method)
        return whole(*args)

    setattr(task, method, fails)
    return task


@stepped
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "method",
    [
        "prompt",
        "constraint",
        "thoughts",
        "value",
        "done",
        "check",
        "key",
        "write",
        "ballot",
        "vote",
    ],
)
def test_what_a_task_raises_leaves_nothing_behind(make: Make, method: str, mode: str) -> None:
    eng = make(speller("abc", lambda word: 1))
    options: dict[str, Any] = {"evaluate": "vote"} if method in ("ballot", "vote") else {}
    raised = 0
    for search in (tot_bfs, tot_dfs, mcts, beam):
        if search is mcts and options:
            continue
        for after in (0, 1, 4):
            task = broken(method, after)
            with eng.session("Mine. ") as s, Trunks(eng, task) as trunks:
                kept = {"trunks": trunks} if mode == "template" else {"session": s}
                try:
                    search(eng, task, "x", mode=mode, **kept, **options)
                except Broken:
                    raised += 1
                    assert s.text == "Mine. "
                for session in eng.sessions():
                    bare(eng, session)
                eng.check()
            empty(eng)
    assert raised >= 3 or (method, mode) == ("write", "template")


@pytest.mark.parametrize("after", [0, 3, 9])
@pytest.mark.parametrize("mode", MODES)
def test_a_backend_that_fails(make: Make, mode: str, after: int) -> None:
    eng = make(speller("abc"))
    execute, passes = eng.backend.execute, [0]

    def fails(batch: Any) -> Any:
        passes[0] += 1
        if passes[0] > after:
            raise RuntimeError("no device")
        return execute(batch)

    eng.backend.execute = fails  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="no device"):
        tot_bfs(eng, Letters(), "x", mode=mode)


def test_an_interrupt_between_steps(make: Make) -> None:
    eng = make(speller("abc"))

    def stop(step: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tot_bfs(eng, Letters(), "x", on_step=stop)
    with eng.session("Mine. ") as s:
        with pytest.raises(KeyboardInterrupt):
            mcts(eng, Letters(), "x", session=s, on_step=stop)
        bare(eng, s.id)
        assert s.text == "Mine. "


def test_a_pool_that_is_too_small(make: Make) -> None:
    eng = make(speller("abcdefgh"), capacity_pages=4)
    with pytest.raises(OutOfPages):
        tot_bfs(eng, Letters(), "x" * 60)


def test_a_small_pool_changes_nothing(make: Make) -> None:
    """Rows are evicted and come back; what is said stays."""
    options: dict[str, Any] = {"beam": 4, "n_evaluate": 2}
    small, large = make(speller("abcd"), capacity_pages=24), make(speller("abcd"))
    one = tot_bfs(small, Letters(), "x" * 40, **options)
    assert one.tree.draw() == tot_bfs(large, Letters(), "x" * 40, **options).tree.draw()


def test_a_context_that_is_too_short(make: Make) -> None:
    eng = make(speller("abc"), max_context=40)
    with pytest.raises(ContextOverflow):
        tot_bfs(eng, Letters(), "x" * 30)
    with pytest.raises(ContextOverflow):
        tot_bfs(eng, Letters(), "x", mode="template")


def test_a_session_closed_under_the_search(make: Make) -> None:
    eng = make(speller("abc"))
    s = eng.session("Mine. ")
    with pytest.raises(SessionError):
        tot_bfs(eng, Letters(), "x", session=s, on_step=lambda step: s.close())
    trunks = Trunks(eng, task := Letters())
    trunks.close()
    with pytest.raises(SessionError, match="trunks are closed"):
        tot_bfs(eng, task, "x", mode="template", trunks=trunks)


# --- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("search", [atot_bfs, atot_dfs, amcts])
def test_cancelling_the_task(make: Make, search: Callable[..., Any], mode: str) -> None:
    eng = make(speller("abcd"))

    async def main(after: int) -> None:
        reached, go = threading.Event(), threading.Event()
        execute, passes = eng.backend.execute, [0]

        def count(batch: Any) -> Any:
            passes[0] += 1
            if passes[0] == after:
                reached.set()
                assert go.wait(HANGS_S)
            return execute(batch)

        eng.backend.execute = count  # type: ignore[method-assign]
        task = asyncio.create_task(search(eng, Letters(), "x", mode=mode))
        await until(reached.is_set)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        eng.backend.execute = execute  # type: ignore[method-assign]
        assert eng.sessions() == []

    for after in (1, 2, 5, 12):
        asyncio.run(main(after))
        eng.check()
        empty(eng)


def test_many_searches_at_once_with_failures(make: Make) -> None:
    """Some end, some fail, some are cancelled; in threads and in tasks."""
    eng = make(speller("abc", lambda word: word.count("b")), prefix_index=False)

    async def one(number: int) -> None:
        task = broken("value", 5) if number % 3 == 0 else Letters()
        options: dict[str, Any] = {"mode": MODES[number % 2], "n_evaluate": 1}
        work = asyncio.create_task(atot_bfs(eng, task, str(number), **options))
        if number % 3 == 1:
            await asyncio.sleep(0.002 * number)
            work.cancel()
        try:
            found = await work
            assert found.text == "b\nb\nb"
        except (Broken, asyncio.CancelledError):
            assert number % 3 < 2

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(18)))

    faults: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            assert tot_dfs(eng, Letters(), str(number)).best is not None
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    asyncio.run(main())
    for each in threads:
        each.join()
    assert faults == []
    empty(eng)
