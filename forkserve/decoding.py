"""The verbs that sample: generate, generate_many, start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from forkserve.control import lines
from forkserve.control.core import Core
from forkserve.control.generation import Generation
from forkserve.control.guard import Guard
from forkserve.control.loop import Loop
from forkserve.control.taking import jump
from forkserve.engine.counts import PathCounts
from forkserve.errors import ConfigError, NodeError
from forkserve.inspection import Inspection
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import GREEDY, NodeMode, SamplingParams, derive_seed
from forkserve.values import listed, whole

__all__ = ["Decoding"]

_BEFORE = 16  # tokens of the path that may hold the beginning of a character still to complete


class Decoding(Inspection):
    """The sampling half of `Engine`.  Only committed tips are ever sampled."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._loop = Loop(core, background=core.config.background)
        self._guard = Guard(core, self._loop)
        self._generations = 0
        self._seeds: dict[str, int] = {}  # by session
        self._opened = 0  # sessions so far

    def generate(
        self,
        session: str,
        max_tokens: int = 128,
        *,
        node: int | None = None,
        params: SamplingParams = GREEDY,
    ) -> list[int]:
        """Sample up to `max_tokens` tokens after the tip (or after `node`, the tip of a line).

        They become committed text of the session; the end token is included.
        """
        generation = self.start(session, max_tokens, node=node, params=params)
        try:
            return generation.result()
        finally:
            generation.cancel()  # of no effect unless the wait was interrupted

    def generate_many(
        self,
        targets: Sequence[str | tuple[str, int]],
        max_tokens: int = 128,
        *,
        params: SamplingParams = GREEDY,
    ) -> list[list[int]]:
        """Generate on several sessions, or (session, node) tips, in shared passes.

        With params.seed the i-th target draws from ``derive_seed(seed, i)``.
        """
        running: list[Generation] = []
        places = [_place(target) for target in listed("targets", targets)]
        _require_params(params)
        try:
            for number, (session, node) in enumerate(places):
                own = params
                if params.seed is not None:
                    own = replace(params, seed=derive_seed(params.seed, number))
                running.append(self.start(session, max_tokens, node=node, params=own))
            return [generation.result() for generation in running]
        finally:
            for generation in running:
                generation.cancel()

    def start(
        self,
        session: str,
        max_tokens: int = 128,
        *,
        node: int | None = None,
        params: SamplingParams = GREEDY,
    ) -> Generation:
        """Begin a generation and return its handle: wait for it, iterate it, or cancel it.

        Without a background loop it advances while somebody waits on the engine.
        """
        max_tokens = self._startable(max_tokens, params)
        core, vocab = self._core, self.backend.info.vocab_size
        with core.lock:
            self._loop.check()
            tree = core.tree(session)
            target = tree.tip if node is None else tree.get(node)
            self._guard.idle(tree, target)
            lines.require_tip(tree, target, "generate on")
            if target.mode is NodeMode.IDLE:
                raise NodeError(f"node {target.id} is idle: commit on it or promote it first")
            lines.require_known(target)
            if max_tokens:
                self._guard.fits(target.length + 1, "sequence")
            self._generations += 1
            seed = self._seeds[session] if params.seed is None else params.seed
            if params.seed is None and target.line:
                seed = derive_seed(seed, target.line)
            begin = target.length if params.output_start is None else params.output_start
            if begin > target.length:
                raise ConfigError(
                    f"output_start={begin} is beyond the {target.length} tokens of node {target.id}"
                )
            counts = PathCounts(tree.tokens(target), begin) if params.counts_tokens else None
            generation = Generation(
                self._generations,
                session,
                target.id,
                max_tokens,
                params,
                seed,
                vocab,
                lambda ids: self.backend.tokenizer.decode_bytes(ids, skip_special=True),
                partial(self._follow, session),
                self._cancel,
                counts,
                tree.tokens(target, max(target.length - _BEFORE, 0)),
            )
            generation.started_ms = core.clock.now_ms()
            if max_tokens == 0:
                generation.end("length")
            if not generation.done:
                generation.narrow()
            if not generation.done:
                jump(core, core.ensure(tree, target, generation), core.clock.now_ms())
            return generation

    def _startable(self, max_tokens: int, params: SamplingParams) -> int:
        """What `start` checks before it looks at the session; returns `max_tokens`."""
        max_tokens = whole("max_tokens", max_tokens)
        if max_tokens < 0:
            raise ConfigError(f"max_tokens={max_tokens} must be >= 0")
        _require_params(params)
        vocab = self.backend.info.vocab_size
        for name, ids in (
            ("logit_bias", [i for i, _ in params.biases]),
            ("stop_ids", params.stop_ids),
        ):
            wrong = [i for i in ids if not 0 <= i < vocab]
            if wrong:
                raise ConfigError(f"{name} names id {wrong[0]}; the vocabulary has {vocab} ids")
        return max_tokens

    def _follow(self, session: str, done: Callable[[], bool]) -> None:
        """Wait for a generation; what has ended is durable before its waiter goes on."""
        self._loop.run_until(done)
        self._saved(session)

    # Hooks for engines with a store; see `forkserve.durable`, `keeping` and `tiering`.

    def _saved(self, session: str, *, now: bool = False) -> None:
        """A verb has changed a session.  now: not only if a generation has ended."""

    def _touched(self, session: str, node: int | None) -> None:
        """A verb is about to need the rows of a node (None: the tip)."""

    def _expected(self, tree: ContextTree, node: Node) -> None:
        """The rows of a node will be needed soon.  Called under the lock; must not wait."""

    def _idled(self, tree: ContextTree, node: Node, tool_s: float) -> None:
        """A node waits for a tool of about `tool_s` seconds.  Under the lock; must not wait."""

    def _cancel(self, generation: Generation, wait: bool) -> None:
        """wait: False leaves it to the next step when the engine is busy (a dropped iterator)."""
        core = self._core
        if core.owned() or not core.lock.acquire(blocking=wait):
            generation.abandoned = True
            return
        try:
            generation.end("cancelled")
            task = core.tasks.get((generation.session, generation.node))
            if task is not None and task.generation_handle is generation:
                core.release(task)
        finally:
            core.lock.release()


def _place(target: str | tuple[str, int]) -> tuple[str, int | None]:
    """Session and node of a target of `generate_many`; ConfigError for what is none."""
    if isinstance(target, str):
        return target, None
    try:
        session, node = target
    except (TypeError, ValueError):
        raise ConfigError(
            f"a target is a session id, or a pair (session, node), not {target!r}"
        ) from None
    return session, node


def _require_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params must be SamplingParams, not {type(params).__name__}")
