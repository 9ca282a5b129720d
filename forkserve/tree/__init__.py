"""Context tree, segments, page pool, tails, prefix index and their invariants."""

from forkserve.tree.index import PrefixIndex
from forkserve.tree.node import MAIN_LINE, Node, Segment
from forkserve.tree.pool import PagePool
from forkserve.tree.tree import ContextTree, committed

__all__ = [
    "MAIN_LINE",
    "ContextTree",
    "Node",
    "PagePool",
    "PrefixIndex",
    "Segment",
    "committed",
]
