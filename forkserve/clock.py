"""Time as a dependency: logic asks a clock, so that tests and the mock can own it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Monotonic time in milliseconds."""

    def now_ms(self) -> float:
        """Milliseconds since an arbitrary fixed point; never goes back."""
        ...

    def advance(self, ms: float) -> None:
        """Let `ms` pass: a system clock sleeps, a virtual one jumps."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ms(self) -> float:
        return time.perf_counter() * 1e3

    def advance(self, ms: float) -> None:
        if ms > 0:
            time.sleep(ms / 1e3)


class VirtualClock:
    """A clock that moves only when told."""

    def __init__(self, start_ms: float = 0.0) -> None:
        self._now = start_ms

    def now_ms(self) -> float:
        return self._now

    def advance(self, ms: float) -> None:
        if ms < 0:
            raise ValueError(f"a clock cannot go back ({ms} ms)")
        self._now += ms
