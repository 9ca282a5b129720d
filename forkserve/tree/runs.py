"""One pass over several nodes of a path: rows behind one another, each in its own node.

::

    node a   [.. rows ..|new]                 its segment ends where b begins
    node b             [new|new new|new)      its segment begins at that page: both tables list it
    written            [-----------------]    one run of slots

A chain of short nodes, as after a resume or a pre-emption, would otherwise take a pass for each,
since no work reads what another of its batch writes.
"""

from __future__ import annotations

from dataclasses import replace

from forkserve.errors import OutOfPages
from forkserve.tree.node import Node, new_segment
from forkserve.tree.rows import Reservation
from forkserve.tree.tree import ContextTree

__all__ = ["goes_on", "prolong"]


def goes_on(held: Reservation, node: Node, begin: int) -> bool:
    """True if rows of `node` from `begin` on may be written behind those of its parent."""
    return (
        node.parent is held.node
        and not node.segments
        and begin == node.alias_len == held.begin + held.count
        and all(child.alias_len > begin for child in node.children.values())
    )


def prolong(
    tree: ContextTree, head: Reservation, last: Reservation, node: Node, count: int
) -> Reservation | None:
    """Reserve the first `count` rows of `node` behind `last`, in the run of `head`.

    `head.write` grows by them.  None, with nothing changed, when there are no pages for it.
    """
    pool, size, begin = tree.pool, tree.pool.page_size, node.alias_len
    rest = (begin - last.segment.start) % size
    try:
        extra = pool.alloc(pool.pages_for(rest + count) - (rest > 0))
    except OutOfPages:
        return None
    common = last.segment.pages[-1:] if rest else []
    pool.incref(common)
    segment = new_segment(begin - rest, [*common, *extra], begin)
    # On two tables: whoever goes on behind these rows takes them to a page of its own first.
    segment.sealed = bool(common) and not extra
    node.segments.append(segment)
    node.floor = 0
    write = head.write
    used = pool.pages_for(write.offset + write.length)
    pages = [*write.pages[:used], *extra]
    head.write = replace(write, pages=pages, length=write.length + count)
    return Reservation(node, segment, begin, count, head.write, [], segment.pages[:], created=True)
