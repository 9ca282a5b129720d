"""What a search leaves behind: thoughts as a tree, the steps it took, what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from forkserve.adapters.tot.places import Place
from forkserve.adapters.tot.task import State
from forkserve.adapters.tot.usage import Usage

__all__ = ["Status", "Step", "Stopped", "Thought", "ToTResult"]

Status = Literal["open", "selected", "aborted", "duplicate"]
Stopped = Literal["solved", "exhausted", "nodes", "tokens", "deadline"]


@dataclass(eq=False, repr=False)
class Thought:
    """One node of the tree of thoughts.

    value: its own evaluation (mean of `values`, None where one could not be read), None before.
    score: what it is chosen by: the value; with `beam` the mean value of its path, with `mcts` its
    mean reward over `visits`.
    done: nothing is to be thought after it.  right: what `Task.check` says of a whole answer.
    logprob: mean log-probability of the tokens of a sampled thought, when that was asked for.
    """

    state: State
    parent: Thought | None = None
    value: float | None = None
    values: tuple[float | None, ...] = ()
    score: float | None = None
    status: Status = "open"
    done: bool = False
    right: bool | None = None
    logprob: float | None = None
    visits: int = 0
    children: list[Thought] = field(default_factory=list)
    place: Place | None = None  # where its text lives, in append mode

    @property
    def text(self) -> str:
        """The thought itself; empty at the root."""
        return self.state.last

    @property
    def depth(self) -> int:
        """Thoughts on the path to it; 0 at the root."""
        return len(self.state.thoughts)

    @property
    def alive(self) -> bool:
        """Whether it may still be built on."""
        return self.status in ("open", "selected")

    def path(self) -> list[Thought]:
        """The thoughts from the first one to this one, without the root."""
        found, at = [], self
        while at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    def walk(self) -> Iterator[Thought]:
        """It and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def draw(self) -> str:
        """It and all below it, one a line."""
        lines = []
        for one in self.walk():
            score = "" if one.score is None else f"  {one.score:.3g}"
            right = {True: "  right", False: "  wrong", None: ""}[one.right]
            status = "" if one.status == "open" else f"  {one.status}"
            text = " ".join((one.text or one.state.problem).split())
            lines.append(f"{'  ' * (one.depth - self.depth)}{text}{score}{status}{right}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Thought({self.text!r}, score={self.score}, {self.status})"


@dataclass(frozen=True)
class Step:
    """Thoughts were made from `parents`, evaluated, and chosen from.

    candidates: in the order in which they were read, duplicates too.  scores: theirs at that time.
    selected: best first; equal scores in the order of the candidates.  aborted: the losers, whose
    pages were given back before the next step.  unreadable: evaluations that could not be read.
    live_pages: of the engine's pool, after the losers left.
    """

    number: int
    parents: tuple[Thought, ...]
    candidates: tuple[Thought, ...]
    scores: tuple[float | None, ...]
    selected: tuple[Thought, ...]
    aborted: tuple[Thought, ...]
    unreadable: int
    live_pages: int


@dataclass(frozen=True)
class ToTResult:
    """What a search came to.

    best: the best whole answer, or the most promising thought if there is none; None if nothing
    was thought.  answers: whole answers that `Task.check` did not refuse, best first.
    stopped: solved (`check` said so), exhausted (the search ran to its end), or the budget that was
    used up: nodes, tokens, deadline.
    tree: the root of all thoughts.
    """

    best: Thought | None
    answers: list[Thought]
    trace: list[Step]
    usage: Usage
    tree: Thought
    stopped: Stopped

    @property
    def solved(self) -> bool:
        """Whether `Task.check` calls the best answer right."""
        return self.best is not None and self.best.right is True

    @property
    def text(self) -> str:
        """The thoughts of the best path, one a line."""
        return self.best.state.text if self.best is not None else ""
