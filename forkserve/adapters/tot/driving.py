"""The waiting of a search, in a thread or in a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, ParamSpec

from forkserve import aio
from forkserve.adapters.tot.records import ToTResult
from forkserve.adapters.tot.run import Asking, Batch, Halt, Run, Strategy
from forkserve.reply import Reply

__all__ = ["Plan", "asearch", "search", "twins"]

P = ParamSpec("P")
Plan = tuple[Run, Strategy]


def search(run: Run, strategy: Strategy) -> ToTResult:
    """Run a search to its end.  However it ends, its branches are gone and its pages are back."""
    steps = _Steps(run, strategy)
    try:
        run.open()
        while (batch := steps.next()) is not None:
            generations = run.start(batch)
            try:
                aio.wait(generations[0], partial(run.settled, generations))
            finally:
                for generation in generations:
                    generation.cancel()
            steps.replies = run.land(batch, generations)
        return run.finish()
    finally:
        steps.close()


async def asearch(run: Run, strategy: Strategy) -> ToTResult:
    """`search` for a coroutine.  Cancelling it cancels what decodes."""
    steps = _Steps(run, strategy)
    try:
        await aio.in_thread(run.open)
        while (batch := steps.next()) is not None:
            generations = run.start(batch)
            try:
                await aio.until(run.engine, generations[0], partial(run.settled, generations))
            finally:
                for generation in generations:
                    generation.cancel()
            steps.replies = run.land(batch, generations)
        return await aio.in_thread(run.finish)
    finally:
        steps.close()


def twins(
    name: str, plan: Callable[P, Plan]
) -> tuple[Callable[P, ToTResult], Callable[P, Coroutine[Any, Any, ToTResult]]]:
    """A search and its twin for coroutines.  plan: checks the arguments; its words are theirs."""

    def sync(*args: P.args, **kwargs: P.kwargs) -> ToTResult:
        return search(*plan(*args, **kwargs))

    async def awaited(*args: P.args, **kwargs: P.kwargs) -> ToTResult:
        return await asearch(*plan(*args, **kwargs))

    sync.__doc__ = plan.__doc__
    awaited.__doc__ = f"`{name}` for a coroutine; cancelling it ends the search."
    signature = inspect.signature(plan).replace(return_annotation="ToTResult")
    for function, own in ((sync, name), (awaited, f"a{name}")):
        function.__name__ = function.__qualname__ = own
        function.__module__ = plan.__module__
        function.__signature__ = signature  # type: ignore[union-attr]
    return sync, awaited


class _Steps:
    """The strategy, from batch to batch."""

    def __init__(self, run: Run, strategy: Strategy) -> None:
        self.replies: list[Reply] | None = None
        self._run = run
        self._asking: Asking[None] = strategy(run)

    def next(self) -> Batch | None:
        """The next batch that is not empty; None at the end."""
        asking: Generator[Batch, list[Reply] | None, None] = self._asking  # type: ignore[assignment]
        try:
            return asking.send(self.replies)
        except StopIteration:
            return None
        except Halt as halt:
            self._run.stopped = halt.reason
            return None

    def close(self) -> None:
        """End the strategy where it is, and give back what the run holds."""
        try:
            self._asking.close()
        finally:
            self._run.close()
