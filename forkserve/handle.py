"""The name of an open session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkserve.tree.tree import ROOT, ContextTree

if TYPE_CHECKING:
    from forkserve.inspection import Inspection

__all__ = ["SessionHandle"]


class SessionHandle:
    """Names an open session.  `tip` is always the present one, also after a commit."""

    __slots__ = ("_engine", "_restored", "_tree", "id", "root", "tenant")

    def __init__(self, engine: Inspection, tree: ContextTree, restored: int = 0) -> None:
        self._engine = engine
        self._tree = tree
        self._restored = restored
        self.id = tree.session
        self.root = ROOT
        self.tenant = tree.tenant

    @property
    def cached_tokens(self) -> int:
        """Rows of the prompt that this session did not compute: other sessions had computed them,
        also while it waited for its own turn, or they were restored."""
        return self._tree.cached + self._restored

    @property
    def tip(self) -> int:
        """Node at the end of the committed main line.  Raises SessionError once closed."""
        return self._engine.tip(self.id)

    def __repr__(self) -> str:
        return f"SessionHandle(id={self.id!r}, root={self.root}, tenant={self.tenant!r})"
