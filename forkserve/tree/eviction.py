"""Rows that may go: what rests on what, and dropping pages from the end of a node.

::

    node     [-------- kept --------|--- dropped ---)     whole pages, from the end
    child             [ rows ...)                         rests on the node's rows up to here
                      ^ resting

A row depends on every row before it, so what is missing of a node is always its end, and a node
keeps what the rows of a child rest on.  Tokens stay; the rows come back by prefill (`missing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from forkserve.tree.node import Node
from forkserve.tree.rows import release
from forkserve.tree.spine import unpublish
from forkserve.tree.tree import ContextTree

__all__ = ["droppable", "path_rows", "resting", "resting_all", "shed"]


def resting(node: Node) -> int:
    """Position up to which rows below rest on the node's own; 0 when none does."""
    need, stack = 0, list(node.children.values())
    while stack:
        child = stack.pop()
        if child.segments:
            need = max(need, _rests(child))
        else:
            stack.extend(child.children.values())
    return need


def resting_all(tree: ContextTree) -> dict[Node, int]:
    """`resting` of every node of a tree that has something on it."""
    need: dict[Node, int] = {}
    for node in reversed(tree.nodes.values()):  # children stand after their parents
        above = node.parent
        low = _rests(node) if node.segments else need.get(node, 0)
        if above is not None and low:
            need[above] = max(need.get(above, 0), low)
    return need


def _rests(node: Node) -> int:
    """Where a node with rows goes on from rows above; 0 if it needs none of them any more."""
    return node.kv_begin if node.kv_begin > node.floor else 0


def path_rows(node: Node) -> dict[Node, int]:
    """Position up to which each node of a path keeps rows, so that the path loses none."""
    kept = {node: node.length}
    current = node
    while (above := current.parent) is not None:
        begin = current.kv_begin  # where its tokens begin, if it has no row
        if current.segments and begin <= current.floor:
            break
        kept[above], current = begin, above
    return kept


@dataclass(slots=True)
class _Cut:
    """The end of a node's last segment that can go: pages from number `keep` on."""

    keep: int
    pages: list[int]


def _last(tree: ContextTree, node: Node, keep: int) -> _Cut | None:
    """What of the last segment lies wholly beyond position `keep`; None if no page does."""
    last, size = node.segments[-1], tree.pool.page_size
    held = node.segments[-2].end if len(node.segments) > 1 else last.start
    # A packed tail repeats rows of the segment before, which keeps them then.
    first = 0 if keep <= max(held, last.start) else -(-(keep - last.start) // size)
    return _Cut(first, last.pages[first:]) if first < len(last.pages) else None


def droppable(tree: ContextTree, node: Node, keep: int) -> list[int]:
    """Pages of the node's last segment that hold no row below position `keep`."""
    cut = _last(tree, node, keep) if node.segments else None
    return cut.pages if cut is not None else []


def shed(tree: ContextTree, node: Node, keep: int = 0, wanted: int | None = None) -> int:
    """Drop whole pages from the end of a node, none that holds a row below `keep`.

    Stops when `wanted` of them are free, or only the prefix index has them, and before pages that
    others hold too, unless all are such; None drops all that can go.  Returns how many rows went.
    A line that gave rows back loses what it has left at once: without the rows of a whole window
    behind it, none can be computed again.
    """
    rests, floor = resting(node), node.floor
    assert keep >= rests, f"rows up to {rests} of node {node.id} carry others"
    pool, before, begin, freed = tree.pool, node.kv_end, node.kv_begin, 0
    if floor:
        wanted = None
    while node.segments and (wanted is None or freed < wanted):
        cut = _last(tree, node, keep)
        if cut is None:
            break
        last = node.segments[-1]
        kept, useful = len(last.pages), len(last.pages)
        while kept > cut.keep and (wanted is None or freed < wanted):
            kept -= 1
            page = last.pages[kept]
            if pool.refs[page] - pool.indexed[page] == 1:
                freed, useful = freed + 1, kept
        if wanted is not None and freed:
            kept = useful
        if kept == len(last.pages):
            break
        gone, last.pages = last.pages[kept:], last.pages[:kept]
        if kept:
            last.end = last.start + kept * pool.page_size
        else:
            node.segments.pop()
        pool.decref(gone)
    if not node.segments:
        release(tree, node)
        node.floor = floor if rests else 0  # a child goes on where what was given back ends
        rows = before - begin
    else:
        rows = before - node.kv_end
    if rows:
        tree.epoch += 1
        unpublish(tree, node, node.kv_end if node.segments else 0)
    return rows
