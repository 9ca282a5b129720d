"""The Game of 24: make 24 of four numbers with + - * /, using each number once.

The rules in exact fractions, the task for `forkserve.adapters.tot`, and a player that knows the
rules and stands in for a model on the mock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations
from typing import Any

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.tot import State, Task
from forkserve.engine import MockBackend
from forkserve.engine.constraints import ChoiceConstraint
from forkserve.types import Batch

Numbers = tuple[Fraction, ...]

# Each has a solution, which tests find by trying everything.
PUZZLES = ("2 3 5 12", "1 6 6 8", "3 3 7 7", "2 7 8 9", "1 4 5 6", "4 4 10 10")
UNSOLVABLE = "1 1 1 2"

_STEP = re.compile(r"(\S+) ([-+*/]) (\S+) = (\S+) \(left: ([^)]*)\)")

PROPOSE = """\
Combine two of the numbers with + - * or /. Write the step, and the numbers that are left.
Numbers: 2 5 9
2 + 5 = 7 (left: 7 9)
9 - 5 = 4 (left: 2 4)
5 * 9 = 45 (left: 2 45)
Numbers: 3 8 10 12
12 / 3 = 4 (left: 4 8 10)
10 - 8 = 2 (left: 2 3 12)
8 + 12 = 20 (left: 3 10 20)
"""
VALUE = """\
Can 24 be made of these numbers with + - * and /? Say sure, likely or impossible.
Numbers: 3 8
Answer: sure
Numbers: 11 11
Answer: impossible
Numbers: 4 6
Answer: sure
Numbers: 5 7 9
Answer: likely
Numbers: 24
Answer: sure
Numbers: 25
Answer: impossible
Numbers: 1 2 3
Answer: impossible
"""
VERDICTS = {"impossible": 0.001, "likely": 1.0, "sure": 20.0}


# --- rules ---------------------------------------------------------------------------------------


def parse(text: str) -> Numbers:
    """Numbers between blanks; ValueError for anything else."""
    return tuple(sorted(Fraction(word) for word in text.split()))


def show(numbers: Sequence[Fraction]) -> str:
    return " ".join(str(number) for number in sorted(numbers))


def combine(a: Fraction, sign: str, b: Fraction) -> Fraction | None:
    """a sign b; None for a division by zero."""
    if sign == "/":
        return a / b if b else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def steps(numbers: Numbers) -> list[str]:
    """Every step that the rules allow, written as a thought, none twice."""
    found = []
    for i, j in permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for sign in "+-*/":
            result = combine(a, sign, b)
            if result is not None and (sign in "-/" or i < j):
                found.append(f"{a} {sign} {b} = {result} (left: {show([*rest, result])})")
    return list(dict.fromkeys(found))


def after(numbers: Numbers, step: str) -> Numbers | None:
    """The numbers after a step; None if the rules do not allow it, or its arithmetic is wrong."""
    match = _STEP.fullmatch(step)
    try:
        a, b, result, left = (parse(match[group]) for group in (1, 3, 4, 5)) if match else ()
        rest = list(numbers)
        rest.remove(a[0])
        rest.remove(b[0])
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    assert match is not None
    made = combine(a[0], match[2], b[0])
    right = made is not None and result == (made,) and left == tuple(sorted([*rest, made]))
    return left if right else None


@cache
def solvable(numbers: Numbers) -> bool:
    """Whether 24 can be made, by trying everything."""
    if len(numbers) == 1:
        return numbers[0] == 24
    return any(solvable(_left(step)) for step in steps(numbers))


def _left(step: str) -> Numbers:
    match = _STEP.fullmatch(step)
    assert match is not None
    return parse(match[5])


def solves(puzzle: str, thoughts: Sequence[str]) -> bool:
    """Whether the steps lead from the puzzle to 24, each one allowed and computed right."""
    numbers: Numbers | None = parse(puzzle)
    for step in thoughts:
        numbers = after(numbers, step)
        if numbers is None:
            return False
    return numbers == (24,)


# --- the task ------------------------------------------------------------------------------------


class Game24(Task):
    """Three steps, each of which leaves one number less.  A prompt is a trunk and what is left."""

    depth = 3

    def __init__(self, backend: Any = None) -> None:
        """backend: with it a grammar admits legal steps only, and one of the three verdicts."""
        self._backend = backend

    def trunk(self, role: str) -> str:
        return VALUE if role == "value" else PROPOSE

    def opening(self, problem: str) -> str:
        return PROPOSE

    def prompt(self, role: str, state: State) -> str:
        numbers = show(self.left(state))
        return f"Numbers: {numbers}\nAnswer:" if role == "value" else f"Numbers: {numbers}\n"

    def left(self, state: State) -> Numbers:
        """The numbers of a state whose steps are right."""
        numbers = parse(state.problem)
        for step in state.thoughts:
            numbers = after(numbers, step) or ()
        return numbers

    def thoughts(self, role: str, state: State, reply: str) -> list[str]:
        """The lines that are right; a model may also write others."""
        lines = (line.strip() for line in reply.splitlines())
        return [line for line in lines if after(self.left(state), line) is not None]

    def value(self, state: State, reply: str) -> float | None:
        words = reply.split()
        return VERDICTS.get(words[0].lower()) if words else None

    def check(self, state: State) -> bool:
        return solves(state.problem, state.thoughts)

    def constraint(self, role: str, states: Sequence[State]) -> ChoiceConstraint | None:
        if self._backend is None:
            return None
        if role == "value":
            choices = [f" {word}" for word in VERDICTS]
        else:
            choices = [f"{step}\n" for step in steps(self.left(states[0]))]
        return ChoiceConstraint(self._backend.tokenizer, choices)


# --- a player for the mock -----------------------------------------------------------------------


def player(prompt: str, worst: int = 3) -> str:
    """What somebody says who knows the rules: the end of a prompt decides.

    Of the steps it proposes some good ones and `worst` bad ones, so that there is something to
    choose.
    """
    numbers = parse(prompt.rpartition("Numbers: ")[2].splitlines()[0])
    if prompt.endswith("Answer:"):
        return " sure" if solvable(numbers) else " impossible"
    good, bad = [], []
    for step in steps(numbers):
        (good if solvable(_left(step)) else bad).append(step)
    return "\n".join([*bad[:worst], *good[:3]])


def scripted(reply: Callable[[str], str], config: ForkServeConfig | None = None) -> Engine:
    """An engine on the mock whose model replies as a function of the whole prompt."""
    seen: set[int] = set()

    def script(batch: Batch) -> None:
        for work in batch.works:
            spec = work.sample
            if spec is not None and spec.step == 0 and spec.request not in seen:
                seen.add(spec.request)
                backend.script(reply(engine.text(work.session, work.node)))

    backend = MockBackend(config or ForkServeConfig(), on_batch=script)
    engine = Engine(backend)
    return engine
