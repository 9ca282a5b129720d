"""What goes when pages run out.

In order: branches aborted lazily; pages only the index holds; KV of speculative, idle and inactive
committed leaves (tokens stay, rows come back by prefill); and last the youngest other generation is
pre-empted.  Never a page that a live node with rows maps.  Speculation may cause none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from forkserve.control.retention import evict_key
from forkserve.control.task import Task
from forkserve.tree.index import PrefixIndex
from forkserve.tree.node import Node
from forkserve.tree.pool import PagePool
from forkserve.tree.rows import evict
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass

__all__ = ["active", "evictable", "make_room"]


def evictable(node: Node, busy: Collection[Node]) -> bool:
    """True if the node's rows can go: nobody below needs them and no task runs on it."""
    return (
        not node.evicted
        and node not in busy
        and all(child.evicted for child in node.children.values())
    )


def active(tasks: Iterable[Task]) -> set[Node]:
    """Nodes on the path of committed work that goes on: their rows stay."""
    nodes: set[Node] = set()
    for task in tasks:
        if task.kind is not JobClass.SPEC and not task.parked:
            nodes.update((task.target, *task.target.ancestors()))
    return nodes


def make_room(
    wanted: int,
    pool: PagePool,
    index: PrefixIndex,
    trees: Iterable[ContextTree],
    tasks: Collection[Task],
    now_ms: float,
    *,
    drain: Callable[[], object],
    dropped: Callable[[ContextTree, Node], None],
    preempt: Callable[[], bool],
    keep: Iterable[Node] = (),
) -> bool:
    """Free pages until `wanted` are free; False if they cannot be had.

    drain: reclaims lazily aborted branches.  dropped: told of each node whose KV goes, before it
    goes.  preempt: takes the rows of one running generation, False when none is left to take.
    keep: nodes whose rows stay in any case.
    """
    if pool.free_pages < wanted:
        drain()
    if pool.free_pages < wanted:
        index.reclaim(wanted - pool.free_pages)
    busy = active(tasks).union(keep)
    while pool.free_pages < wanted:
        victims = [
            (evict_key(n.mode, 0, now_ms - n.used_ms, now_ms - t.tip.used_ms), n.id, t, n)
            for t in trees
            for n in t
            if evictable(n, busy)
        ]
        if not victims:
            if not preempt():
                return False
            continue
        for _, _, tree, node in sorted(victims, key=lambda v: (v[0], v[1])):
            dropped(tree, node)
            evict(tree, node)
            if pool.free_pages < wanted:
                index.reclaim(wanted - pool.free_pages)
            if pool.free_pages >= wanted:
                break
    return True
