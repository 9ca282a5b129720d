"""Sliding windows: giving pages back as a main line grows, and starting over where that was wrong.

Only for a model whose layers all have a window (`ModelInfo.extra["window"]`).
"""

from __future__ import annotations

from collections.abc import Iterable

from forkserve.control.core import Core
from forkserve.control.task import Task
from forkserve.tree.rows import missing
from forkserve.tree.spine import take_prefix
from forkserve.tree.tree import ContextTree
from forkserve.tree.window import give_back, in_reach

__all__ = ["readable", "regain", "slide"]


def slide(core: Core, trees: Iterable[ContextTree]) -> int:
    """Give back what fell out of the window of these main lines; returns pages freed.

    Between batches only: no row of theirs is reserved or read then.
    """
    freed = 0
    for tree in trees:
        if core.pending or core.trees.get(tree.session) is not tree:
            continue  # copies that are still to run name pages of any line
        if all(task.target is tree.tip for task in core.tasks.values() if task.tree is tree):
            freed += give_back(tree, core.window)
    return freed


def readable(core: Core, task: Task) -> bool:
    """True unless the next rows of a task would read rows that were given back."""
    parts = missing(task.target, task.end())
    owner, begin = (parts[0][0], parts[0][1]) if parts else (task.target, task.target.length - 1)
    return in_reach(task.tree, owner, begin, core.window)


def regain(core: Core, tree: ContextTree) -> None:
    """Drop what is left of a session's rows: all of them come back, from position 0.

    The row at the floor depends on rows before it, layer by layer, so those that are gone can't be
    computed from those that stayed.  Where the prefix index still has the pages they are taken.
    """
    for node in sorted(tree, key=lambda n: -n.id):  # a child's id is above its parent's
        core.drop_rows(tree, node, "window")
    if core.config.prefix_index:
        take_prefix(tree, core.index)
    for task in [t for t in core.tasks.values() if t.tree is tree]:
        core.requeue(task)
