"""Giving back rows that fell out of every window.

A page spans all layers, so rows can go only where every layer has a sliding window.  Of w, the
longest of them, the row at position p reads the rows (p - w, p], itself included.  What goes is the
beginning of a node, once no end of the tree below reads it::

    trunk      [-- given back --|-- kept --)                 the attempts still read its end
    attempt 1                              [-- kept --)
    attempt 2                              [-- given back --|-- kept --)
                                                            floor

`Node.floor` says that this was done on purpose: rows of the path below it count as there
(`missing`), and a work that would need one is found by `in_reach` before it runs.  A row depends on
*layers* times w positions before it, so one that is gone comes back only from a place before which
a whole window is left (`lost`), or from position 0.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from forkserve.tree.node import Node, new_segment
from forkserve.tree.rows import missing, spans
from forkserve.tree.tree import ContextTree
from forkserve.types import NodeMode

__all__ = ["give_back", "in_reach", "lost", "next_row"]


def in_reach(tree: ContextTree, node: Node, begin: int, window: int) -> bool:
    """True if the rows that position `begin` of a path reads are all in pages.

    They must not be missing (see `missing`), only given back.
    """
    low = max(begin - window + 1, 0)
    if low == begin:
        return True
    parts = spans(tree, node, begin)
    return bool(parts) and parts[0].start <= low


def next_row(
    tree: ContextTree, node: Node, upto: int, window: int, again: int | None = None
) -> tuple[Node, int, bool]:
    """The next row to compute before [0, upto) of a path is there: the node that owns it, its
    position, and whether what it reads is in pages.  again: what is computed anew if all rows are
    there; None is the last one."""
    parts = missing(node, upto)
    last = max(node.length - 1, 0) if again is None else again
    owner, begin = parts[0][:2] if parts else (node, last)
    return owner, begin, in_reach(tree, owner, begin, window)


def give_back(
    tree: ContextTree, window: int, ends: Collection[Node] = (), *, others: bool = True
) -> int:
    """Drop whole pages from the beginning of nodes that no end reads any more; returns pages freed.

    An end is where a path may go on: the tip of a line, a leaf, and those given; others=False
    counts only those.  A guess may be cut anywhere, so it keeps its rows, and a window before the
    place where it left.  One row more than the window stays: the last token may be replayed.
    """
    low: dict[Node, float] = {}
    for node in tree:
        if not others and node not in ends:
            continue
        if node.mode is NodeMode.SPEC and node.parent is not None:
            low[node] = 0
            _need(node.parent, node.alias_len - window, low)
        elif not node.children or tree.tips.get(node.line) is node or node in ends:
            owner, begin, there = next_row(tree, node, node.length, window)
            if there:  # else its rows come again from further up, whatever is kept
                whole = owner is node and begin == node.length - 1
                _need(owner, begin + whole - window, low)
    gone: list[int] = []
    for node in tree:
        if node.segments:
            gone += _drop_below(tree, node, low.get(node, inf))
    if gone:
        for node in tree:
            above = node.parent if node.segments and node.kv_begin > node.floor else None
            if above is not None and not spans(tree, above, node.kv_begin):
                node.floor = node.kv_begin  # it can do without what was above it
    return tree.pool.decref(gone)


def _need(node: Node, position: int, low: dict[Node, float]) -> None:
    """A path that goes on at or below `node` reads its rows from `position` on."""
    current: Node | None = node
    while current is not None:
        low[current] = min(low.get(current, inf), position)
        if position >= current.kv_begin or (current.segments and current.kv_begin <= current.floor):
            return
        current = current.parent


def _drop_below(tree: ContextTree, node: Node, position: float) -> list[int]:
    """Take the pages of a node whose rows are all below `position` off its table."""
    gone: list[int] = []
    end = node.kv_end
    while node.segments and node.segments[0].end <= position:
        gone += node.segments[0].pages
        node.segments = node.segments[1:]
    if node.segments and node.segments[0].start < position:
        first, size = node.segments[0], tree.pool.page_size
        count = int(position - first.start) // size
        if count:
            gone += first.pages[:count]
            rest = new_segment(first.start + count * size, first.pages[count:], first.end)
            rest.sealed, rest.shared = first.sealed, first.shared
            node.segments = [rest, *node.segments[1:]]
    if gone:
        node.floor = node.kv_begin if node.segments else end
        for head in node.segments[:1]:  # where a packed tail repeated them it is seen now
            children = node.children.values()
            head.sealed |= any(head.start < child.alias_len <= head.end for child in children)
        tree.epoch += 1
    return gone


def lost(tree: ContextTree, node: Node, begin: int, window: int) -> list[Node]:
    """Nodes whose rows must go, last ones first, so that row `begin` of a path can be computed.

    Those are the nodes of the path, up to the first one above that still has a whole window of rows
    before the place where the path leaves it, and whatever rests on their rows.
    """
    doomed: set[Node] = set()
    current: Node | None = node
    while current is not None and (
        missing(current, begin) or not in_reach(tree, current, begin, window)
    ):
        doomed.add(current)
        # A node without tokens replays a row that stands further up.
        begin, current = min(begin, current.alias_len), current.parent
    for member in tree:  # parents come first
        if member.parent in doomed and (not member.segments or member.kv_begin > member.floor):
            doomed.add(member)
    return [member for member in reversed(tree.nodes.values()) if member in doomed]
