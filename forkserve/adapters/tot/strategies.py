"""Breadth first, beam and depth first: which thoughts are expanded, and which are given up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from forkserve.adapters.tot.evaluating import evaluate
from forkserve.adapters.tot.records import Thought
from forkserve.adapters.tot.run import Asking, Run, Strategy
from forkserve.errors import ConfigError
from forkserve.types import derive_seed

__all__ = ["beam", "bfs", "dfs"]

Select = Literal["greedy", "sample"]


def bfs(width: int, select: Select) -> Strategy:
    """Level by level: all thoughts of a level are expanded, and the best of the next one kept."""

    def strategy(run: Run) -> Asking[None]:
        frontier = [run.root]
        while frontier:
            candidates = yield from run.expand(frontier)
            kept = run.solution(candidates)
            if not kept:
                yield from evaluate(run, candidates)
                ranked = run.rank(candidates)
                kept = ranked[:width] if select == "greedy" else _draw(run, ranked, width)
                run.answers += [thought for thought in kept if thought.done]
                run.fallback = kept[0] if kept else run.fallback
            run.record(frontier, candidates, kept)
            if run.stopped == "solved":
                return
            frontier = [thought for thought in kept if not thought.done]

    return strategy


def beam(width: int) -> Strategy:
    """Level by level by the mean value of a whole path; answers stay in the beam and compete."""

    def strategy(run: Run) -> Asking[None]:
        held = [run.root]
        while parents := [thought for thought in held if not thought.done]:
            found = yield from run.expand(parents)
            kept = run.solution(found)
            candidates = [*(thought for thought in held if thought.done), *found]
            if not kept:
                yield from evaluate(run, found)
                for thought in found:
                    if thought.value is not None:
                        thought.score = _along(thought)
                kept = run.rank(candidates)[:width]
                run.fallback = kept[0] if kept else run.fallback
                run.answers = [thought for thought in kept if thought.done]
            run.record(parents, candidates, kept)
            if run.stopped == "solved":
                return
            held = kept

    return strategy


def dfs(prune: float | None, branch: int | None, answers: int) -> Strategy:
    """The best child first, down to an answer; what is worth less than `prune` is given up."""

    def strategy(run: Run) -> Asking[None]:
        yield from explore(run, run.root)

    def explore(run: Run, thought: Thought) -> Asking[bool]:
        """Whether there are answers enough."""
        candidates = yield from run.expand([thought])
        if kept := run.solution(candidates):
            run.record([thought], candidates, kept)
            return True
        yield from evaluate(run, candidates)
        kept = [c for c in run.rank(candidates) if prune is None or (c.score or 0.0) >= prune]
        kept = kept[:branch]
        run.record([thought], candidates, kept)
        for child in kept:
            best = run.fallback
            if best is None or (child.depth, child.score or 0.0) > (best.depth, best.score or 0.0):
                run.fallback = child
            if child.done:
                run.answers.append(child)
                enough = len(run.answers) >= answers
            else:
                enough = yield from explore(run, child)
            if enough:
                return True
            if not any(answer in child.walk() for answer in run.answers):
                run.drop(child)
        return False

    return strategy


def _along(thought: Thought) -> float:
    """The mean value of the thoughts on a path."""
    values = [one.value for one in thought.path() if one.value is not None]
    return math.fsum(values) / len(values)


def _draw(run: Run, ranked: Sequence[Thought], count: int) -> list[Thought]:
    """Some at random, each with a chance in proportion to its score, none twice; best first."""
    left = list(ranked)
    drawn: list[Thought] = []
    dice = random.Random(derive_seed(run.options.seed, "select", len(run.trace)))
    while left and len(drawn) < count:
        weights = [thought.score or 0.0 for thought in left]
        if min(weights) < 0:
            raise ConfigError(
                f"select='sample' needs scores >= 0, and one is {min(weights)}; use 'greedy'"
            )
        number = dice.choices(range(len(left)), weights if sum(weights) else None)[0]
        drawn.append(left.pop(number))
    return run.rank(drawn)
