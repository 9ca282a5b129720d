"""What a generation gives back as text: a reply, or a stream of pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from forkserve import aio
from forkserve.control.generation import FinishReason, Generation
from forkserve.errors import ConfigError
from forkserve.types import GREEDY, SamplingParams
from forkserve.values import nearest

if TYPE_CHECKING:
    from forkserve.api import Engine

__all__ = ["AsyncStream", "Dropped", "Reply", "Speaker", "Stream", "collect", "gather"]

Dropped = SimpleQueue[Generation]  # generations whose stream was dropped without closing it


@dataclass(frozen=True, slots=True)
class Reply:
    """What a generation said.  ``str(reply)`` is its text.

    text: without special tokens, and up to a stop string.  It ends with the last whole character,
    whatever the reason; if the path before ended inside one, it begins with that whole one.
    tokens: all that were sampled, also the end token and those that spell a stop string: they are
    in the tree.  finish_reason: length, eos, stop, context, constraint, or cancelled (also by an
    abort); of a stream also error, and None while it runs.
    logprobs: one for each token if they were asked for, of the raw distribution.
    top_logprobs: for each token the (id, log p) of the likeliest ids, best first.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, generation: Generation) -> Reply:
        """The reply so far."""
        reason, tokens = generation.finish_reason, tuple(generation.tokens)
        logprobs, top = tuple(generation.logprobs), tuple(generation.top_logprobs)
        return cls(generation.text, tokens, reason, logprobs, top)


def collect(generations: Sequence[Generation]) -> list[Reply]:
    """Wait for all.  If one fails, or the wait is interrupted, the others are cancelled."""
    try:
        if generations:
            aio.wait(generations[0], lambda: _settled(generations))
        return _replies(generations)
    finally:
        for generation in generations:
            generation.cancel()


async def gather(engine: Engine, generations: Sequence[Generation]) -> list[Reply]:
    """`collect` for a coroutine.  If it is cancelled, so are the generations, once."""
    try:
        if generations:
            await aio.until(engine, generations[0], lambda: _settled(generations))
        return _replies(generations)
    finally:
        for generation in generations:
            generation.cancel()


def _replies(generations: Sequence[Generation]) -> list[Reply]:
    for generation in generations:
        if generation.error is not None:
            raise generation.error
    return [Reply.of(generation) for generation in generations]


def _settled(generations: Sequence[Generation]) -> bool:
    return all(g.done for g in generations) or any(g.error is not None for g in generations)


class _Course:
    """A generation and how much of its text was handed on.

    Apart from its stream, since frames that wait must not hold that: an error raised in a pass, a
    constraint's for instance, keeps the frames of whoever drives the engine then, and a stream that
    they held would not be known to be dropped.
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.closed = False
        self._seen = 0

    def ready(self) -> bool:
        """There is a piece to take, or the end."""
        generation = self.generation
        return generation is None or generation.done or generation.text_length > self._seen

    def take(self) -> str | None:
        """The next piece; None at the end."""
        generation = self.generation
        assert generation is not None
        text = generation.text
        piece, self._seen = text[self._seen :], len(text)
        if piece:
            return piece
        self.end()
        if generation.error is not None:
            raise generation.error
        return None

    def end(self) -> None:
        """Cancel what is left."""
        self.closed = True
        if self.generation is not None:
            self.generation.cancel()


class _Following:
    """What both kinds of stream share."""

    def __init__(self, dropped: Dropped) -> None:
        self._course = _Course()
        self._dropped = dropped

    @property
    def reply(self) -> Reply:
        """What has come so far; its finish_reason is None while the stream runs."""
        generation = self._course.generation
        return Reply.of(generation) if generation is not None else Reply("", (), None)

    def __del__(self) -> None:
        # A finalizer may run anywhere, even inside the engine: no lock may be taken here.  The
        # generation ends with its next token; the session's next verb ends it for certain.
        generation = self._course.generation
        if generation is not None and not generation.done:
            generation.limit = len(generation.tokens) + 1
            self._dropped.put(generation)


class Stream(_Following, Iterator[str]):
    """Text as it comes, in whole characters; stop strings are never shown.

    It begins with the first piece that is asked for.  `close`, or leaving it as a context manager,
    cancels what is left; the tokens so far stay.  `reply` has tokens and reason.
    """

    def __init__(self, begin: Callable[[], Generation], dropped: Dropped) -> None:
        super().__init__(dropped)
        self._begin = begin

    def __next__(self) -> str:
        course, begin = self._course, self._begin
        del self  # see `_Course`
        if course.closed:
            raise StopIteration
        try:
            if course.generation is None:
                course.generation = begin()
            aio.wait(course.generation, course.ready)
            piece = course.take()
        except BaseException:
            course.end()
            raise
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel what is left.  Idempotent."""
        self._course.end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Following, AsyncIterator[str]):
    """`Stream` for ``async for``.  Cancelling the task that waits for a piece cancels it all.

    Use it as an async context manager, or call `aclose`, when the loop may be left early.
    """

    def __init__(
        self, engine: Engine, begin: Callable[[], Awaitable[Generation]], dropped: Dropped
    ) -> None:
        super().__init__(dropped)
        self._engine = engine
        self._begin = begin

    async def __anext__(self) -> str:
        course = self._course
        if course.closed:
            raise StopAsyncIteration
        try:
            if course.generation is None:
                course.generation = await self._begin()
            await aio.until(self._engine, course.generation, course.ready)
            piece = course.take()
        except BaseException:
            course.end()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel what is left.  Idempotent."""
        self._course.end()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._course.end()


class Speaker:
    """What sessions and branches share: generation as text, and its async twins."""

    engine: Engine
    _dropped: Dropped

    def _start(self, max_tokens: int, params: SamplingParams) -> Generation:
        raise NotImplementedError

    async def _astart(self, max_tokens: int, params: SamplingParams) -> Generation:
        raise NotImplementedError

    def generate(
        self, max_tokens: int = 128, params: SamplingParams | None = None, **sampling: Any
    ) -> Reply:
        """Sample up to `max_tokens` tokens at the end of this; they become committed text.

        params or **sampling: fields of `SamplingParams` (temperature=, stop=, seed=, ...);
        given both, the keywords win.  A speculative branch becomes an attempt first, and so do
        speculative branches above it: guessed text is never sampled on.

        Raises NodeError (dead, not the end of its line, or ends in a guess), SessionError
        (closed, or already generating), ContextOverflow, OutOfPages, BackendError.
        """
        return collect([self._start(max_tokens, sampling_params(params, sampling))])[0]

    async def agenerate(
        self, max_tokens: int = 128, params: SamplingParams | None = None, **sampling: Any
    ) -> Reply:
        """`generate` for a coroutine; tasks that wait at the same time share passes.

        Cancelling the task cancels the generation; the tokens so far stay.
        """
        generation = await self._astart(max_tokens, sampling_params(params, sampling))
        return (await gather(self.engine, [generation]))[0]

    def stream(
        self, max_tokens: int = 128, params: SamplingParams | None = None, **sampling: Any
    ) -> Stream:
        """`generate` piece by piece: an iterator over text; closing it cancels the rest."""
        chosen = sampling_params(params, sampling)
        return Stream(lambda: self._start(max_tokens, chosen), self._dropped)

    def astream(
        self, max_tokens: int = 128, params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncStream:
        """`stream` for ``async for``; cancelling the task cancels the rest."""
        chosen = sampling_params(params, sampling)
        return AsyncStream(self.engine, lambda: self._astart(max_tokens, chosen), self._dropped)


def sampling_params(params: SamplingParams | None, changes: dict[str, Any]) -> SamplingParams:
    """`params`, or greedy, with some fields changed.  Raises ConfigError for an unknown one."""
    params = GREEDY if params is None else params
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params must be SamplingParams, not {type(params).__name__}")
    for name in changes:
        if name not in _FIELDS:
            raise ConfigError(f"unknown field '{name}' of SamplingParams{nearest(name, _FIELDS)}")
    return replace(params, **changes)


_FIELDS = tuple(field.name for field in fields(SamplingParams))
