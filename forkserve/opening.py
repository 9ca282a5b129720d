"""The verbs that begin and end: open and close a session, shut the engine down."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from forkserve.control.experience import Experience
from forkserve.control.journal import NullJournal
from forkserve.errors import ConfigError, SessionError
from forkserve.handle import SessionHandle
from forkserve.tiering import Tiering
from forkserve.tree.spine import take_prefix
from forkserve.tree.tree import ContextTree
from forkserve.types import Tokens, derive_seed
from forkserve.values import flag, identifier, string, text, whole
from forkserve.warming import ready

if TYPE_CHECKING:
    from typing import Self

    from forkserve.api import Engine
    from forkserve.session import Prompt, Session

__all__ = ["Opening"]


class Opening(Tiering):
    """The part of `Engine` that opens and closes."""

    _closes_store = False  # whether the engine has made its store itself

    def open(
        self,
        tokens: Tokens | str,
        *,
        session: str | None = None,
        tenant: str = "default",
        salt: str | None = None,
        seed: int | None = None,
        prefill: bool = True,
    ) -> SessionHandle:
        """Start a session whose root holds `tokens` (text is encoded by the model's tokenizer).

        A text gets the model's begin-of-text token before it, if it has one (`opening_ids`).
        The longest published prefix is taken by reference (`SessionHandle.cached_tokens`), and
        what another session is computing at this moment is waited for rather than computed twice.
        salt: sessions share prefixes only within one salt; defaults to the tenant's name.
        seed: root of the session's random draws; defaults to one per session, from config.seed.
        prefill: wait for the rest to be computed; False leaves it to the first use.

        Raises SessionError (id in use), ConfigError (no token, id out of range, a session id that
        is empty or has control codes), ContextOverflow, OutOfPages.
        """
        core = self._core
        ids = self._guard.ids(tokens, begins=True)
        if not ids:
            raise ConfigError("a session needs at least one token")
        if session is not None:
            identifier("session", session)
        for argument, value in (("tenant", tenant), ("salt", salt)):
            if value is not None or argument == "tenant":
                text(argument, value)
        seed = None if seed is None else whole("seed", seed)
        prefill = flag("prefill", prefill)
        self._guard.fits(len(ids), "prompt")
        with core.lock:
            self._loop.check()
            name = self._named(session)
            name = self._next_name() if name is None else name
            if name in core.trees:
                raise SessionError(
                    f"session '{name}' is open already; close it or choose another id"
                )
            self._opened += 1
            tree = ContextTree(
                name,
                core.pool,
                tenant=tenant,
                salt=tenant if salt is None else salt,
                tail=self.config.tail,
            )
            root = tree.open_root(ids, core.clock.now_ms())
            core.trees[name] = tree
            core.experience[name] = Experience(self.config)
            core.meter.open(tenant)
            self._seeds[name] = (
                derive_seed(self.config.seed, self._opened) if seed is None else seed
            )
            if self.config.prefix_index:
                tree.cached = take_prefix(tree, core.index)
                core.count.cached_tokens += tree.cached
            restored = 0
            if self._journal is not None:
                self._journal.opened(tree, self._seeds[name])
        try:
            if prefill and self.store is not None:
                self._bring_back(tree, root)
                with core.lock:
                    restored = max(ready(root) - tree.cached, 0)
            if prefill:
                self._complete(tree, root)
        except BaseException:
            self._end(name, tree)
            raise
        self._saved(name, now=True)
        return SessionHandle(self, tree, restored)

    def _next_name(self) -> str:
        """An id for a session that was given none."""
        number = self._opened + 1
        while f"s{number}" in self._core.trees:
            number += 1
        return f"s{number}"

    def session(self, prompt: Prompt | SessionHandle, **options: Any) -> Session:
        """Open a session as an object: text in, text out.

        prompt: text, token ids, or chat messages for the model's template.  Options as for `open`.
        Or the handle of a session that is open already (`open`, `resume`, `restore`): its object,
        at the tip of its main line.
        """
        from forkserve.session import Session

        return Session(self._engine(), prompt, **options)

    async def asession(self, prompt: Prompt | SessionHandle, **options: Any) -> Session:
        """`session` for a coroutine: a prompt that is to be prefilled doesn't block the loop."""
        from forkserve.session import Session

        return await Session.aopen(self._engine(), prompt, **options)

    def _engine(self) -> Engine:
        return cast("Engine", self)  # which has this part and all others

    def close(self, session: str) -> None:
        """End a session and give back its pages.  Idempotent; published pages stay cached."""
        string("session", session)
        tree: ContextTree | None = None
        journal = self._journal  # a shutdown may take it away meanwhile
        if journal is not None:
            with self._core.lock:
                tree = self._core.trees.get(session)
                if tree is not None:  # what a verb has promised is in the tree now, or never
                    self._core.begin_close(tree)
            journal.sync(session, begun=True)
        self._end(session, tree)

    def _end(self, session: str, only: ContextTree | None) -> None:
        """`close`; only: not if another one has its id by now; None ends whichever has it."""
        core = self._core
        with core.lock:
            tree = core.trees.get(session)
            if only is not None and tree is not only:
                return
            if tree is not None:
                core.close_tree(tree)
                core.scheduler.cancel_session(session)
            self._seeds.pop(session, None)
            core.changed.notify_all()
        self._saved(session, now=True)

    def shutdown(self) -> None:
        """Stop the loop, close every session and the backend.  Idempotent.

        In a store the sessions stay open: `resume` brings them back.  In the child of a fork this
        does nothing: the engine is its parent's.
        """
        if not self._loop.ours:
            return
        self._closing()
        self._loop.shutdown()
        journal = self._journal  # another thread may shut down as well
        if journal is not None:
            journal.close()
            self._core.journal, self._journal = NullJournal(), None
        if self.store is not None:
            self.store.publisher.drain()
        with self._core.lock:
            for session in list(self._core.trees):
                self.close(session)
            self._core.index.clear()
            for _, pages in self._core.pending:
                self._core.pool.unpin(pages)
            self._core.pending.clear()
        if self.store is not None and self._closes_store:
            self.store.close()
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _reopen(
        self, tokens: Sequence[int], session: str | None, tenant: str, salt: str, seed: int
    ) -> SessionHandle:
        return self.open(tokens, session=session, tenant=tenant, salt=salt, seed=seed)
