"""A batch on its way: what was put aboard, and what it ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkserve.control.task import Task
from forkserve.tree.node import Node
from forkserve.tree.rows import Reservation
from forkserve.types import Batch, Work

__all__ = ["Entry", "Flight", "Ran"]


@dataclass(slots=True)
class Entry:
    """One work of the batch and what has to be done when it lands.

    owner: the first node whose rows it writes; more: reservations of nodes below it, whose rows
    follow in the same run.  text: number of the probe's text that it runs.
    """

    task: Task
    owner: Node
    count: int
    held: Reservation | None
    work: Work
    text: int | None = None
    more: list[Reservation] = field(default_factory=list)

    def reservations(self) -> list[Reservation]:
        """All of them, from the root side."""
        return [self.held, *self.more] if self.held is not None else []


@dataclass(slots=True)
class Flight:
    """A batch, its entries in the order of its works, and the nodes whose rows it writes.

    pinned: pages that the batch writes.  They stay out of the free list until it has landed, also
    when their node dies meanwhile: nobody may put rows there that the batch would overwrite.
    copies: how many entries of `Core.pending` it runs.
    """

    batch: Batch = field(default_factory=Batch)
    entries: list[Entry] = field(default_factory=list)
    owners: set[Node] = field(default_factory=set)
    pinned: list[int] = field(default_factory=list)
    copies: int = 0


@dataclass(slots=True)
class Ran:
    """Tokens of one tick."""

    committed: int = 0
    speculative: int = 0
    idle: bool = False  # nothing could run
