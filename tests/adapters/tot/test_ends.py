"""However a search ends, no branch and no page stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from examples.game24 import Game24
from forkserve import Engine, SamplingParams
from forkserve.adapters.tot import (
    Budget,
    State,
    TaskError,
    Trunks,
    UnreadableReply,
    amcts,
    atot_bfs,
    atot_dfs,
    beam,
    best_of_n,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.adapters.tot import run as running
from forkserve.engine import MockBackend
from forkserve.errors import BackendError, ConfigError, ContextOverflow, OutOfPages, SessionError

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
        reached, execute, passes = asyncio.Event(), eng.backend.execute, [0]
        loop = asyncio.get_running_loop()

        def count(batch: Any) -> Any:
            passes[0] += 1
            if passes[0] == after:
                loop.call_soon_threadsafe(reached.set)
            return execute(batch)

        eng.backend.execute = count  # type: ignore[method-assign]
        task = asyncio.create_task(search(eng, Letters(), "x", mode=mode))
        await reached.wait()
        task.cancel()
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


# --- what replies and tasks may not say ----------------------------------------------------------


@stepped
def test_replies_that_cannot_be_read(make: Make) -> None:
    eng = make(speller("ab", lambda word: "no idea" if word == "a" else 3))
    found = tot_bfs(eng, Letters(), "x", depth=1)
    assert [t.score for t in found.tree.children] == [0.0, 3.0]
    assert found.tree.children[0].values == (None, None, None)
    assert found.trace[0].unreadable == 3
    lenient = tot_bfs(eng, Letters(), "x", depth=1, unreadable=5.0)
    assert lenient.text == "a"
    with pytest.raises(UnreadableReply, match="no idea"):
        tot_bfs(eng, Letters(), "x", unreadable="raise")


@stepped
def test_votes_that_cannot_be_read(make: Make) -> None:
    votes = iter(["2", "9", "none"])

    def reply(prompt: str) -> str:
        return next(votes) if "[vote" in prompt else "a\nb"

    found = tot_bfs(make(reply), Letters(), "x", depth=1, evaluate="vote")
    assert [t.score for t in found.tree.children] == [0.0, pytest.approx(1 / 3)]
    assert found.trace[0].unreadable == 2


@stepped
def test_a_model_without_a_thought(make: Make) -> None:
    eng = make(lambda _: "\n \n")
    for search in (tot_bfs, tot_dfs, beam, mcts):
        found = search(eng, Letters(), "x")
        assert (found.best, found.answers, found.stopped) == (None, [], "exhausted")
        assert found.text == ""
        assert not found.solved
    assert best_of_n(eng, Letters(), "x").best is None


@stepped
@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("prompt", None, r"prompt\('propose', state\) returned None; it must be text or token ids"),
        ("prompt", ["a"], "must be text or token ids"),
        ("opening", 3, "must be text, token ids or chat messages"),
        ("write", 3.5, "must be text or token ids"),
        ("thoughts", "abc", "must be a list of strings"),
        ("thoughts", ["a", 3], "returned 3; it must be non-empty strings"),
        ("thoughts", [""], "must be non-empty strings"),
        ("value", "good", "must be a finite number"),
        ("value", float("nan"), "must be a finite number"),
        ("value", True, "must be a finite number"),
        ("done", None, "must be True or False"),
        ("check", 1, "must be True or False or None"),
        ("key", [], "must be something hashable"),
        ("constraint", "abc", "must be a constraint or None"),
    ],
)
def test_wrong_returns(make: Make, method: str, value: Any, message: str) -> None:
    task = Letters()
    setattr(task, method, lambda *_: value)
    with pytest.raises(TaskError, match=message):
        tot_bfs(make(speller("ab")), task, "x", depth=1)


@stepped
@pytest.mark.parametrize("value", [-1, 2, "1", True])
def test_wrong_votes(make: Make, value: Any) -> None:
    task = Letters()
    task.vote = lambda *_: value  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="an index below 2 or None"):
        tot_bfs(make(speller("ab")), task, "x", evaluate="vote")


@stepped
def test_missing_methods_are_named(make: Make) -> None:
    from forkserve.adapters.tot import Task

    class Nothing(Task):
        pass

    class Asks(Task):
        def prompt(self, role: str, state: State) -> str:
            return "?"

    eng = make(lambda _: "a\nb")
    shallow = Letters()
    shallow.depth = 0
    with pytest.raises(TaskError, match=r"Letters\.depth=0 must be a whole number >= 1"):
        tot_bfs(eng, shallow, "x")
    with pytest.raises(TaskError, match=r"Nothing\.prompt"):
        tot_bfs(eng, Nothing(), "x")
    with pytest.raises(TaskError, match=r"Asks\.trunk\('propose'\)"):
        tot_bfs(eng, Asks(), "x", mode="template")
    with pytest.raises(TaskError, match=r"Asks\.ballot\(states\)"):
        tot_bfs(eng, Asks(), "x", evaluate="vote")
    with pytest.raises(TaskError, match=r"Asks\.score\(state\)"):
        tot_bfs(eng, Asks(), "x", evaluate="score")


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (tot_bfs, {"mode": "both"}, "mode='both' must be 'append' or 'template'"),
        (tot_bfs, {"generate": "guess"}, "generate='guess' must be"),
        (tot_bfs, {"evaluate": "x"}, "evaluate='x' must be"),
        (tot_bfs, {"n_evaluate": 0}, "n_evaluate=0 must be a whole number >= 1"),
        (tot_bfs, {"n_evalaute": 2}, "unknown option 'n_evalaute'; did you mean 'n_evaluate'"),
        (tot_bfs, {"beam": 0}, "beam=0 must be"),
        (tot_bfs, {"beam": True}, "beam=True must be"),
        (tot_bfs, {"select": "best"}, "select='best'"),
        (tot_bfs, {"budget": 5}, "budget=5 must be a Budget"),
        (tot_bfs, {"unreadable": float("nan")}, "unreadable=nan"),
        (tot_bfs, {"params": {"value": 3}}, "params of value"),
        (tot_bfs, {"max_tokens": {"vote": 0}}, "max_tokens=0 of vote"),
        (tot_bfs, {"params": {"values": SamplingParams()}}, "params: no role 'values'"),
        (tot_bfs, {"evaluate": "logprob"}, "needs generate='sample'"),
        (tot_bfs, {"generate": "sample", "params": SamplingParams()}, "at temperature 0"),
        (tot_bfs, {"depth": 0}, "depth=0"),
        (tot_dfs, {"prune": float("nan")}, "prune=nan"),
        (tot_dfs, {"branch": 0}, "branch=0"),
        (beam, {"width": 0}, "width=0"),
        (mcts, {"iterations": 0}, "iterations=0"),
        (mcts, {"exploration": -1}, "exploration=-1"),
        (mcts, {"evaluate": "vote"}, "compares siblings only"),
        (best_of_n, {"n": 0}, "n=0"),
        (best_of_n, {"depth": 2}, "best_of_n sets depth itself"),
    ],
)
def test_wrong_options(search: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with Engine(MockBackend()) as eng, pytest.raises(ConfigError, match=message):
        search(eng, Letters(), "x", **options)


def test_wrong_objects(make: Make) -> None:
    eng, other = make(speller("ab")), make(speller("ab"))
    with pytest.raises(ConfigError, match="must be an instance of a subclass of Task"):
        tot_bfs(eng, Letters, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be text"):
        tot_bfs(eng, Letters(), 3)  # type: ignore[arg-type]
    with other.session("y") as s, Trunks(eng, Game24()) as trunks:
        with pytest.raises(ConfigError, match="another engine"):
            tot_bfs(eng, Letters(), "x", session=s)
        with pytest.raises(ConfigError, match="another engine or another task"):
            tot_bfs(eng, Letters(), "x", mode="template", trunks=trunks)
        with pytest.raises(ConfigError, match="trunks are for mode='template'"):
            tot_bfs(eng, trunks.task, "x", trunks=trunks)
        with pytest.raises(ConfigError, match="session is for mode='append'"):
            tot_bfs(other, Letters(), "x", mode="template", session=s)
    with pytest.raises(ConfigError, match="scores >= 0"):
        tot_bfs(eng, Negative(), "x", evaluate="score", select="sample")
    for fault in ({"max_nodes": 0}, {"max_tokens": 1.5}, {"deadline_s": -1}):
        with pytest.raises(ConfigError, match="Budget"):
            Budget(**fault)  # type: ignore[arg-type]


class Negative(Letters):
    """Scores below zero."""

    def score(self, state: State) -> float:
        return -1.0
