"""The name of an open session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkserve.tree.tree import ROOT, ContextTree

if TYPE_CHECKING:
    from forkserve.inspection import Inspection

__all__ = ["SessionHandle"]


class SessionHandle:
    """Names an open session.  `tip` is always the present one, also after a commit.

    cached_tokens: rows that were there when it opened: shared with other sessions, or restored.
    """

    __slots__ = ("_engine", "cached_tokens", "id", "root", "tenant")

    def __init__(self, engine: Inspection, tree: ContextTree, cached_tokens: int) -> None:
        self._engine = engine
        self.id = tree.session
        self.root = ROOT
        self.tenant = tree.tenant
        self.cached_tokens = cached_tokens

    @property
    def tip(self) -> int:
        """Node at the end of the committed main line.  Raises SessionError once closed."""
        return self._engine.tip(self.id)

    def __repr__(self) -> str:
        return f"SessionHandle(id={self.id!r}, root={self.root}, tenant={self.tenant!r})"
