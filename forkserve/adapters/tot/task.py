"""What a search is about: its prompts, how replies are read, and when it is done."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from forkserve.errors import AdapterError
from forkserve.prompt_text import content
from forkserve.session import Prompt
from forkserve.types import Constraint, Tokens

__all__ = ["Reader", "Role", "State", "Task", "TaskError", "UnreadableReply"]

Role = Literal["propose", "sample", "value", "vote"]
T = TypeVar("T")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class TaskError(AdapterError):
    """A method of a `Task` is missing, or returned what it may not."""


class UnreadableReply(AdapterError):
    """The model's evaluation could not be read, and ``unreadable="raise"`` was asked for."""


@dataclass(frozen=True, slots=True)
class State:
    """A problem and the thoughts so far, the first one first."""

    problem: str
    thoughts: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """The latest thought; empty at the root."""
        return self.thoughts[-1] if self.thoughts else ""

    @property
    def text(self) -> str:
        """The thoughts, one a line."""
        return "\n".join(self.thoughts)

    def then(self, thought: str) -> State:
        """The state after one more thought."""
        return State(self.problem, (*self.thoughts, thought))


class Task:
    """Subclass it and say how your problem is put to a model.

    A search asks the model in four *roles*: ``propose`` (several next thoughts in one reply),
    ``sample`` (one next thought), ``value`` (how good is a state) and ``vote`` (which of several
    states is best).  Which methods it needs depends on the mode:

    * template: `trunk` (the fixed few-shot text of a role) and `prompt` (what is asked after it);
    * append: `prompt` (what is asked after the thoughts so far), and `opening`, `write` at will.

    `value`, `vote` and `thoughts` read replies.  `done` and `check` end a path; `depth` does too.
    Text is content: a problem or a thought that names a control token writes none.  Where a prompt
    needs them, give chat messages, token ids, or `forkserve.PromptText`, which says what is which.
    What a method raises ends the search and is raised by it.
    """

    depth: int = 3

    # ---------------------------------------------------------------- prompts

    def trunk(self, role: Role) -> Prompt:
        """Template mode: the fixed beginning of every prompt of a role, the few-shot text."""
        raise TaskError(f"mode='template' needs {type(self).__name__}.trunk({role!r})")

    def opening(self, problem: str) -> Prompt:
        """Append mode: what the tree begins with.  By default the problem as it is."""
        return problem

    def prompt(self, role: Role, state: State) -> str | Tokens:
        """What is asked about a state: after the trunk, or in append mode after the thoughts."""
        raise TaskError(f"{type(self).__name__}.prompt(role, state) is missing")

    def ballot(self, states: Sequence[State]) -> str | Tokens:
        """The question which of `states` is best, for ``evaluate="vote"``."""
        raise TaskError(f"evaluate='vote' needs {type(self).__name__}.ballot(states)")

    def write(self, state: State) -> str | Tokens:
        """Append mode: how the latest thought stands in the text when no sample wrote it."""
        return f"{state.last}\n"

    def constraint(self, role: Role, states: Sequence[State]) -> Constraint | None:
        """What a reply must look like: a grammar, a choice.  One state, or those of a ballot."""
        return None

    # ---------------------------------------------------------------- reading

    def thoughts(self, role: Role, state: State, reply: str) -> Sequence[str]:
        """The thoughts in a reply; none if it says nothing of use.

        By default the lines of a proposal, and a sample as a whole, without white space around.
        """
        lines = reply.splitlines() if role == "propose" else [reply]
        return [line.strip() for line in lines if line.strip()]

    def value(self, state: State, reply: str) -> float | None:
        """How good the reply says the state is; None if it cannot be read.

        By default the first number in it.
        """
        found = _NUMBER.search(reply)
        return float(found[0]) if found else None

    def vote(self, states: Sequence[State], reply: str) -> int | None:
        """The index of the state that the reply chooses; None if it cannot be read.

        By default the first number in it, counted from 1.
        """
        found = _NUMBER.search(reply)
        index = int(float(found[0])) - 1 if found else -1
        return index if 0 <= index < len(states) else None

    def score(self, state: State) -> float:
        """How good a state is, without the model, for ``evaluate="score"``."""
        raise TaskError(f"evaluate='score' needs {type(self).__name__}.score(state)")

    # ---------------------------------------------------------------- ends

    def done(self, state: State) -> bool:
        """Whether the state is a whole answer, before `depth` makes it one."""
        return False

    def check(self, state: State) -> bool | None:
        """Whether a whole answer is right; None where only its value can tell."""
        return None

    def key(self, state: State) -> Hashable:
        """States with equal keys are the same thought: only the first one is kept."""
        return state.thoughts


class Reader:
    """Asks a task, and refuses what it may not say."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._name = type(task).__name__

    def depth(self) -> int:
        found: Any = self.task.depth
        if not isinstance(found, Integral) or isinstance(found, bool) or found < 1:
            raise TaskError(f"{self._name}.depth={found!r} must be a whole number >= 1")
        return int(found)

    def trunk(self, role: Role) -> Prompt:
        return self._opening(f"trunk({role!r})", self.task.trunk(role))

    def opening(self, problem: str) -> Prompt:
        return self._opening("opening(problem)", self.task.opening(problem))

    def prompt(self, role: Role, state: State) -> str | Tokens:
        return self._text(f"prompt({role!r}, state)", self.task.prompt(role, state))

    def ballot(self, states: Sequence[State]) -> str | Tokens:
        return self._text("ballot(states)", self.task.ballot(states))

    def write(self, state: State) -> str | Tokens:
        return self._text("write(state)", self.task.write(state))

    def constraint(self, role: Role, states: Sequence[State]) -> Constraint | None:
        found = self.task.constraint(role, states)
        if found is not None and not hasattr(found, "allowed"):
            raise self._wrong(f"constraint({role!r}, states)", found, "a constraint or None")
        return found

    def thoughts(self, role: Role, state: State, reply: str) -> list[str]:
        found: Any = self.task.thoughts(role, state, reply)
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise self._wrong("thoughts(role, state, reply)", found, "a list of strings")
        for one in found:
            if not isinstance(one, str) or not one:
                raise self._wrong("thoughts(role, state, reply)", one, "non-empty strings")
        return list(found)

    def value(self, state: State, reply: str) -> float | None:
        found: Any = self.task.value(state, reply)
        return None if found is None else self._number("value(state, reply)", found)

    def score(self, state: State) -> float:
        return self._number("score(state)", self.task.score(state))

    def vote(self, states: Sequence[State], reply: str) -> int | None:
        found: Any = self.task.vote(states, reply)
        if found is None:
            return None
        whole = isinstance(found, Integral) and not isinstance(found, bool)
        if not whole or not 0 <= found < len(states):
            raise self._wrong("vote(states, reply)", found, f"an index below {len(states)} or None")
        return int(found)

    def done(self, state: State) -> bool:
        return self._one_of("done(state)", self.task.done(state), (True, False))

    def check(self, state: State) -> bool | None:
        return self._one_of("check(state)", self.task.check(state), (True, False, None))

    def key(self, state: State) -> Hashable:
        found = self.task.key(state)
        try:
            hash(found)
        except TypeError:
            raise self._wrong("key(state)", found, "something hashable") from None
        return found

    def _text(self, call: str, found: str | Tokens) -> str | Tokens:
        if isinstance(found, str):
            return content(found)
        ids = isinstance(found, Sequence) and not isinstance(found, bytes)
        if ids and all(isinstance(i, Integral) for i in found):
            return found
        raise self._wrong(call, found, "text or token ids")

    def _opening(self, call: str, found: Prompt) -> Prompt:
        """Chat messages are checked by `Session`."""
        if isinstance(found, str):
            return content(found)
        if isinstance(found, Sequence) and not isinstance(found, bytes):
            return found
        raise self._wrong(call, found, "text, token ids or chat messages")

    def _number(self, call: str, found: Any) -> float:
        if not isinstance(found, Real) or isinstance(found, bool) or not math.isfinite(found):
            raise self._wrong(call, found, "a finite number")
        return float(found)

    def _one_of(self, call: str, found: T, allowed: Sequence[T]) -> T:
        if not any(found is one for one in allowed):
            raise self._wrong(call, found, " or ".join(str(one) for one in allowed))
        return found

    def _wrong(self, call: str, found: object, wanted: str) -> TaskError:
        return TaskError(f"{self._name}.{call} returned {found!r:.200}; it must be {wanted}")
