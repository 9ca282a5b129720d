"""Waiting from an event loop.

An engine is waited for in threads.  Tasks wait for generations through one thread for each engine,
which watches for all of them, so that they decode in shared passes; and for verbs that hold a
session for a moment in a small pool.  Nothing here makes a task: what is running is owned by the
coroutine that awaits it, and ends with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from forkserve.control.generation import Generation
from forkserve.errors import BackendError
from forkserve.threads import no_thread, started

if TYPE_CHECKING:
    from forkserve.api import Engine

__all__ = ["in_thread", "until", "wait"]

T = TypeVar("T")
RunUntil = Callable[[Callable[[], bool]], None]

_WORKERS = 16  # verbs in threads at once; each waits for one pass at most
_LINGER_S = 0.2  # how long the watching thread outlives the last wait


async def in_thread(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """The result of `work`, run in a thread.

    A verb cannot be stopped half-way.  When the caller is cancelled the work still ends before the
    cancellation goes on; `undo` then takes its result back.
    """
    job: Future[T] = Future()

    def run() -> None:
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except BaseException as error:
                job.set_exception(error)

    try:
        _pool().submit(run)
    except RuntimeError as error:  # no thread more; one that is there may have begun with it
        if job.cancel():
            raise no_thread("forkserve-verb", error) from error
    future = asyncio.wrap_future(job)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    if future.exception() is None and undo is not None:
        undo(future.result())
    raise cancelled


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="forkserve-verb")


def wait(generation: Generation, ready: Callable[[], bool]) -> None:
    """Block until `ready()` holds; drives an engine that has no thread of its own."""
    generation.wait(ready)


async def until(engine: Engine, generation: Generation, ready: Callable[[], bool]) -> None:
    """`wait` for a coroutine.

    ready: once true it stays true; asked in other threads, under the engine's lock.
    Raises BackendError when the engine failed or was shut down.
    """
    with _pumps_lock:
        pump = _pumps.setdefault(engine, _Pump())
    await pump.until(generation.wait, ready)
    if engine.store is not None:  # what has ended is durable before its waiter goes on
        await in_thread(partial(generation.wait, lambda: True))


class _Wait:
    """One coroutine that waits."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.error: BaseException | None = None

    def tell(self, error: BaseException | None) -> None:
        """Wake the coroutine; called from any thread."""
        self.error = error
        with suppress(RuntimeError):  # its loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Pump:
    """The thread that watches an engine for all its coroutines.  It lives while they wait.

    Lock order: the engine's lock, then this one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waits: set[_Wait] = set()
        self._running = False

    async def until(self, run_until: RunUntil, ready: Callable[[], bool]) -> None:
        wait = _Wait(ready)
        with self._changed:
            self._waits.add(wait)
        try:
            # Asked after it was added: what becomes true from now on is noticed by the thread.
            if ready():
                return
            with self._changed:
                if not self._running:
                    started(partial(self._serve, run_until), "forkserve-async")
                    self._running = True
                self._changed.notify()
            await wait.future
            if wait.error is not None:
                raise BackendError(str(wait.error)) from wait.error
        finally:
            with self._changed:
                self._waits.discard(wait)

    def _serve(self, run_until: RunUntil) -> None:
        while True:
            with self._changed:
                if not self._waits:
                    self._changed.wait(_LINGER_S)
                if not self._waits:
                    self._running = False
                    return
            error: BaseException | None = None
            try:
                run_until(self._due)
            except BaseException as failure:
                error = failure
            self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        """Wake those who can go on, or all with the error.  Keeps no reference to them."""
        with self._changed:
            due = [wait for wait in self._waits if error is not None or wait.ready()]
            self._waits.difference_update(due)
        for wait in due:
            wait.tell(error)

    def _due(self) -> bool:
        """Somebody can go on, or nobody waits any more."""
        with self._changed:
            return not self._waits or any(wait.ready() for wait in self._waits)


_pumps: WeakKeyDictionary[Engine, _Pump] = WeakKeyDictionary()
_pumps_lock = threading.Lock()


def _forked() -> None:
    """In the child of a fork: the threads stayed in the parent, a lock may be held for ever."""
    global _pumps, _pumps_lock
    _pumps, _pumps_lock = WeakKeyDictionary(), threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
