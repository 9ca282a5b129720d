"""Work that may be late or left out: a bounded queue, alarms, one thread.

Whoever offers a job never waits: a full queue refuses it.  An alarm is a job for a later moment of
the engine's clock, which may be a virtual one.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress

from forkserve.clock import Clock
from forkserve.errors import BackendError
from forkserve.store.pace import RUSH_S, Pace
from forkserve.threads import started

__all__ = ["Mover"]

_log = logging.getLogger(__name__)
_POLL_S = 0.02  # how often alarms are compared with the clock
_ALARMS = 4096


class Mover:
    """depth: jobs that may wait.  on_failure: told of every job that raised.  pace: of its work."""

    def __init__(
        self,
        clock: Clock,
        depth: int = 16,
        on_failure: Callable[[BaseException], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.dropped = 0
        self.done = 0
        self.holding = 0  # copies under way, which hold pages: for the owner to count
        self._clock = clock
        self._depth = depth
        self._on_failure = on_failure
        self._pace = pace or Pace()
        self._jobs: deque[tuple[Hashable, Callable[[], None]]] = deque()
        self._waiting: set[Hashable] = set()
        self._alarms: list[tuple[float, int, Hashable, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._change = threading.Condition()
        self._busy = False
        self._stop = False
        self._thread: threading.Thread | None = None

    def offer(self, key: Hashable, job: Callable[[], None]) -> bool:
        """Queue a job unless one of the same key waits already; False when the queue is full."""
        with self._change:
            return self._offer(key, job)

    def _offer(self, key: Hashable, job: Callable[[], None]) -> bool:
        if key in self._waiting:
            return True
        if self._stop or len(self._jobs) >= self._depth or not self._start():
            self.dropped += 1
            return False
        self._waiting.add(key)
        self._jobs.append((key, job))
        self._change.notify_all()
        return True

    def at(self, ms: float, key: Hashable, job: Callable[[], None]) -> None:
        """Offer a job at a moment of the clock; a second alarm of the same key replaces it."""
        with self._change:
            self._alarms = [alarm for alarm in self._alarms if alarm[2] != key]
            if self._stop or len(self._alarms) >= _ALARMS or not self._start():
                self.dropped += 1
                return
            self._alarms.append((ms, next(self._serial), key, job))
            heapq.heapify(self._alarms)
            self._change.notify_all()

    def due(self, key: Hashable) -> float | None:
        """When the alarm of a key will go off, or None."""
        with self._change:
            return next((alarm[0] for alarm in self._alarms if alarm[2] == key), None)

    def relieve(self) -> bool:
        """Pages are short: copies are not paced for now; True while one holds pages."""
        if self.holding:
            self._pace.rush(RUSH_S)
        return self.holding > 0

    @property
    def queued(self) -> int:
        return len(self._jobs)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until no job waits or runs (alarms may); False when that takes longer."""
        with self._change:
            self._ring()
            return self._change.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self) -> None:
        """Forget what waits, and end after the job that runs.  Idempotent."""
        with self._change:
            self._stop = True
            self._jobs.clear()
            self._waiting.clear()
            self._alarms.clear()
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> bool:
        """Whether there is a thread."""
        with suppress(BackendError):
            self._thread = self._thread or started(self._serve, "forkserve-mover")
        return self._thread is not None

    def _ring(self) -> None:
        now = self._clock.now_ms()
        while self._alarms and self._alarms[0][0] <= now:
            _, _, key, job = heapq.heappop(self._alarms)
            self._offer(key, job)

    def _serve(self) -> None:
        with self._pace.worker():
            self._work()

    def _work(self) -> None:
        while True:
            with self._change:
                self._ring()
                while not self._jobs and not self._stop:
                    self._change.wait(_POLL_S if self._alarms else None)
                    self._ring()
                if self._stop:
                    return
                key, job = self._jobs.popleft()
                self._waiting.discard(key)
                self._busy = True
            try:
                job()
            except BaseException as error:
                _log.warning("a move between tiers failed: %s", error)
                if self._on_failure is not None:
                    self._on_failure(error)
            finally:
                with self._change:
                    self._busy = False
                    self.done += 1
                    self._change.notify_all()
