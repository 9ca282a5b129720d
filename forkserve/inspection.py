"""Looking into an engine: what the verbs left behind."""

from __future__ import annotations

from forkserve.control.core import Core
from forkserve.control.stats import EngineStats
from forkserve.tree.invariants import check_all
from forkserve.tree.tree import ContextTree

__all__ = ["Inspection"]


class Inspection:
    """The read-only half of `Engine`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.backend = core.backend
        self.config = core.config

    def tip(self, session: str) -> int:
        """Node at the end of the session's committed main line."""
        with self._core.lock:
            return self._core.tree(session).tip.id

    def tokens(self, session: str, node: int | None = None) -> list[int]:
        """All tokens from the root to the tip (or to `node`)."""
        with self._core.lock:
            tree = self._core.tree(session)
            return tree.tokens(tree.tip if node is None else tree.get(node)).tolist()

    def text(self, session: str, node: int | None = None) -> str:
        """The same as text, special tokens included."""
        ids = self.tokens(session, node)
        return self.backend.tokenizer.decode_bytes(ids).decode("utf-8", "replace")

    def tree(self, session: str) -> ContextTree:
        """The session's tree, to look at; change it through the verbs only."""
        with self._core.lock:
            return self._core.tree(session)

    def sessions(self) -> list[str]:
        """Ids of the open sessions."""
        with self._core.lock:
            return list(self._core.trees)

    def stats(self) -> EngineStats:
        """A snapshot of pages, rows and counters."""
        with self._core.lock:
            return self._core.stats()

    def check(self) -> None:
        """Check every invariant of the design from scratch; AssertionError with the numbers.

        Waits for the batch in flight, whose rows are promised and not there yet.
        """
        with self._core.lock:
            self._core.inside()
            while self._core.in_flight:
                self._core.changed.wait()
            check_all(self._core.pool, self._core.trees.values(), self._core.index)
