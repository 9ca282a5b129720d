"""The engine loop: schedule, run, land.

One thread at a time drives it: the caller's own while it waits (hand-stepped), or a background
thread.  The lock is held while a batch is put together and while it lands, not while it runs, so
that a fork or an abort never waits for a forward pass.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from math import inf

from forkserve.control.boarding import Boarding
from forkserve.control.core import Core
from forkserve.control.flight import Flight, Ran
from forkserve.control.landing import Landing
from forkserve.control.spine_care import care
from forkserve.errors import BackendError, ForkServeError
from forkserve.threads import started

__all__ = ["Loop"]

_running: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def _stop_loops() -> None:
    """A thread inside a forward pass must not outlive the interpreter."""
    for loop in list(_running):
        if loop.ours:  # in a forked process nobody lets go of a lock that was held then
            loop.shutdown()


_POLL_S = 0.05  # how often an idle background loop looks at timers


class Loop:
    """Drives a `Core`."""

    def __init__(self, core: Core, *, background: bool) -> None:
        self.core = core
        self._boarding = Boarding(core)
        self._landing = Landing(core)
        self._driving = False
        self._pid = os.getpid()
        self._stop = False
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = started(self._serve, "forkserve-loop")
            _running.add(self)

    # ---------------------------------------------------------------- waiting

    def run_until(self, done: Callable[[], bool]) -> None:
        """Drive, or wait for the driver, until `done()` holds (asked under the lock)."""
        core, stuck = self.core, 0
        core.inside()
        while True:
            with core.lock:
                self.check()
                if done():
                    return
                if self._thread is not None or self._driving or core.waiting:
                    core.changed.wait()
                    continue
                self._driving = True
            try:
                ran = self.tick(wake=True)
            except ForkServeError:
                raise
            except Exception as error:
                raise BackendError(f"a step of the engine failed: {error!r}") from error
            finally:
                with core.lock:
                    self._driving = False
                    core.changed.notify_all()
            stuck = stuck + 1 if ran.idle else 0
            if stuck > 2 and not done():
                raise BackendError(
                    f"nothing can run but {len(core.scheduler)} jobs are queued; this is a bug"
                )

    def upkeep(self) -> None:
        """Put crooked rows in order now, as an idle background loop does by itself."""
        core = self.core
        with core.lock:
            if self._thread is not None or self._driving or not care(core):
                return
        self.run_until(lambda: not core.pending)

    def quiesce(self, session: str) -> None:
        """Wait until no batch in flight belongs to the session."""
        core = self.core
        core.inside()
        core.waiting += 1  # no batch departs before the verb had its turn
        try:
            while session in core.in_flight:
                self.check()
                core.changed.wait()
            self.check()  # what changes after a shutdown is written by nobody
        finally:
            core.waiting -= 1
            core.changed.notify_all()

    def check(self) -> None:
        """Raise if the loop has died."""
        if self._broken is not None:
            raise BackendError("the engine loop has failed; open a new engine") from self._broken
        if self._stop:
            raise BackendError("the engine is shut down")
        if not self.ours:
            raise BackendError(
                f"this engine belongs to process {self._pid}; open one of your own after a fork"
            )

    @property
    def ours(self) -> bool:
        """False in the child of a fork: neither threads nor locks are of any use there."""
        return self._pid == os.getpid()

    @property
    def stopped(self) -> bool:
        """True once it was shut down."""
        return self._stop

    def shutdown(self) -> None:
        """End the thread after the batch in flight.  Idempotent."""
        with self.core.lock:
            self._stop = True
            self.core.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def retire(self) -> None:
        """Let the thread end by itself: its engine was dropped without a shutdown."""
        if not self.ours:
            return
        with self.core.lock:
            self._stop = True
            self.core.changed.notify_all()

    def _serve(self) -> None:
        core, wake = self.core, False
        try:
            while True:
                with core.lock:
                    while not self._stop and (core.waiting or not self._anything()):
                        core.changed.wait(self._patience())
                    if self._stop:
                        break
                ran = self.tick(wake=wake)
                wake = False
                if ran.idle:
                    with core.lock:  # whoever waits for a companion has waited long enough then
                        wake = not core.changed.wait(self._patience())
        except BaseException as error:
            with core.lock:
                self._broken = error
                try:
                    for task in list(core.tasks.values()):
                        core.finish(task, BackendError("the engine loop has failed"))
                finally:
                    core.changed.notify_all()

    def _anything(self) -> bool:
        """Something is to run; if nothing else, a spine to put in order."""
        core = self.core
        try:
            core.expire(core.clock.now_ms())
            return bool(core.pending) or len(core.scheduler) > 0 or care(core)
        except MemoryError:  # an idle loop can wait until there is some
            return False

    def _patience(self) -> float | None:
        """Seconds an idle loop may sleep: for ever unless a timer is armed."""
        core = self.core
        waiting = [t.wake_ms for t in core.tasks.values() if t.held and t.wake_ms]
        if waiting:
            return max((min(waiting) - core.clock.now_ms()) / 1e3, 1e-4)
        return _POLL_S if core.due_ms < inf or len(core.scheduler) else None

    # ---------------------------------------------------------------- a tick

    def tick(self, *, wake: bool) -> Ran:
        """Run one batch.  wake: also run tasks that wait for a companion."""
        core, flight, running = self.core, Flight(), False
        before, core.driver = core.driver, threading.get_ident()
        try:
            with core.lock:
                finished = core.finished
                self._boarding.depart(flight, wake)
                empty = not flight.entries and not flight.batch.copies
                if core.short:  # a store is about to give pages back
                    core.short = False
                    if empty:
                        core.changed.wait(0.005)
                        return Ran()
                if empty:
                    return Ran(idle=core.finished == finished)
                core.flying = True
                core.in_flight = {entry.task.session for entry in flight.entries}
            running = True
            result = core.backend.execute(flight.batch)
            running = False
            with core.lock:
                core.flying, core.landed_s = False, time.monotonic()
                for _, pages in core.pending[: flight.copies]:
                    core.pool.unpin(pages)
                del core.pending[: flight.copies]
                return self._landing.land(flight, result)
        except BaseException as error:  # Ctrl-C may come at any of these lines
            with core.lock:
                core.flying, core.landed_s = False, time.monotonic()
                if running and isinstance(error, Exception):
                    self._landing.failed(flight, error)
                    return Ran()
                if isinstance(error, MemoryError):
                    self._landing.short(flight, error)
                    return Ran()
                self._landing.crash(flight, error)
            raise
        finally:
            core.driver = before
