"""Giving back rows that fell out of every window.

A page spans all layers, so rows can go only where every layer has a sliding window.  Of w, the
longest of them, the row at position p reads the rows (p - w, p], itself included::

    position   0 ............. floor ............ end
    rows       [-- given back --|---- kept ------)        end - floor >= w
    tables     nodes below `floor` list no page; the first one kept begins there

`Node.floor` says that this was done on purpose: such rows count as there (`missing`), and a work
that would need one is found by `in_reach` before it runs.  A row depends on *layers* times w
positions before it, so nothing short of position 0 brings back a row that is gone.
"""

from __future__ import annotations

from forkserve.tree.node import Node, new_segment
from forkserve.tree.rows import missing, spans
from forkserve.tree.tree import ContextTree

__all__ = ["give_back", "in_reach"]


def in_reach(tree: ContextTree, node: Node, begin: int, window: int) -> bool:
    """True if the rows that position `begin` of a path reads are all in pages.

    They must not be missing (see `missing`), only given back.
    """
    low = max(begin - window + 1, 0)
    if low == begin:
        return True
    parts = spans(tree, node, begin)
    return bool(parts) and parts[0].start <= low


def give_back(tree: ContextTree, window: int) -> int:
    """Drop whole pages of the main line that no later position reads; returns pages freed.

    Only while the tree is that line alone: a branch may fork, or leave it, at any place before.
    One row more than the window stays, since the last token may be replayed for its logits.
    """
    tip, size = tree.tip, tree.pool.page_size
    if tip.length - window - tree.root.floor < size:
        return 0
    chain = tree.spine()
    if len(chain) != len(tree.nodes):  # something hangs beside it
        return 0
    parts = missing(tip, tip.length)
    low = (parts[0][1] if parts else tip.length) - window
    found = _at(chain, low)
    if found is None:
        return 0
    first, number = found
    node = chain[first]
    segment = node.segments[number]
    count = (low - segment.start) // size
    floor = segment.start + count * size
    if floor <= tree.root.floor or segment.end <= floor:
        return 0
    gone = segment.pages[:count]
    for above in [*(s for n in chain[:first] for s in n.segments), *node.segments[:number]]:
        gone += above.pages
    for member in chain[:first]:
        member.segments = []
    rest = new_segment(floor, segment.pages[count:], segment.end)
    rest.sealed, rest.shared = segment.sealed, segment.shared
    node.segments = [rest, *node.segments[number + 1 :]]
    for member in chain:
        member.floor = floor
    tree.epoch += 1
    return tree.pool.decref(gone)


def _at(chain: list[Node], low: int) -> tuple[int, int] | None:
    """Number of the node, and of its segment, from which the end of the chain reads row `low`.

    A segment repeats rows of the one before it where a tail was packed: the last one counts.
    """
    for first in range(len(chain) - 1, -1, -1):
        segments = chain[first].segments
        for number in range(len(segments) - 1, -1, -1):
            if segments[number].start <= low:
                return first, number
    return None
