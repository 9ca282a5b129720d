"""A job of the scheduler with what the engine needs to run it."""

from __future__ import annotations

from dataclasses import dataclass

from forkserve.control.generation import Generation
from forkserve.control.probe import Probe
from forkserve.control.scheduler import Job
from forkserve.tree.node import Node
from forkserve.tree.rows import missing
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass

__all__ = ["Task"]


@dataclass(slots=True, eq=False, kw_only=True)
class Task(Job):
    """Complete the rows of `target` up to `upto`, then run its probe, then decode for a generation.

    Probe and generation are optional.
    upto: None follows the end of the target, as for committed work.
    wake_ms: not before this time (a commit gives the generation that follows it a moment to share
    its pass); the loop clears `held` then.
    serial: order of creation: when pages run out the oldest goes on.  privileged: it was the oldest
    of several that could not all go on; the others wait until it is done.  compact: its path has
    given up all its rows once, to have them in as few pages as can be.
    """

    tree: ContextTree
    target: Node
    upto: int | None = None
    generation_handle: Generation | None = None
    probe: Probe | None = None
    wake_ms: float = 0.0
    serial: int = 0
    privileged: bool = False
    compact: bool = False
    parked: bool = False  # waits, without rows, until another task ends
    error: BaseException | None = None
    done: bool = False

    def end(self) -> int:
        """Position its rows must reach.

        A probe has its answer before the rows behind its place are computed: a window that moves on
        with them would take away what it reads.
        """
        length = self.target.length
        if self.probe is not None and self.probing:
            length = min(length, self.probe.at)
        return length if self.upto is None else min(self.upto, length)

    def outstanding(self) -> int:
        """Rows that are still missing."""
        return sum(end - begin for _, begin, end in missing(self.target, self.end()))

    @property
    def probing(self) -> bool:
        """Texts of its probe have still to run."""
        return self.probe is not None and bool(self.probe.pending())

    def refresh(self) -> None:
        """Recount what is left and pick the class by it."""
        rows = self.outstanding()
        self.context = self.end() - rows
        handle = self.generation_handle
        asked = self.probe.tokens_left() if self.probe is not None else 0
        if self.kind is JobClass.SPEC:
            self.remaining = rows
        elif handle is not None and rows <= 1 and not asked:
            self.kind, self.remaining = JobClass.DECODE, handle.limit - len(handle.tokens)
        else:
            if self.kind is JobClass.DECODE:
                self.kind = JobClass.TAIL
            self.remaining = max(rows + asked, 1)
