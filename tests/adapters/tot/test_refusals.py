"""What replies, tasks and options may not say."""

from __future__ import annotations

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
    beam,
    best_of_n,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError

from .conftest import Letters, Make, speller

stepped = pytest.mark.parametrize("background", [False], indirect=True)  # one is enough


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
