"""One running generation: what it was asked, what it has produced, and how it ended.

How it may end, in the order in which a token is looked at:

eos: the model's end token, or one of `stop_ids`, was sampled.
stop: the text came to a stop string; it ends before it.
length: `max_tokens` tokens were sampled.
constraint: the constraint lets nothing follow, not even the end token.
context: the model's context is full.
cancelled: a stream was closed, a task was cancelled, or the branch was aborted.
error: something failed, a constraint for instance; whoever waits for the reply gets it raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from forkserve.control.text import TextStream
from forkserve.engine.counts import PathCounts
from forkserve.errors import ConfigError
from forkserve.types import IntArray, SamplingParams

__all__ = ["FinishReason", "Generation"]

T = TypeVar("T")

FinishReason = Literal["length", "eos", "stop", "context", "constraint", "cancelled", "error"]


class Generation:
    """Handle of a generation; `Engine.start` returns it.

    tokens: everything sampled, the end token included; they are in the tree as well.
    text: the decoded tokens without special ones, up to a stop string.  It begins with the whole
    character that the path before may have ended in, and ends with the last whole one.
    finish_reason: None while it runs.
    """

    def __init__(
        self,
        number: int,
        session: str,
        node: int,
        limit: int,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        decode_bytes: Callable[[Sequence[int]], bytes],
        run_until: Callable[[Callable[[], bool]], None],
        cancel: Callable[[Generation, bool], None],
        counts: PathCounts | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.session = session
        self.node = node
        self.limit = limit
        self.params = params
        self.seed = seed
        self._vocab_size = vocab_size
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.abandoned = False  # to be cancelled by the next one who looks at the queues
        self.started_ms = 0.0
        self.first_token_ms: float | None = None  # time on the engine's clock
        self.allowed: IntArray | None = None  # ids the constraint permits next
        self.counts = counts  # tokens of the path, for penalties
        self._pieces: list[str] = []
        self._stream = TextStream(decode_bytes, params.stop, decode_bytes(before))
        self.wait = run_until  # drive the engine, or wait for it, until a condition holds
        self._cancel = cancel

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def forced(self) -> int | None:
        """The token that comes next whatever is drawn, if that is known and needs no logits."""
        allowed = self.allowed
        if allowed is None or allowed.size != 1 or self.params.logprobs:
            return None
        return int(allowed[0])

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def text_length(self) -> int:
        """Characters of `text`, without putting it together."""
        return self._stream.length

    def result(self) -> list[int]:
        """Wait for the end and return the tokens; raises what stopped the generation early."""
        self.wait(lambda: self.done)
        if self.error is not None:
            raise self.error
        return self.tokens

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come.  Leaving the loop early cancels the rest."""
        return self._follow(self.tokens)

    def pieces(self) -> Iterator[str]:
        """Text as it comes, in whole characters; the pieces concatenate to `text`."""
        return self._follow(self._pieces)

    def _follow(self, growing: list[T]) -> Iterator[T]:
        seen = 0
        try:
            while True:
                self.wait(partial(self._has, growing, seen))
                while seen < len(growing):
                    seen += 1
                    yield growing[seen - 1]
                if self.done:
                    break
        finally:
            self.abandon()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Cancel without waiting for anybody: what a dropped iterator may do wherever it is."""
        if not self.done:
            self._cancel(self, False)

    def _has(self, growing: list[T], seen: int) -> bool:
        return self.done or len(growing) > seen

    def cancel(self) -> None:
        """End it now; the tokens so far stay.  A no-op once it is done."""
        if not self.done:
            self._cancel(self, True)

    # ---------------------------------------------------------------- for the engine loop

    def push(
        self,
        token: int,
        logprob: float | None,
        eos_ids: Sequence[int],
        top: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Take one sampled token and decide whether it was the last."""
        params = self.params
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.push(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if params.top_logprobs:
            self.top_logprobs.append(top)
        if token in params.stop_ids or (token in eos_ids and not params.ignore_eos):
            return self.end("eos")
        self._say(self._stream.push((token,)))
        if self._stream.stopped is not None:
            self.end("stop")
        elif len(self.tokens) >= self.limit:
            self.end("length")
        else:
            self.narrow()

    def narrow(self) -> None:
        """Ask the constraint what may come next; nothing ends the generation.

        Raises ConfigError for an id outside the vocabulary, and whatever the constraint raises.
        """
        if self.params.constraint is None:
            return
        allowed = self.params.constraint.allowed(self.tokens)
        if allowed is None:
            self.allowed = None
            return
        ids = np.asarray(allowed)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ConfigError(f"the constraint allows {ids.dtype} values; ids are integers")
        self.allowed = ids.astype(np.int64, copy=False)
        if self.allowed.size == 0:
            self.end("constraint")
        elif self.allowed.min() < 0 or self.allowed.max() >= self._vocab_size:
            raise ConfigError(
                f"the constraint allows ids {self.allowed.min()}..{self.allowed.max()}, but the "
                f"vocabulary has {self._vocab_size} ids"
            )

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Close the generation; later calls change nothing."""
        if self.done:
            return
        try:
            self._say(self._stream.finish())
        except Exception as failure:  # of a tokenizer: the generation ends all the same
            reason, error = "error", error or failure
        self.error = error
        self.finish_reason = reason

    def _say(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
