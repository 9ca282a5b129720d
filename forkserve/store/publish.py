"""Publishing off the token path: a bounded queue, one thread, tickets."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from forkserve.errors import BackendError, StoreError
from forkserve.store.chunks import Buffer
from forkserve.store.identity import Fingerprint, Link
from forkserve.store.metrics import Meter
from forkserve.store.pace import RUSH_S, Pace
from forkserve.store.vault import Stored, Vault
from forkserve.threads import started

__all__ = ["Capture", "Publication", "Publisher"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Capture:
    """Rows to publish.

    read(link, spare): the rows of a link, while the pages are held, in a buffer of `spare` if one
    fits.  release: let go of the pages; called exactly once, whatever happens.  after: run once the
    bytes are durable.
    """

    made: Fingerprint
    links: Sequence[Link]
    read: Callable[[Link, list[memoryview]], Buffer]
    release: Callable[[], None]
    after: Callable[[], None] | None = None
    _state: Literal["queued", "running", "dropped"] = field(default="queued", repr=False)
    _released: bool = field(default=False, repr=False)


@dataclass(slots=True)
class Publication:
    """Ticket of one publish.  accepted: False when the queue was full or the store is closed, with
    the `reason`.  tokens: that the chunks cover."""

    tokens: int
    accepted: bool = True
    reason: str = ""
    _done: Future[Stored] = field(default_factory=Future, repr=False)

    @property
    def done(self) -> bool:
        return self._done.done()

    def wait(self, timeout_s: float | None = None) -> Stored:
        """What was stored, once it is durable and catalogued.

        Raises StoreError: refused, failed (the cause is chained), or not done within `timeout_s`.
        """
        if not self.accepted:
            raise StoreError(f"nothing was published: {self.reason}")
        try:
            return self._done.result(timeout_s)
        except TimeoutError:
            raise StoreError(f"the publish is not done after {timeout_s} s") from None
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"the publish failed: {error}") from error


class Publisher:
    """Runs captures one after the other in a thread of its own.

    depth: captures that may wait; one more is refused at once, so that nobody is ever delayed.
    on_failure: told of every publish that failed.  meter: counts what was written and dropped.
    pace: of that thread, beside passes.
    """

    def __init__(
        self,
        vault: Vault,
        depth: int = 2,
        on_failure: Callable[[BaseException], None] | None = None,
        meter: Meter | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.pace = pace or Pace()
        self.dropped = 0
        self.finished = 0
        self._vault = vault
        self._queue: queue.Queue[tuple[Capture, Publication] | None] = queue.Queue(depth)
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._holding: dict[int, Capture] = {}  # captures whose pages are not released
        self._closed = False
        self._ended = False  # the thread takes nothing more from the queue

    def offer(self, capture: Capture, *, patience_s: float = 0.0) -> Publication:
        """Queue a capture.  patience_s: a caller that waits anyway may wait for room as well."""
        tokens = capture.links[-1].start + capture.links[-1].count if capture.links else 0
        ticket = Publication(tokens)
        with self._lock:
            refused = "the store is closed" if self._closed else self._start()
            if not refused:
                self._holding[id(capture)] = capture
        if refused:
            capture.release()
            return Publication(tokens, False, refused)
        try:
            self._queue.put((capture, ticket), block=patience_s > 0, timeout=patience_s or None)
        except queue.Full:
            if capture._state != "dropped":  # while it waited for room (`relieve`)
                self._count_drop()
            self._release(capture)
            return Publication(tokens, False, "the queue is full")
        if self._ended:
            self._refuse_rest()
        return ticket

    def _start(self) -> str:
        """Have a thread; why there is none, or ''."""
        try:
            self._thread = self._thread or started(self._serve, "forkserve-publish")
        except BackendError as error:
            self._count_drop()
            return str(error)
        return ""

    def _refuse_rest(self) -> None:
        """What came into the queue while the thread ended: nobody would ever do it."""
        with suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    self._release(job[0])
                    job[1]._done.set_exception(StoreError("the store was closed meanwhile"))
                self._queue.task_done()

    def relieve(self) -> bool:
        """Pages are short: captures that only wait are dropped; True while one is being read.

        Called under the engine's lock.
        """
        with self._lock:
            waiting = [c for c in self._holding.values() if c._state == "queued"]
            for capture in waiting:
                capture._state = "dropped"
        for capture in waiting:
            self._count_drop()
            self._release(capture)
        with self._lock:
            reading = bool(self._holding)
        if reading:
            self.pace.rush(RUSH_S)
        return reading

    @property
    def queued(self) -> int:
        """Captures that wait."""
        return self._queue.qsize()

    def _count_drop(self) -> None:
        self.dropped += 1
        self.meter.add("dropped", queue="publish")

    def _release(self, capture: Capture) -> None:
        with self._lock:
            if capture._released:
                return
            capture._released = True
        capture.release()
        with self._lock:
            self._holding.pop(id(capture), None)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything queued so far is done; False when that takes longer."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what is queued, at most for `timeout_s` seconds.  Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self.pace.rush(timeout_s)
            end = time.monotonic() + timeout_s
            with suppress(queue.Full):  # it hangs: what waits is left to it
                self._queue.put(None, timeout=timeout_s)
            thread.join(max(end - time.monotonic(), 0.0))

    def _serve(self) -> None:
        with self.pace.worker():
            while True:
                job = self._queue.get()
                try:
                    if job is None:
                        break
                    self._run(*job)
                finally:
                    self._queue.task_done()
        self._ended = True
        self._refuse_rest()

    def _put(self, capture: Capture) -> Stored:
        """Chunks into the vault, in as few buffers as possible: new memory costs page faults."""
        spare: list[memoryview] = []
        used: list[memoryview] = []

        def read(link: Link) -> Buffer:
            rows = capture.read(link, spare)
            if isinstance(rows, memoryview):
                used.append(rows)
            return rows

        def stored() -> None:
            spare.extend(used)
            used.clear()

        return self._vault.put(capture.made, capture.links, read, stored)

    def _run(self, capture: Capture, ticket: Publication) -> None:
        with self._lock:
            if capture._state == "dropped":
                ticket._done.set_exception(StoreError("dropped: its pages were needed for tokens"))
                return
            capture._state = "running"
        begin = time.perf_counter()
        try:
            try:
                stored = self._put(capture)
            finally:
                self._release(capture)
            if capture.after is not None:
                capture.after()
        except BaseException as error:
            _log.warning("a publish failed: %s", error)
            if self._on_failure is not None:
                self._on_failure(error)
            ticket._done.set_exception(error)
        else:
            self.finished += 1
            self.meter.took("publish", (time.perf_counter() - begin) * 1e3)
            self.meter.add("published_chunks", stored.written)
            self.meter.add("published_bytes", stored.bytes)
            ticket._done.set_result(stored)
