"""Tools while they run: in threads for the sync loop, in tasks for the async one.

A thread cannot be stopped: a tool that outlives its time is left to end by itself, in a daemon
thread, and what it returns then is dropped.  A task is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from forkserve import threads
from forkserve.adapters.events import Call, Observation
from forkserve.adapters.react_run import Run
from forkserve.adapters.tools import (
    Tool,
    ToolError,
    ToolFailed,
    ToolTimeout,
    failure_of,
    to_text,
)

__all__ = ["Tasks", "Threads"]


@dataclass(frozen=True, slots=True)
class _Started:
    call: Call
    tool: Tool
    begin: float  # s, on the clock of time.monotonic
    timeout_s: float | None

    @property
    def deadline(self) -> float:
        return self.begin + (float("inf") if self.timeout_s is None else self.timeout_s)


def _observation(run: Run, started: _Started, work: Callable[[], Any]) -> Observation:
    """The observation that `work`, which gives a result or raises, comes to."""
    try:
        value = work()
        text, error = to_text(value), None
    except ToolError as failure:
        value, text, error = None, "", failure
    except BaseException as failure:  # also `sys.exit`: nobody else would hear of it in a thread
        value, text, error = None, "", failure_of(failure)
    ms = (time.monotonic() - started.begin) * 1e3
    if error is not None:
        return run.failed(started.call, error, ms)
    return Observation(started.call, text, ms, value)


async def _settled(result: Any) -> Any:
    """What an awaitable comes to; of an asynchronous iterator the list of what it yields."""
    if inspect.isawaitable(result):
        return await result
    return [item async for item in result]


def _pending(result: Any) -> bool:
    """Whether a result is still to be awaited, whatever the tool was declared to be."""
    return inspect.isawaitable(result) or isinstance(result, AsyncIterator)


def _late(started: _Started) -> ToolTimeout:
    return ToolTimeout(f"tool '{started.tool.name}' gave no result within {started.timeout_s:g} s")


class _Running:
    """Calls that were started and have not been seen to end, by id."""

    def __init__(self, run: Run, timeout_s: float | None) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._started: dict[str, _Started] = {}
        self._ready: list[Observation] = []  # known without running anything

    def _prepare(self, call: Call) -> tuple[_Started, dict[str, Any]] | None:
        prepared = self._run.prepare(call)
        if isinstance(prepared, Observation):
            self._ready.append(prepared)
            return None
        tool, arguments = prepared
        limit = tool.timeout_s if tool.timeout_s is not None else self._timeout_s
        started = _Started(call, tool, time.monotonic(), limit)
        self._started[call.id] = started
        return started, arguments

    def limit(self, call: Call) -> float | None:
        """How long a call that was started may run."""
        started = self._started.get(call.id)
        return started.timeout_s if started is not None else None

    def _wait_s(self) -> float | None:
        """Until the next deadline; None if there is none."""
        due = min((s.deadline for s in self._started.values()), default=float("inf"))
        return None if due == float("inf") else max(due - time.monotonic(), 0.0)

    def _expire(self) -> list[_Started]:
        """Give up the calls whose time is over."""
        now = time.monotonic()
        overdue = [s for s in self._started.values() if s.deadline <= now]
        for started in overdue:
            del self._started[started.call.id]
            ms = (now - started.begin) * 1e3
            self._ready.append(self._run.failed(started.call, _late(started), ms))
        return overdue


class Threads(_Running):
    """A thread for each call.  `next` hands out what ended, in the order of its end."""

    def __init__(self, run: Run, timeout_s: float | None) -> None:
        super().__init__(run, timeout_s)
        self._ended: SimpleQueue[Observation] = SimpleQueue()

    def start(self, call: Call) -> bool:
        """Run a call; its observation comes by `next`.  False if there is nothing to run."""
        prepared = self._prepare(call)
        if prepared is None:
            return False
        started, arguments = prepared
        context = contextvars.copy_context()
        threads.started(
            lambda: self._ended.put(context.run(self._call, started, arguments)),
            f"tool-{started.tool.name}",
        )
        return True

    def next(self, *, wait: bool) -> Observation | None:
        """An observation; None if there is none yet and `wait` is false."""
        while True:
            if self._ready:
                return self._ready.pop(0)
            try:
                found = self._ended.get(wait, self._wait_s() if wait else None)
                if self._started.pop(found.call.id, None) is not None:
                    return found
                continue  # it was given up before
            except Empty:
                pass
            if not self._expire() and not wait:
                return None

    def _call(self, started: _Started, arguments: dict[str, Any]) -> Observation:
        def work() -> Any:
            result = started.tool.call(arguments)
            return asyncio.run(_bounded(result, started)) if _pending(result) else result

        return _observation(self._run, started, work)


async def _bounded(result: Any, started: _Started) -> Any:
    """Await with a limit, so that what runs in a thread of its own ends with its time."""
    limit = asyncio.timeout(started.timeout_s)
    try:
        async with limit:
            return await _settled(result)
    except TimeoutError as error:
        if limit.expired():
            raise _late(started) from error
        raise


class Tasks(_Running):
    """A task for each async call, a thread for each sync one."""

    def __init__(self, run: Run, timeout_s: float | None) -> None:
        super().__init__(run, timeout_s)
        self._futures: dict[asyncio.Future[Observation], _Started] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, call: Call) -> bool:
        """Run a call; its observation comes by `next`.  False if there is nothing to run."""
        prepared = self._prepare(call)
        if prepared is None:
            return False
        started, arguments = prepared
        found = None if started.tool.is_async else self._thread(started, arguments)
        task = asyncio.create_task(self._await(started, arguments, found))
        self._tasks.add(task)
        self._futures[task] = started
        return True

    def also(self, work: Any) -> None:
        """Own a coroutine that goes on beside the tools."""
        self._tasks.add(asyncio.create_task(work))

    async def next(self, *, wait: bool) -> Observation | None:
        """An observation; None if there is none yet and `wait` is false."""
        while True:
            if self._ready:
                return self._ready.pop(0)
            if not wait and not any(future.done() for future in self._futures):
                return None
            done, _ = await asyncio.wait(
                self._futures, timeout=self._wait_s(), return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:
                started = self._futures.pop(future)
                self._started.pop(started.call.id, None)
                if future.cancelled():
                    error = ToolFailed("the tool cancelled itself")
                    self._ready.append(self._run.failed(started.call, error))
                else:
                    self._ready.append(future.result())
            for started in self._expire():
                self._give_up(started)

    async def aclose(self) -> None:
        """Cancel all tasks and wait until they have ended.  Idempotent."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()

    def _give_up(self, started: _Started) -> None:
        for future, other in list(self._futures.items()):
            if other is started:
                del self._futures[future]
                future.cancel()

    async def _await(
        self, started: _Started, arguments: dict[str, Any], found: asyncio.Future[Any] | None
    ) -> Observation:
        """found: what the thread of a sync tool comes to: an observation, or what to await."""
        result: Any = None
        try:
            result = started.tool.call(arguments) if found is None else await found
            if isinstance(result, Observation):
                return result
            if _pending(result):
                result = await _settled(result)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise  # meant for the loop, not for the model
        except BaseException as failure:
            error = failure
            return _observation(self._run, started, lambda: _raise(error))
        return _observation(self._run, started, lambda: result)

    def _thread(self, started: _Started, arguments: dict[str, Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def tell(found: Any) -> None:
            if not future.done():
                future.set_result(found)

        def work() -> None:
            raw: list[Any] = []

            def call() -> Any:
                raw.append(started.tool.call(arguments))
                return None if _pending(raw[0]) else raw[0]

            found = context.run(_observation, self._run, started, call)
            if raw and _pending(raw[0]):  # for the caller's loop, to which it may belong
                found = raw[0]
            try:
                loop.call_soon_threadsafe(tell, found)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        threads.started(work, f"tool-{started.tool.name}")
        return future


def _raise(error: BaseException) -> None:
    raise error
