"""What to keep without being asked, and what to throw away when the budget is spent.

A policy is any object with these two methods; the three here are the usual ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from forkserve.errors import ConfigError

__all__ = ["Held", "KeepSession", "Lru", "Moment", "PersistPrefix", "Policy"]

Moment = Literal["open", "commit"]


@dataclass(frozen=True, slots=True)
class Held:
    """One stored chunk that may go.

    saved_ms: what computing it again would take.  bytes: that it takes from the budget.  uses: how
    often it was restored.  idle_s: since it was last used or written.  live: a session that is not
    closed has it in its text.
    """

    chain: str
    start: int
    tokens: int
    bytes: int
    saved_ms: float
    uses: int
    idle_s: float
    live: bool


@runtime_checkable
class Policy(Protocol):
    """Decides what is published on its own, and what goes first."""

    def publish(self, moment: Moment, seen: int) -> bool:
        """Whether whole chunks are stored now.

        seen: how many sessions of this engine began with the same text so far (at "open").
        """
        ...

    def value(self, held: Held) -> float:
        """Worth of a chunk per byte; the least goes first."""
        ...


def _density(held: Held, half_life_s: float) -> float:
    """Expected ms saved per byte: the chance of a use falls with time and rises with past uses."""
    chance = (1 + held.uses) * float(0.5 ** (held.idle_s / half_life_s))
    return chance * held.saved_ms / max(held.bytes, 1)


class KeepSession:
    """Store every session as it grows, so that any of them resumes without computing its trunk.

    Chunks of sessions that are still open are worth `favour` times as much.
    """

    def __init__(self, half_life_s: float = 86_400.0, favour: float = 8.0) -> None:
        if half_life_s <= 0 or favour < 1:
            raise ConfigError(f"half_life_s={half_life_s} must be > 0 and favour={favour} >= 1")
        self._half_life_s = half_life_s
        self._favour = favour

    def publish(self, moment: Moment, seen: int) -> bool:
        return moment == "commit" or seen > 1

    def value(self, held: Held) -> float:
        return _density(held, self._half_life_s) * (self._favour if held.live else 1.0)


class PersistPrefix:
    """Store only what several sessions began with, such as a system prompt: hot prefixes survive
    a restart, and nothing else is written.  after: sessions that make a prefix hot."""

    def __init__(self, after: int = 2, half_life_s: float = 7 * 86_400.0) -> None:
        if after < 1 or half_life_s <= 0:
            raise ConfigError(f"after={after} must be >= 1 and half_life_s={half_life_s} > 0")
        self._after = after
        self._half_life_s = half_life_s

    def publish(self, moment: Moment, seen: int) -> bool:
        return moment == "open" and seen >= self._after

    def value(self, held: Held) -> float:
        return _density(held, self._half_life_s)


class Lru:
    """Store only what `Engine.publish` names; what was used longest ago goes first."""

    def publish(self, moment: Moment, seen: int) -> bool:
        return False

    def value(self, held: Held) -> float:
        return -held.idle_s
