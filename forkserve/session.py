"""Sessions and branches as objects: text in, text out.

::

    with eng.session("You are ...") as s:
        with s.fork("bash", wrap) as happy, s.fork("err", recovery) as fail:
            happy.speculate(t_idle_ms=2900)
            fail.speculate(priority=0.2, t_idle_ms=2900)
            happy.commit(plain(run_the_tool()))  # content: it names no control token
        print(s.generate(128))

Every method is a verb of `Engine` and raises what that verb raises.  Text is encoded on its own
where it is given, and token ids decide: ``encode(a) + encode(b)`` may differ from
``encode(a + b)``.  `Branch.commit` keeps the ids of the branch; `Session.commit` encodes anew.

What waits for the engine has an async twin (`agenerate`, `astream`, `acommit`, ...).  The rest
never waits: call it as it is, also in a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from forkserve import aio
from forkserve.branch import Branch
from forkserve.control.commit import CommitResult
from forkserve.control.generation import Generation
from forkserve.engine.prompting import render_prompt, require_messages
from forkserve.errors import ConfigError, NodeError, SessionError
from forkserve.handle import SessionHandle
from forkserve.reply import (
    AsyncStream,
    Dropped,
    Reply,
    Speaker,
    Stream,
    collect,
    gather,
    sampling_params,
)
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import JoinPolicy, SamplingParams, Tokens, derive_seed
from forkserve.values import listed, require_names

if TYPE_CHECKING:
    from forkserve.api import Engine
    from forkserve.store import Publication

__all__ = ["AsyncStream", "Branch", "Prompt", "Reply", "Session", "Stream"]

T = TypeVar("T")
Prompt = str | Tokens | Sequence[Mapping[str, Any]]
_OPTIONS = ("session", "tenant", "salt", "seed")  # of `Engine.open`


class Session(Speaker):
    """An open session.  Its verbs work at the tip of its main line.

    prompt: text, token ids, or chat messages, which the model's own template renders; or the handle
    of a session that is open (`Engine.open`, `resume`, `restore`), which it then is the object of.
    prefill: wait for the prompt to be computed; by default the first `generate` shares its pass.
    **options: as for `Engine.open` (session=, tenant=, salt=, seed=); a handle takes none.

    Use it as a (sync or async) context manager: leaving closes it.  One thread at a time may
    generate, commit or join on it; tasks of one event loop take turns by themselves.  Once it is
    closed, its verbs and those of its branches raise SessionError.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt | SessionHandle,
        *,
        prefill: bool = False,
        **options: Any,
    ) -> None:
        require_names(options, (*_OPTIONS, "prefill"), "option '{}' of a session")
        if isinstance(prompt, SessionHandle):
            self._tree = _opened(engine, prompt, prefill=prefill, options=options)
            handle = prompt
        else:
            handle = engine.open(as_text(engine, prompt), prefill=prefill, **options)
            self._tree = engine.tree(handle.id)
        self.engine = engine
        self.id = handle.id
        self._handle = handle
        self._dropped = Dropped()
        self._names = count(1)
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @classmethod
    async def aopen(
        cls,
        engine: Engine,
        prompt: Prompt | SessionHandle,
        *,
        prefill: bool = False,
        **options: Any,
    ) -> Session:
        """Open a session from a coroutine: worth it with prefill=True, which waits."""
        return await aio.in_thread(
            lambda: cls(engine, prompt, prefill=prefill, **options), undo=cls.close
        )

    def close(self) -> None:
        """End the session, with what runs on it, and give back its pages.  Idempotent."""
        if not self.closed:
            self.engine.close(self.id)

    async def aclose(self) -> None:
        """`close` for ``contextlib.aclosing``; it never waits."""
        self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.id!r}, {'closed' if self.closed else f'tip={self._handle.tip}'})"

    # ---------------------------------------------------------------- looking in

    @property
    def closed(self) -> bool:
        """Whether the session was closed, here or through the engine."""
        try:
            self._open()
        except SessionError:
            return True
        return False

    @property
    def cached_tokens(self) -> int:
        """Rows of the prompt that were not computed for this session; see `SessionHandle`."""
        return self._handle.cached_tokens

    @property
    def tip(self) -> Branch:
        """The end of the main line as a branch.  It follows the line: see `Branch`."""
        return Branch(self, self._open().tip.id)

    @property
    def tokens(self) -> list[int]:
        """All tokens from the root to the tip."""
        return self._open().tokens(self._tree.tip).tolist()

    @property
    def text(self) -> str:
        """The same as text, special tokens included."""
        return self._decode(self.tokens)

    def branch(self, node: int) -> Branch:
        """The branch that begins at a node: ``session.branch(b.id) == b``.

        Raises NodeError for a dead or unknown id.
        """
        return Branch(self, node)

    # ---------------------------------------------------------------- verbs

    def fork(self, name: str = "", text: str | Tokens = ()) -> Branch:
        """A speculative branch at the tip; see `Branch.fork`."""
        return self.tip.fork(name, text)

    def attempts(self, n: int, name: str = "", text: str | Tokens = ()) -> list[Branch]:
        """`n` attempts at the tip, for `generate_many`; see `Branch.attempts`."""
        return self.tip.attempts(n, name, text)

    def append(self, text: str | Tokens) -> int:
        """Add known text at the tip; returns the length of the whole sequence in tokens."""
        return self.tip.append(text)

    def commit(
        self, observed: str | Tokens, *, full: bool = False, branch: str | None = None
    ) -> CommitResult:
        """Bind what was really observed after the tip.

        The branch that foresaw most of it becomes the tip (ties: the one named `branch`); other
        speculative branches of the tip are aborted.  If none foresaw any of it, a new one is made
        under the name `branch`.  full: `observed` is the whole sequence.
        """
        return self.engine.commit(self.id, self._open().tip.id, observed, full=full, branch=branch)

    async def acommit(
        self, observed: str | Tokens, *, full: bool = False, branch: str | None = None
    ) -> CommitResult:
        """`commit` for a coroutine."""
        return await self._atomic(lambda: self.commit(observed, full=full, branch=branch))

    def publish(
        self, name: str | None = None, *, wait: bool = True, replace: bool = False
    ) -> Publication:
        """Store the KV of the tip, and perhaps give that state a name; see `Engine.publish`."""
        return self.engine.publish(
            self.id, self._open().tip.id, name=name, wait=wait, replace=replace
        )

    async def apublish(
        self, name: str | None = None, *, wait: bool = True, replace: bool = False
    ) -> Publication:
        """`publish` for a coroutine.  Other tasks may go on with the session meanwhile."""
        return await aio.in_thread(lambda: self.publish(name, wait=wait, replace=replace))

    def join(
        self,
        branches: Sequence[Branch],
        policy: JoinPolicy | str = JoinPolicy.ALL,
        *,
        scaffold: str | Tokens = (),
        blend: str | Tokens | None = None,
        k: int | None = None,
    ) -> Branch:
        """One committed continuation of the trunk that the branches left; returns it.

        policy: all, concat, kofn, summary, first or winner; `Engine.join` says what each does with
        `blend` and `k`.  Branches that a policy drops are dead afterwards, the others stay.
        """
        branches = listed("branches", branches)
        nodes = [self._own(branch) for branch in branches]
        parents = {node.parent for node in nodes}
        trunk = parents.pop() if len(parents) == 1 else None
        tips = [branch.tip for branch in branches]
        result = self.engine.join(
            self.id,
            tips,
            policy,
            scaffold=scaffold,
            blend=blend,
            k=k,
            parent=trunk.id if trunk is not None else None,
        )
        for branch, tip in zip(branches, tips, strict=True):
            if tip in result.aborted:
                branch.abort()  # the engine dropped the last node of its line; drop the line
        return Branch(self, result.node)

    async def ajoin(
        self,
        branches: Sequence[Branch],
        policy: JoinPolicy | str = JoinPolicy.ALL,
        *,
        scaffold: str | Tokens = (),
        blend: str | Tokens | None = None,
        k: int | None = None,
    ) -> Branch:
        """`join` for a coroutine."""
        return await self._atomic(
            lambda: self.join(branches, policy, scaffold=scaffold, blend=blend, k=k)
        )

    def generate_many(
        self,
        branches: Sequence[Branch],
        max_tokens: int = 128,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Reply]:
        """`Branch.generate` on several branches in shared passes; replies in their order.

        With a seed the i-th branch draws from ``derive_seed(seed, i)``.  If one fails, the others
        are cancelled.
        """
        return collect(self._start_many(branches, max_tokens, sampling_params(params, sampling)))

    async def agenerate_many(
        self,
        branches: Sequence[Branch],
        max_tokens: int = 128,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Reply]:
        """`generate_many` for a coroutine; cancelling the task cancels them all."""
        async with self._turn():
            running = self._start_many(branches, max_tokens, sampling_params(params, sampling))
        return await gather(self.engine, running)

    # ---------------------------------------------------------------- helpers

    def _start(self, max_tokens: int, params: SamplingParams) -> Generation:
        return self.tip._start(max_tokens, params)

    async def _astart(self, max_tokens: int, params: SamplingParams) -> Generation:
        async with self._turn():
            return self._start(max_tokens, params)

    def _start_many(
        self, branches: Sequence[Branch], max_tokens: int, params: SamplingParams
    ) -> list[Generation]:
        branches = listed("branches", branches)
        for branch in branches:
            self._own(branch)
        running: list[Generation] = []
        try:
            for number, branch in enumerate(branches):
                own = params
                if params.seed is not None:
                    own = replace(params, seed=derive_seed(params.seed, number))
                running.append(branch._start(max_tokens, own))
        except BaseException:
            for generation in running:
                generation.cancel()
            raise
        return running

    def _own(self, branch: Branch) -> Node:
        """The node of a branch of this session."""
        if not isinstance(branch, Branch):
            raise ConfigError(f"{branch!r} is no Branch; fork or attempts give some")
        if branch.session is not self:
            raise NodeError(f"{branch!r} belongs to another session than '{self.id}'")
        return branch._first()

    def _open(self) -> ContextTree:
        """The tree, after streams that were dropped have been ended; SessionError once closed."""
        while not self._dropped.empty():
            try:
                self._dropped.get_nowait().cancel()
            except Empty:
                break
        if self.engine.tree(self.id) is not self._tree:
            raise SessionError(f"session '{self.id}' was closed; another one has its id now")
        return self._tree

    def _turn(self) -> asyncio.Lock:
        """Held by the task of the running loop that is at the session."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Lock()
        return self._turns[1]

    async def _atomic(self, verb: Callable[[], T]) -> T:
        """A verb that waits for the pass in flight, in a thread, one at a time."""
        async with self._turn():
            return await aio.in_thread(verb)

    def _ids(self, text: str | Tokens) -> list[int]:
        return self.engine._guard.ids(text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.engine.backend.tokenizer.decode_bytes(ids).decode("utf-8", "replace")


def _opened(
    engine: Engine, handle: SessionHandle, *, prefill: bool, options: Mapping[str, Any]
) -> ContextTree:
    """The tree that a handle names.  Raises ConfigError, or SessionError if it is closed."""
    given = [*options, *(["prefill"] if prefill else [])]
    if given:
        raise ConfigError(f"{handle!r} is open already: {', '.join(given)} can't be given any more")
    if handle._engine is not engine:
        raise ConfigError(f"{handle!r} belongs to another engine")
    if engine.tree(handle.id) is not handle._tree:
        raise SessionError(f"session '{handle.id}' was closed; another one has its id now")
    return handle._tree


def as_text(engine: Engine, prompt: Prompt) -> str | Tokens:
    """The prompt as text or ids.  Raises ConfigError for what is no prompt."""
    if isinstance(prompt, str):
        return prompt
    try:
        first = prompt[0] if len(prompt) else None
    except (TypeError, KeyError):  # a number, None, a set, a generator; one message
        raise ConfigError(
            "a prompt is text, a list of token ids, or a list of chat messages, not "
            f"{type(prompt).__name__}"
        ) from None
    if not isinstance(first, Mapping):
        return prompt  # type: ignore[return-value]
    require_messages(prompt)
    tokenizer = engine.backend.tokenizer
    return tokenizer.encode(render_prompt(tokenizer, prompt))  # type: ignore[arg-type]
