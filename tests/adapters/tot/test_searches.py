"""The searches find known solutions, in both modes, sync and async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from examples.game24 import PUZZLES, UNSOLVABLE, Game24, parse, player, solvable, solves
from forkserve.adapters.tot import (
    ToTResult,
    abeam,
    abest_of_n,
    amcts,
    atot_bfs,
    atot_dfs,
    beam,
    best_of_n,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.adapters.tot.mcts import ucb1

from .conftest import Letters, Make, speller

stepped = pytest.mark.parametrize("background", [False], indirect=True)  # one is enough
SEARCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "bfs": (tot_bfs, atot_bfs, {"beam": 2}),
    "dfs": (tot_dfs, atot_dfs, {"prune": 1.0}),
    "beam": (beam, abeam, {"width": 2}),
    "mcts": (mcts, amcts, {"iterations": 40}),
}


def run(search: Callable[..., Any], *args: Any, **options: Any) -> ToTResult:
    found = search(*args, **options)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def test_the_puzzles_are_as_they_are_called() -> None:
    assert all(solvable(parse(puzzle)) for puzzle in PUZZLES)
    assert not solvable(parse(UNSOLVABLE))


@pytest.mark.parametrize("mode", ["template", "append"])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", SEARCHES)
def test_finds_a_solution(make: Make, name: str, kind: str, mode: str) -> None:
    eng = make()
    sync, coroutine, own = SEARCHES[name]
    options = {"mode": mode, "max_tokens": 300, **own}
    for puzzle in PUZZLES[:2]:
        result = run(sync if kind == "sync" else coroutine, eng, Game24(), puzzle, **options)
        assert result.solved
        assert result.stopped == "solved"
        assert solves(puzzle, result.best.state.thoughts)  # type: ignore[union-attr]
    assert not run(sync, eng, Game24(), UNSOLVABLE, **options).solved


@stepped
@pytest.mark.parametrize("name", ["dfs", "mcts"])
def test_an_unsolvable_puzzle_is_searched_to_its_end(make: Make, name: str) -> None:
    search, _, _ = SEARCHES[name]
    options = {"prune": 0.0} if name == "dfs" else {"iterations": 10_000}
    eng = make(lambda prompt: player(prompt, worst=99))
    found = search(eng, Game24(), "1 1 2", depth=2, max_tokens=2000, **options)
    assert (found.stopped, found.answers) == ("exhausted", [])
    leaves = [thought for thought in found.tree.walk() if thought.done]
    assert leaves
    assert all(thought.right is False for thought in leaves)
    assert found.best is not None
    assert found.best.right is not False


# --- breadth first -------------------------------------------------------------------------------


def published(letters: str, worth: Callable[[str], float], depth: int, b: int) -> list[list[str]]:
    """What each level keeps in the published procedure: values, a stable sort, the first b.

    A candidate that occurred before in its level is worth 0.
    """
    kept, levels = [""], []
    for _ in range(depth):
        candidates = [word + letter for word in kept for letter in letters]
        values: list[float] = []
        for index, word in enumerate(candidates):
            values.append(0 if word in candidates[:index] else worth(word))
        ids = sorted(range(len(candidates)), key=lambda i: values[i], reverse=True)[:b]
        kept = [candidates[i] for i in ids]
        levels.append(kept)
    return levels


@stepped
@pytest.mark.parametrize("mode", ["template", "append"])
@pytest.mark.parametrize("letters", ["abcd", "dacb", "abab"])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_selection_is_the_published_one(make: Make, letters: str, mode: str, width: int) -> None:
    """Few different values, so that most of the order is decided by stability."""

    def worth(word: str) -> int:
        return 1 + sum(ord(c) * (i + 3) for i, c in enumerate(word)) % 3

    result = tot_bfs(make(speller(letters, worth)), Letters(), "x", mode=mode, beam=width)
    kept = [["".join(t.state.thoughts) for t in step.selected] for step in result.trace]
    whole = [list(dict.fromkeys(level)) for level in published(letters, worth, 3, width)]
    assert kept == whole  # a duplicate is never expanded a second time
    assert result.stopped == "exhausted"
    assert result.best is result.trace[-1].selected[0]
    assert [step.number for step in result.trace] == [0, 1, 2]


def test_an_answer_leaves_the_frontier(make: Make) -> None:
    class Short(Letters):
        def done(self, state: Any) -> bool:
            return bool(state.last == "c")

    worth = {"c": 9, "a": 5}
    found = tot_bfs(make(speller("abc", lambda w: worth.get(w, 1))), Short(), "x", beam=2)
    assert found.text == "c"
    assert [step.parents[0].text for step in found.trace] == ["", "a", "a"]
    assert len(found.answers) >= 2
    assert not found.answers[0].children


def test_sampled_selection_follows_the_values(make: Make) -> None:
    eng = make(speller("abcd", lambda w: {"a": 0, "b": 1, "c": 0, "d": 1}[w]))
    for seed in range(5):
        found = tot_bfs(eng, Letters(), "x", beam=2, select="sample", depth=1, seed=seed)
        assert {t.text for t in found.trace[0].selected} == {"b", "d"}
    again = [
        [
            t.text
            for t in tot_bfs(eng, Letters(), "x", beam=3, select="sample", depth=1, seed=7)
            .trace[0]
            .selected
        ]
        for _ in range(2)
    ]
    assert again[0] == again[1]
    assert len(set(again[0])) == 3


# --- the others ----------------------------------------------------------------------------------


def test_beam_goes_by_the_mean_of_the_path(make: Make) -> None:
    """ "ab" is the best pair by itself, but stands on the worst letter."""
    worth = {"a": 1, "b": 9, "aa": 1, "ab": 6, "ba": 5, "bb": 4}
    eng = make(speller("ab", lambda w: worth[w]))
    assert tot_bfs(eng, Letters(), "x", beam=2, depth=2).text == "a\nb"
    found = beam(eng, Letters(), "x", width=2, depth=2)
    assert found.text == "b\na"
    assert found.best is not None
    assert found.best.score == (9 + 5) / 2
    assert found.best.value == 5


@stepped
def test_depth_first_order_and_pruning(make: Make) -> None:
    worth = {"a": 2, "b": 3, "c": 1}
    eng = make(speller("abc", lambda w: worth[w[-1]]))
    found = tot_dfs(eng, Letters(), "x", prune=2, depth=2, answers=4)
    assert [step.parents[0].state.thoughts for step in found.trace] == [(), ("b",), ("a",)]
    assert [a.state.thoughts for a in found.answers] == [
        ("b", "b"),
        ("a", "b"),
        ("b", "a"),
        ("a", "a"),
    ]
    assert all(t.text == "c" for step in found.trace for t in step.aborted)
    narrow = tot_dfs(eng, Letters(), "x", branch=1, depth=3, answers=5)
    assert [a.state.thoughts for a in narrow.answers] == [("b", "b", "b")]


@stepped
def test_a_subtree_without_an_answer_gives_its_pages_back(make: Make) -> None:
    """The pool is looked at when each step has been noted: depth does not pile up."""

    class Wrong(Letters):
        def check(self, state: Any) -> bool:
            return False

    found = tot_dfs(make(speller("abcde")), Wrong(), "x", depth=3)
    assert len(found.trace) == 1 + 5 + 25
    first, last = found.trace[2].live_pages, found.trace[-1].live_pages
    assert last <= first
    assert found.stopped == "exhausted"


def test_ucb1_is_the_formula() -> None:
    assert ucb1(0.5, 4, 16, 0.0) == 0.5
    assert ucb1(0.5, 4, 16, 2.0) == pytest.approx(0.5 + 2 * (2.772588722 / 4) ** 0.5)


@stepped
def test_mcts_counts_visits_and_rewards(make: Make) -> None:
    eng = make(speller("ab", lambda w: w.count("b")))
    found = mcts(eng, Letters(), "x", iterations=5, depth=3)
    assert len(found.trace) == 5
    for thought in found.tree.walk():
        below = sum(child.visits for child in thought.children)
        own = 1 if thought.parent is not None else 0
        assert thought.visits == below + own
        total = sum((c.score or 0) * c.visits for c in thought.children)
        assert thought.score == pytest.approx((total + own * (thought.value or 0)) / thought.visits)
    greedy = mcts(eng, Letters(), "x", iterations=3, exploration=0.0)
    assert [step.parents[0].state.thoughts for step in greedy.trace] == [(), ("b",), ("b", "b")]
    assert greedy.text == "b\nb\nb"
    whole = mcts(eng, Letters(), "x", iterations=100)
    assert whole.stopped == "exhausted"
    assert len(whole.trace) == 1 + 2 + 4
    assert whole.text == "b\nb\nb"


@pytest.mark.parametrize("evaluate", ["value", "vote"])
@pytest.mark.parametrize("mode", ["template", "append"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_best_of_n(make: Make, kind: str, mode: str, evaluate: str) -> None:
    answers = iter(["bad", "good", "fair", "bad"])
    judge = speller("", lambda word: {"bad": 1, "fair": 2, "good": 3}[word])

    def reply(prompt: str) -> str:
        return next(answers) if prompt.rpartition("[")[2].startswith("sample") else judge(prompt)

    search = best_of_n if kind == "sync" else abest_of_n
    found = run(search, make(reply), Letters(), "x", n=4, mode=mode, evaluate=evaluate)
    assert found.text == "good"
    assert sorted(t.status for t in found.tree.children) == [
        "aborted",
        "aborted",
        "duplicate",
        "selected",
    ]
    assert found.usage.requests == 4 + (3 if evaluate == "vote" else 9)


def test_best_of_n_by_the_models_own_certainty(make: Make) -> None:
    words = iter(["one", "two", "three"])
    found = best_of_n(make(lambda _: next(words)), Letters(), "x", n=3, evaluate="logprob")
    assert found.usage.requests == 3
    scores = [thought.score for thought in found.tree.children]
    assert all(score is not None and score < 0 for score in scores)
    assert found.best is not None
    assert found.best.score == max(s for s in scores if s is not None)
