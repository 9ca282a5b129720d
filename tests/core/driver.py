"""Random schedules with weights, and a simple shrinker, over the identity test's machine."""

from __future__ import annotations

import random
import traceback
from typing import Any

from forkserve.types import JoinPolicy

from .machine import LETTERS
from .schedules import Schedules

Step = tuple[str, dict[str, Any]]

WEIGHTS = {
    "open": 6, "close": 4, "fork": 10, "append": 4, "attempt": 5, "promote": 3, "abort": 4,
    "drain_aborts": 1, "mark_idle": 2, "speculate": 5, "speculate_set": 2, "drain_slack": 4,
    "drain_all": 2, "tick": 4, "commit": 10, "join": 6, "turn": 8, "generate": 6, "start": 3,
    "cancel": 2, "generate_many": 1,
}  # fmt: skip


class _Draw:
    """Arguments of the rules from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self) -> int:
        return self.random.randrange(2**16)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def letters(self, low: int, high: int) -> list[int]:
        return [self.random.randrange(LETTERS) for _ in range(self.random.randint(low, high))]

    def arguments(self, name: str) -> dict[str, Any]:
        choice, randint = self.random.choice, self.random.randint
        if name in ("drain_aborts", "drain_slack", "drain_all", "tick"):
            return {}
        if name == "generate_many":
            return {"count": randint(1, 3)}
        args: dict[str, Any] = {"n": self.number()}
        if name not in ("open", "close", "cancel", "speculate_set"):
            args["m"] = self.number()
        more = {
            "open": lambda: {
                "letters": self.letters(0, 9),
                "shared": self.chance(0.6),
                "tenant": choice("ab"),
            },
            "fork": lambda: {
                "branch": choice("pqr"),
                "letters": self.letters(0, 9),
                "back": self.number(),
            },
            "append": lambda: {"letters": self.letters(1, 7)},
            "abort": lambda: {"lazy": choice([None, True, False]), "cascade": self.chance(0.5)},
            "mark_idle": lambda: {"tool_s": choice([0.0, 1.0]), "late": self.chance(0.6)},
            "speculate": lambda: {"letters": self.letters(0, 9), "idle": choice([1e9, 1e9, 0.3])},
            "turn": lambda: {
                "texts": [self.letters(1, 7) for _ in range(randint(1, 3))],
                "guess": self.letters(1, 7),
                "cut": self.number(),
                "rest": self.letters(0, 9),
                "drains": randint(0, 6),
            },
            "commit": lambda: {
                "cut": self.number(),
                "letters": self.letters(0, 9),
                "full": self.chance(0.3),
                "back": self.number(),
            },
            "join": lambda: {
                "policy": choice(list(JoinPolicy)),
                "scaffold": self.letters(0, 9) if self.chance(0.5) else [],
                "blend": self.letters(1, 7),
                "count": randint(1, 3),
            },
            "generate": lambda: {"count": randint(1, 4)},
            "start": lambda: {"count": randint(1, 6)},
        }.get(name)
        return {**args, **more()} if more else args


def schedule(seed: int, length: int) -> tuple[dict[str, Any], list[Step]]:
    """How to begin, and the steps."""
    draw = _Draw(seed)
    choice = draw.random.choice
    begin = {
        "capacity": draw.random.randint(8, 24),
        "seed": seed % 1000,
        "preempt": choice([0, 0, 2, 3]),
        "lazy": draw.chance(0.4),
        "own": draw.chance(0.3),
        "chunk": choice([3, 4, 8, 64]),
        "batch": choice([2, 7, 64, 64]),
    }
    names = draw.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length)
    return begin, [(name, draw.arguments(name)) for name in names]


def play(fixed: dict[str, Any], begin: dict[str, Any], steps: list[Step]) -> None:
    """Run a schedule to its end."""
    bench = type("Played", (Schedules,), {"fixed": fixed})()
    bench.begin(**begin)
    bench.sound()
    for name, args in steps:
        getattr(bench, name)(**args)
        bench.sound()
    bench.teardown()


def _place(error: BaseException) -> tuple[str, str, int | None]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, last.filename, last.lineno


def shrink(
    fixed: dict[str, Any], begin: dict[str, Any], steps: list[Step], error: BaseException
) -> list[Step]:
    """A shorter schedule that fails at the same place."""

    def fails(some: list[Step]) -> bool:
        try:
            play(fixed, begin, some)
        except Exception as other:
            return _place(other) == _place(error)
        return False

    size = max(1, len(steps) // 2)
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if fails(fewer):
                steps = fewer
            else:
                at += size
        size //= 2
    return steps
