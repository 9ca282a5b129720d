"""How fast a thread in the background may work: hardly at all beside a pass, flat out when idle.

A decode step uses every core and waits for the slowest of them, so whatever a thread of the store
computes meanwhile is added to a token.  Such a thread works in pieces and rests after each while
passes run: all of them together take `SHARE` of one core.  A rest is never longer than `LONGEST_S`,
so each thread gets on by a piece in that time at the very least; without a pass there is no rest.

Code that may run in such a thread goes through its bytes with `pieces`, or calls `breathe` now and
then; in any other thread both cost next to nothing.  Neither is called with a lock held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["LONGEST_S", "PIECE", "RUSH_S", "SHARE", "Pace", "breathe", "paced", "pieces", "restful"]

PIECE = 128 << 10  # bytes hashed, copied or written at a time: some 50 us of one core
SHARE = 0.04  # of one core, beside passes
LONGEST_S = 0.05  # s of one rest
RUSH_S = 0.1  # s without a rest after each time that tokens asked for pages that are held
_LOOK_S = 0.005  # how often a thread that rests looks whether passes still run
_LEAST_S = 1e-4  # s of work that a rest is worth: sleeping costs a few us itself

_thread = threading.local()
T = TypeVar("T")


class Pace:
    """Shared by the background threads of a store.

    share, longest_s: see above.  now, spent, sleep: the clock, this thread's time on a processor,
    and a way to wait, all in s.
    """

    def __init__(
        self,
        share: float = SHARE,
        longest_s: float = LONGEST_S,
        *,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.rested_s = 0.0  # by all threads together
        self._factor = 1 / share - 1  # s of rest for one s of work
        self._longest_s = longest_s
        self._now = now
        self._spent = spent
        self._sleep = sleep or self._nap
        self._watched: list[Callable[[], bool]] = []
        self._free_at = 0.0  # until then the share is used up
        self._rushed_until = 0.0
        self._change = threading.Condition()

    def watch(self, running: Callable[[], bool]) -> Callable[[], None]:
        """Rest while `running` says that passes run; call what is returned to end that."""
        with self._change:
            self._watched.append(running)

        def forget() -> None:
            with self._change:
                if running in self._watched:
                    self._watched.remove(running)

        return forget

    def rush(self, seconds: float) -> None:
        """Nobody rests for that long, from now on: somebody waits for what the threads hold."""
        with self._change:
            self._rushed_until = max(self._rushed_until, self._now() + seconds)
            self._change.notify_all()

    @contextmanager
    def worker(self, hurried: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """What this thread does in the block is work in the background.

        hurried: asked before and during each rest; True says that somebody waits for this work now.
        """
        _thread.pace, _thread.since, _thread.hurried = self, self._spent(), hurried
        try:
            yield
        finally:
            _thread.pace = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The same for a caller's own thread, if an engine is open here; else there is no rest."""
        if paced() or not self._watched:
            yield
        else:
            with self.worker():
                yield

    def rest(self) -> None:
        """Make up for what this thread has computed since its last rest."""
        spent = self._spent()
        work = spent - _thread.since
        if work < _LEAST_S:
            return
        _thread.since = spent
        with self._change:
            now = self._now()
            if self._idle() or _thread.hurried():
                return
            # One account for all threads: what another has used up is waited for as well.
            self._free_at = max(now, self._free_at) + work * self._factor
            end = min(self._free_at, now + self._longest_s)
        while (left := end - self._now()) > 0:
            nap = min(left, _LOOK_S)
            self._sleep(nap)
            with self._change:
                self.rested_s += nap
                if self._idle():
                    self._free_at = 0.0
                    return
            if _thread.hurried():
                return

    def _idle(self) -> bool:
        if self._now() < self._rushed_until:
            return True
        return not any(running() for running in self._watched)

    def _nap(self, seconds: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._now() < self._rushed_until, seconds)


def paced() -> bool:
    """True in a thread of the background."""
    return getattr(_thread, "pace", None) is not None


def breathe() -> None:
    """A place where a thread of the background may rest; call it without a lock."""
    pace: Pace | None = getattr(_thread, "pace", None)
    if pace is not None:
        pace.rest()


def restful(items: Iterable[T]) -> Iterator[T]:
    """Items one by one, with a place to rest every few hundred: a loop keeps the interpreter."""
    for number, item in enumerate(items):
        if number % 256 == 255:
            breathe()
        yield item


def pieces(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    """All of `data`, in pieces between which a thread of the background rests; else as one."""
    view = memoryview(data).cast("B")
    step = PIECE if paced() else max(len(view), 1)
    for at in range(0, len(view), step):
        yield view[at : at + step]
        breathe()
