"""Sliding windows: giving pages back as a tree grows, and starting over where that was wrong.

Only for a model whose layers all have a window (`ModelInfo.extra["window"]`).
"""

from __future__ import annotations

from collections.abc import Iterable

from forkserve.control.core import Core
from forkserve.control.task import Task
from forkserve.tree.node import Node
from forkserve.tree.spine import take_prefix
from forkserve.tree.tree import ContextTree
from forkserve.tree.window import give_back, lost, next_row

__all__ = ["readable", "regain", "slide"]


def slide(core: Core, trees: Iterable[ContextTree]) -> int:
    """Give back what fell out of every window of these trees; returns pages freed.

    Between batches only: no row of theirs is reserved or read then.
    """
    freed = 0
    for tree in trees:
        if core.pending or core.trees.get(tree.session) is not tree:
            continue  # copies that are still to run name pages of any line
        ends: set[Node] = {task.target for task in core.tasks.values() if task.tree is tree}
        if len(ends) > 1 and any(ends.intersection(end.ancestors()) for end in ends):
            continue  # the lower one may take over rows that the upper one then computes again
        freed += give_back(tree, core.window, ends)
    return freed


def readable(core: Core, task: Task) -> bool:
    """True unless the next rows of a task would read rows that were given back."""
    return _next_row(core, task)[2]


def _next_row(core: Core, task: Task) -> tuple[Node, int, bool]:
    again = task.probe.at - 1 if task.probe is not None and task.probing else None
    return next_row(task.tree, task.target, task.end(), core.window, again)


def regain(core: Core, task: Task) -> None:
    """Drop what a task's path has to compute again, from further up, before it can go on.

    A row depends on rows before it, layer by layer, so those that are gone can't be computed from
    what stands behind them.  Other branches keep theirs.  Where the prefix index still has the
    pages of a root they are taken.
    """
    tree = task.tree
    owner, begin, there = _next_row(core, task)
    if there:
        return
    for node in lost(tree, owner, begin, core.window):
        core.shed(tree, node, 0, None, "window")
        node.floor = 0
        tree.epoch += 1
    if core.config.prefix_index and not tree.root.segments:
        take_prefix(tree, core.index)
    for other in [t for t in core.tasks.values() if t.tree is tree]:
        if not other.done:
            core.requeue(other)
