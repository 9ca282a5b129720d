"""After a pass that failed: smaller ticks when memory ran out, suspects one by one otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.control.jobs import Job

__all__ = ["Recovery"]

_GOOD = 16  # ticks that must go well before one may be twice as large again


class Recovery:
    """What the next ticks have to mind.  most: tokens of a tick in good times."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._good = 0
        self._suspects: list[Job] = []
        self.room = most  # tokens of a tick, both classes, at most

    def shrink(self, tokens: int) -> None:
        """Memory ran out: ticks have at most this many tokens, until some have gone well."""
        self.room, self._good = min(self.room, max(tokens, 1)), 0

    def suspect(self, jobs: Sequence[Job]) -> None:
        """A pass of these failed, and nobody knows whose fault it was: each runs alone, once."""
        self._suspects = list(jobs)

    def alone(self, ready: Sequence[Job]) -> Job | None:
        """The job that has to run alone now; None as a rule."""
        while self._suspects:
            job = self._suspects.pop(0)
            if job in ready:
                return job
        return None

    def went_well(self) -> None:
        """A pass ended as it should."""
        if self.room < self._most:
            self._good += 1
            if self._good == _GOOD:
                self.room, self._good = min(2 * self.room, self._most), 0
