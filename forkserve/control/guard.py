"""Checks that stand before every verb: ids, lengths, and who else is at the session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

from forkserve.control.core import Core
from forkserve.control.lines import require_quiet
from forkserve.control.loop import Loop
from forkserve.engine.prompting import opening_ids
from forkserve.errors import ConfigError, ContextOverflow, SessionError
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import Tokens
from forkserve.values import whole

__all__ = ["Guard"]

# Integers come out of these too: bytes of a text, or ids in no order.
_NO_IDS = (bytes, bytearray, memoryview, dict, set, frozenset)


class Guard:
    """Argument and concurrency checks over a core."""

    def __init__(self, core: Core, loop: Loop) -> None:
        self._core = core
        self._loop = loop
        self._users: dict[str, int] = {}  # session -> thread that waits for it to settle

    def ids(self, tokens: Tokens | str, *, begins: bool = False) -> list[int]:
        """Token ids, checked against the vocabulary; text is encoded.

        begins: a text with which a sequence begins (`opening_ids`).
        """
        backend = self._core.backend
        if isinstance(tokens, str):
            tokenizer = backend.tokenizer
            return opening_ids(tokenizer, tokens) if begins else tokenizer.encode(tokens)
        if isinstance(tokens, _NO_IDS):
            raise ConfigError(
                f"tokens must be text or integers in order, not a {type(tokens).__name__}"
            )
        size = backend.info.vocab_size
        try:
            ids = list(map(index, tokens))
        except TypeError as error:
            raise ConfigError(f"tokens must be text or integers: {error}") from None
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(i for i in ids if not 0 <= i < size)
            raise ConfigError(f"token id {wrong} is not in the vocabulary of {size} ids")
        return ids

    def fits(self, length: int, what: str) -> None:
        """Raise ContextOverflow when a path would be longer than the model's context."""
        limit = self._core.backend.info.max_context
        if length > limit:
            raise ContextOverflow(length, limit, what)

    def place(self, node: Node, at: int | None) -> int:
        """`at` as a position on the path of the node; None is its end."""
        if at is None:
            return node.length
        at = whole("at", at)
        if not 1 <= at <= node.length:
            raise ConfigError(f"at={at} is no place in the {node.length} tokens of node {node.id}")
        return at

    def idle(self, tree: ContextTree, node: Node) -> None:
        """Raise SessionError while a generation runs on the node."""
        require_quiet(self._core, tree, node)

    @contextmanager
    def settled(self, session: str) -> Iterator[ContextTree]:
        """The session's tree under the lock, with no batch in flight that belongs to it."""
        core, me = self._core, threading.get_ident()
        with core.lock:
            self._loop.check()
            tree = core.tree(session)
            while self._users.get(session, me) != me:  # another thread's turn: one pass at most
                core.changed.wait()
                self._loop.check()
                tree = core.tree(session)
            self._users[session] = me
            try:
                self._loop.quiesce(session)
                if core.trees.get(session) is not tree or session in core.closing:
                    raise SessionError(f"session '{session}' was closed meanwhile")
                yield tree
            finally:
                self._users.pop(session, None)
                core.changed.notify_all()
