"""What goes when pages run out.

In order: branches aborted lazily; pages only the index holds; KV of speculative, idle and inactive
committed nodes (tokens stay, rows come back by prefill), page by page from the end of a node and no
more than is wanted; and last the youngest other generation is pre-empted.  Never a row that rows
below, or committed work that goes on, rest on.  Speculation may cause none of this.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkserve.control.retention import evict_key, expected_ms
from forkserve.control.task import Task
from forkserve.tree.eviction import droppable, path_rows, resting, resting_all
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass

if TYPE_CHECKING:
    from forkserve.control.core import Core

__all__ = ["active", "evictable", "make_room"]


def evictable(node: Node, busy: Collection[Node]) -> bool:
    """True if all rows of the node can go: nothing below rests on them and no task needs them."""
    return bool(node.segments) and node not in busy and not resting(node)


def active(tasks: Iterable[Task]) -> dict[Node, int]:
    """Rows on the path of committed work that goes on: they stay."""
    kept: dict[Node, int] = {}
    for task in tasks:
        if task.kind is not JobClass.SPEC and not task.parked:
            for node, upto in path_rows(task.target).items():
                kept[node] = max(kept.get(node, 0), upto)
    return kept


@dataclass(order=True, slots=True)
class _Victim:
    """A node that has rows to give; the least goes first.

    useless: dropping its last pages alone frees none, as others hold them too.
    """

    useless: bool
    key: tuple[int, float]
    cost: float
    id: int
    tree: ContextTree = field(compare=False)
    node: Node = field(compare=False)
    keep: int = field(compare=False)


def make_room(
    core: Core, wanted: int, preempt: Callable[[], bool], keep: Mapping[Node, int]
) -> bool:
    """Free pages until `wanted` are free; False if they cannot be had.

    preempt: stops one running generation, so that its rows can go; False when none is left to stop.
    keep: position up to which rows of a node stay in any case.
    """
    pool, index = core.pool, core.index
    if pool.free_pages < wanted:
        core.drain()
    if pool.free_pages < wanted:
        index.reclaim(wanted - pool.free_pages)
    while pool.free_pages < wanted:
        kept = active(core.tasks.values())
        for node, upto in keep.items():
            kept[node] = max(kept.get(node, 0), upto)
        heap = _victims(core, kept)
        if not heap and not preempt():
            return False
        while heap and pool.free_pages < wanted:
            one = heapq.heappop(heap)
            core.shed(one.tree, one.node, one.keep, wanted - pool.free_pages)
            index.reclaim(wanted - pool.free_pages)
            after: Node | None = one.node
            while after is not None and not after.segments:
                after = after.parent  # the first above that has rows may give some now
            if after is not None and (more := _victim(core, one.tree, after, resting(after), kept)):
                heapq.heappush(heap, more)
    return True


def _victims(core: Core, kept: Mapping[Node, int]) -> list[_Victim]:
    """A heap of all nodes that have rows to give."""
    heap: list[_Victim] = []
    for tree in core.trees.values():
        need = resting_all(tree)
        found = (_victim(core, tree, n, need.get(n, 0), kept) for n in tree if n.segments)
        heap += [one for one in found if one is not None]
    heapq.heapify(heap)
    return heap


def _victim(
    core: Core, tree: ContextTree, node: Node, rest: int, kept: Mapping[Node, int]
) -> _Victim | None:
    """The node with the rows that it can give; None if it has none, or a batch writes to it."""
    keep, pool = max(rest, kept.get(node, 0)), core.pool
    pages = droppable(tree, node, keep)
    if not pages or node in core.writing:
        return None
    now, size = core.clock.now_ms(), pool.page_size
    idle_ms = now - node.used_ms
    page_ms = core.backend.predict_ms(size, max(node.kv_end - size, 0))
    return _Victim(
        all(pool.refs[page] - pool.indexed[page] > 1 for page in pages),
        evict_key(node.mode, 0, idle_ms, now - tree.tip.used_ms),
        expected_ms(page_ms, idle_ms),
        node.id,
        tree,
        node,
        keep,
    )
