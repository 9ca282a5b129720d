"""What the control plane tells a durable store.  Every call is quick and made under the lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from forkserve.control.commit import CommitResult
    from forkserve.control.speculation import Speculation
    from forkserve.tree.node import Node
    from forkserve.tree.tree import ContextTree

__all__ = ["Journal", "NullJournal"]


class Journal(Protocol):
    """Takes notes; writing them down is another thread's or a later call's business."""

    def changed(self, session: str) -> None:
        """The committed text of a session is not what it was (a generation ended)."""
        ...

    def committed(self, tree: ContextTree, node: Node, winner: Node, result: CommitResult) -> None:
        """A commit was applied."""
        ...

    def tool_ran(self, session: str, tool: str, ms: float) -> None:
        """A tool took `ms`."""
        ...

    def speculated(self, session: str, answers: dict[int, Speculation]) -> None:
        """What the planner made of requests to speculate."""
        ...

    def evicted(self, tree: ContextTree, node: Node, rows: int, reason: str) -> None:
        """So many rows of a node went: pages, expired, preempted, window, device_budget."""
        ...

    def tool_returned(self, session: str, tool: str, output: Sequence[int] | None) -> None:
        """A tool's output was learned, or (None) what was learned of the tool was forgotten."""
        ...

    def closed(self, session: str) -> None:
        """The session has ended."""
        ...


class NullJournal:
    """Without a store nothing is noted."""

    def changed(self, session: str) -> None: ...

    def committed(
        self, tree: ContextTree, node: Node, winner: Node, result: CommitResult
    ) -> None: ...

    def tool_ran(self, session: str, tool: str, ms: float) -> None: ...

    def speculated(self, session: str, answers: dict[int, Speculation]) -> None: ...

    def evicted(self, tree: ContextTree, node: Node, rows: int, reason: str) -> None: ...

    def tool_returned(self, session: str, tool: str, output: Sequence[int] | None) -> None: ...

    def closed(self, session: str) -> None: ...
