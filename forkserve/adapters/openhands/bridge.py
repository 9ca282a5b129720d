"""Chat completions on an engine: each call has its whole history, each conversation a tree.

No framework is loaded here: `provider` puts it behind litellm, `watching` feeds it with events.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from forkserve import aio
from forkserve.adapters.chat import Renderers
from forkserve.adapters.openhands.calls import Call
from forkserve.adapters.openhands.forest import Forest
from forkserve.adapters.openhands.requests import Answer, ChatRequest, Delta, Turn
from forkserve.api import Engine
from forkserve.errors import ConfigError, ContextOverflow

__all__ = ["Bridge", "Stats"]


@dataclass(slots=True)
class Stats:
    """Counts since the start.

    requests: opened, continued, forked and side ones.  prompt, cached: tokens of their prompts, and
    those of them that need not be computed.  generated: tokens of the replies.
    speculated: tokens admitted while tools ran.  committed: turns whose results were bound before
    the next request; errors: those with an error among them.  drifts: turns of which nothing could
    be known.  failures: work beside the requests that failed, which costs time only.
    """

    opened: int = 0
    continued: int = 0
    forked: int = 0
    side: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    speculated: int = 0
    committed: int = 0
    errors: int = 0
    drifts: int = 0
    failures: int = 0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.opened + self.continued + self.forked + self.side


class Bridge:
    """Answers chat requests; used by many threads and tasks at once.

    keep: families that are kept while nobody uses them.  max_tokens: of a reply whose request does
    not say.  options: of `Engine.open` (tenant=, salt=, seed=).
    """

    def __init__(
        self, engine: Engine, *, keep: int = 16, max_tokens: int = 4096, **options: Any
    ) -> None:
        if keep < 1 or max_tokens < 1:
            raise ConfigError(f"keep={keep} and max_tokens={max_tokens} must be >= 1")
        self.engine = engine
        self.max_tokens = max_tokens
        self.renderers = Renderers(engine.backend.tokenizer)
        self.forest = Forest(engine, keep, options, self._forget)
        self._stats = Stats()
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}  # the last one, by conversation
        self._jobs: dict[str, Future[None]] = {}  # last work beside the requests, likewise
        self._parents: dict[str, str] = {}  # of conversations whose first request is to come

    @property
    def stats(self) -> Stats:
        """The counts by now."""
        with self._lock:
            return replace(self._stats)

    def count(self, **counts: int) -> None:
        """Add to the counts."""
        with self._lock:
            for name, number in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + number)

    # ---------------------------------------------------------------- calls

    def complete(self, request: ChatRequest) -> Answer:
        """The whole reply.

        Raises ContextOverflow, ConfigError (a bad request), TimeoutError, and what generating
        raises.
        """
        answer: Answer | None = None
        with closing(self.stream(request)) as items:
            for item in items:
                answer = item if isinstance(item, Answer) else answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    async def acomplete(self, request: ChatRequest) -> Answer:
        """`complete` for a coroutine; cancelling it ends the generation."""
        answer: Answer | None = None
        async with aclosing(self.astream(request)) as items:
            async for item in items:
                answer = item if isinstance(item, Answer) else answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    def stream(self, request: ChatRequest) -> Generator[Delta | Answer, None, None]:
        """Pieces of the reply, then all of it.  Closing the iterator ends the generation."""
        with self._call(request) as call:
            limit, params = call.limits(self.max_tokens)
            with call.branch.stream(limit, params) as pieces:
                for piece in pieces:
                    if delta := call.feed(piece):
                        yield delta
                if delta := call.rest():
                    yield delta
                answer = self._answered(call, call.answer(pieces.reply), pieces.reply.tokens)
        yield answer

    async def astream(self, request: ChatRequest) -> AsyncGenerator[Delta | Answer, None]:
        """`stream` for a coroutine; prompts are put in place in a thread."""
        with ExitStack() as stack:
            context = self._call(request)
            call = await aio.in_thread(lambda: stack.enter_context(context))
            limit, params = call.limits(self.max_tokens)
            async with call.branch.astream(limit, params) as pieces:
                async for piece in pieces:
                    if delta := call.feed(piece):
                        yield delta
                if delta := call.rest():
                    yield delta
                answer = self._answered(call, call.answer(pieces.reply), pieces.reply.tokens)
        yield answer

    @contextmanager
    def _call(self, request: ChatRequest) -> Iterator[Call]:
        if not request.messages:
            raise ConfigError("a chat request needs at least one message")
        with self._lock:
            parent = self._parents.get(request.conversation, "")
        request = request if request.parent else replace(request, parent=parent)
        self.settle(request.conversation)
        prompt = self.renderers.tokens(request.messages, request.tools)
        limit = self.engine.backend.info.max_context
        if len(prompt) >= limit:
            raise ContextOverflow(len(prompt) + 1, limit, "prompt with a reply")
        with self.forest.turn(request, prompt) as place:
            if place.tip.owner:
                self._drop_guesses(request.conversation)
            self.count(**{place.how: 1}, prompt=len(prompt), cached=place.cached)
            yield Call(self.engine, request, prompt, place)

    def _answered(self, call: Call, answer: Answer, tokens: tuple[int, ...]) -> Answer:
        tip, owner = call.place.tip, call.request.conversation
        self.count(generated=len(tokens))
        if tip.owner:
            decoded = [*call.prompt, *tokens]
            with self._lock:
                self._parents.pop(owner, None)
                self._turns[owner] = Turn(
                    answer, call.request, call.place.family, tip, tip.serial, decoded
                )
        return answer

    # ---------------------------------------------------------------- beside the calls

    def turn(self, response: str) -> Turn | None:
        """The reply of this id, if its conversation has not gone on since."""
        with self._lock:
            return next((t for t in self._turns.values() if t.answer.id == response), None)

    def tools(self, conversation: str) -> Sequence[Mapping[str, Any]] | None:
        """The tools of a conversation's last request, or of its origin's; None if not known."""
        with self._lock:
            turns = self._turns
            turn = turns.get(conversation) or turns.get(self._parents.get(conversation, ""))
        return turn.request.tools if turn is not None else None

    def derive(self, conversation: str, parent: str) -> None:
        """The first request of a conversation goes on with the history of another one."""
        with self._lock:
            self._parents[conversation] = parent

    def beside(self, conversation: str, job: Callable[[], Future[None]]) -> None:
        """Start work that the next request of a conversation waits for."""
        with self._lock:
            self._jobs[conversation] = job()

    def settle(self, conversation: str) -> None:
        """Wait for the work beside a conversation."""
        with self._lock:
            job = self._jobs.pop(conversation, None)
        if job is not None:
            job.exception()

    def release(self, conversation: str) -> None:
        """A conversation is over: give back what it alone held."""
        self.settle(conversation)
        self._drop_guesses(conversation)
        self.forest.release(conversation)

    def prune(self, conversation: str) -> None:
        """Drop the branches that a conversation has left."""
        self.settle(conversation)
        self.forest.prune(conversation)

    def close(self) -> None:
        """End all conversations.  Idempotent."""
        self.forest.close()

    def _drop_guesses(self, conversation: str) -> None:
        """Abort what is left of the speculation of a conversation's last turn."""
        with self._lock:
            turn = self._turns.get(conversation)
        if turn is not None:
            turn.drop()

    def _forget(self, owners: set[str]) -> None:
        with self._lock:
            for kept in (self._turns, self._jobs, self._parents):
                for owner in owners:
                    kept.pop(owner, None)
