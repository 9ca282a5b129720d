"""Monte Carlo tree search with UCB1 (Auer, Cesa-Bianchi and Fischer, 2002)."""

from __future__ import annotations

import math

from forkserve.adapters.tot.evaluating import evaluate
from forkserve.adapters.tot.records import Thought
from forkserve.adapters.tot.run import Asking, Run, Strategy

__all__ = ["mcts", "ucb1"]


def ucb1(mean: float, visits: int, parent_visits: int, exploration: float) -> float:
    """``mean + c * sqrt(ln N / n)``: worth of a child visited n times, of a parent visited N times.

    With mean rewards in [0, 1], c = sqrt(2) is the constant of the paper.
    """
    return mean + exploration * math.sqrt(math.log(parent_visits) / visits)


def mcts(iterations: int, exploration: float) -> Strategy:
    """Each iteration goes down by UCB1 to a thought that was not expanded, and expands it.

    All its children are evaluated in one batch, each of which is a visit: a value is the reward of
    the child and of all above it.  Rewards are put into [0, 1] by the least and the greatest so
    far.  A wrong answer counts like the least so far.  Subtrees with nothing left to expand are
    passed over.  Without an answer the most visited path is the most promising.
    """

    def strategy(run: Run) -> Asking[None]:
        search = _Search(run, exploration)
        for _ in range(iterations):
            leaf = search.descend()
            if leaf is None:
                return
            children = yield from run.expand([leaf])
            if found := run.solution(children):
                run.record([leaf], children, found)
                return
            yield from evaluate(run, children)
            search.learn(leaf, children)
            run.answers += [c for c in children if c.alive and c.done and c.right is not False]
            run.note([leaf], children)
            run.fallback = search.favourite()

    return strategy


class _Search:
    """What the iterations have learned."""

    def __init__(self, run: Run, exploration: float) -> None:
        self._root = run.root
        self._exploration = exploration
        self._totals: dict[Thought, float] = {}
        self._spent: set[Thought] = set()  # nothing is left to expand in them
        self._least, self._greatest = math.inf, -math.inf

    def descend(self) -> Thought | None:
        """The thought to expand next; None when the whole tree is known."""
        at = self._root
        while at not in self._spent:
            open_ = [child for child in at.children if child.visits and child not in self._spent]
            if not open_:
                return at
            at = max(open_, key=self._worth)  # of equal ones the first
        return None

    def learn(self, leaf: Thought, children: list[Thought]) -> None:
        """Take the values of new children as rewards."""
        fresh = [child for child in children if child.status != "duplicate"]
        values = [child.value for child in fresh if child.value is not None]
        self._least = min([self._least, *values])
        self._greatest = max([self._greatest, *values])
        for child in fresh:
            reward = child.value if child.value is not None else self._least
            if child.done:
                self._spent.add(child)
            self._back(child, reward if math.isfinite(reward) else 0.0)
        self._close(leaf)

    def favourite(self) -> Thought | None:
        """The end of the most visited path, alive if one is; of equal visits the greater mean."""
        at = self._root
        while seen := [c for c in at.children if c.visits and c.right is not False]:
            at = max(seen, key=lambda c: (c.alive, c.visits, c.score or 0.0))
        return at if at is not self._root else None

    def _worth(self, child: Thought) -> float:
        above = child.parent
        assert above is not None
        assert child.score is not None
        span = self._greatest - self._least
        mean = (child.score - self._least) / span if span > 0 else 0.5
        return ucb1(mean, child.visits, above.visits, self._exploration)

    def _back(self, child: Thought, reward: float) -> None:
        """A visit, for it and all above it."""
        at: Thought | None = child
        while at is not None:
            at.visits += 1
            self._totals[at] = self._totals.get(at, 0.0) + reward
            at.score = self._totals[at] / at.visits
            at = at.parent

    def _close(self, thought: Thought) -> None:
        """Note a thought all of whose children are spent, and those above it."""
        at: Thought | None = thought
        while at is not None and all(c in self._spent for c in at.children if c.visits):
            self._spent.add(at)
            at = at.parent
