"""Work beside the conversation: one thread of an adapter, in which nobody waits for a tool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from forkserve.api import Engine
from forkserve.errors import BackendError, ForkServeError
from forkserve.threads import started

__all__ = ["Worker"]

_log = logging.getLogger(__name__)
_Job = tuple[Callable[[], None], Future[None]]


class Worker:
    """Runs jobs in order; for an engine without a thread of its own, speculates between them.

    failed: called when a job raised.  What goes wrong here costs time and never a conversation.
    """

    def __init__(self, engine: Engine, failed: Callable[[], None]) -> None:
        self._engine = engine
        self._failed = failed
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job.  Its future never holds an exception.  Without a thread it is dropped."""
        future: Future[None] = Future()
        with self._lock:
            if self._closed or not self._begun():
                future.set_result(None)
            else:
                self._jobs.put((job, future))
        return future

    def _begun(self) -> bool:
        """Whether there is a thread."""
        try:
            self._thread = self._thread or started(self._serve, "forkserve-openhands")
        except BackendError as error:
            _log.warning("nothing is speculated on beside a conversation: %s", error)
        return self._thread is not None

    def settle(self) -> None:
        """Wait until all jobs so far have run, and what they speculate on has been computed."""
        self.run(self._drain).result()

    def close(self) -> None:
        """Run what is queued and end the thread.  Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _serve(self) -> None:
        idle = True  # nothing is left to speculate on, or the engine does it by itself
        while True:
            try:
                item = self._jobs.get(block=idle)
            except Empty:
                idle = not self._step()
                continue
            if item is None:
                return
            job, future = item
            try:
                job()
            except ForkServeError as error:
                _log.debug("speculation was given up: %s", error)
                self._failed()
            except Exception:
                _log.exception("work beside a conversation failed")
                self._failed()
            finally:
                future.set_result(None)
            idle = self._engine.config.background

    def _drain(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """One tick of speculation; false when nothing was left."""
        try:
            return self._engine.drain_slack() > 0
        except ForkServeError as error:
            _log.debug("speculation was given up: %s", error)
            return False
