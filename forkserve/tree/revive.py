"""A context tree from plain values, KV absent: tokens first, rows when they are needed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from forkserve.errors import NodeError
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import NodeMode

__all__ = ["NodeValues", "revive"]


class NodeValues(Protocol):
    """What a node is made of, rows apart."""

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def branch(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> array[int]: ...
    @property
    def mode(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def known(self) -> int: ...


def revive(
    tree: ContextTree,
    nodes: Sequence[NodeValues],
    tips: Mapping[int, int],
    next_id: int,
    next_line: int,
    now_ms: float,
) -> None:
    """Fill an empty tree with nodes, parents first.

    Raises NodeError, and leaves the tree empty, when they do not form one.
    """
    made: dict[int, Node] = {}
    for values in nodes:
        parent = made.get(values.parent) if values.parent is not None else None
        known = values.start <= values.known <= values.start + len(values.tokens)
        fits = values.parent is None if values.id == 1 else parent is not None
        if not fits or (parent is not None and values.start > parent.length) or not known:
            raise NodeError(f"node {values.id} does not fit under node {values.parent}")
        node = Node(
            id=values.id,
            parent=parent,
            branch=values.branch,
            alias_len=values.start,
            tokens=values.tokens[:],
            mode=NodeMode(values.mode),
            generation=values.generation,
            created_ms=now_ms,
            line=values.line,
            known=values.known,
        )
        made[node.id] = node
        if parent is not None:
            parent.children[node.id] = node
    if 1 not in made or not all(tip in made for tip in tips.values()) or next_id <= max(made):
        raise NodeError("the nodes have no root, or a line ends in a node that is not there")
    tree.nodes.update(made)
    tree.tips.update({line: made[tip] for line, tip in tips.items()})
    tree.next_id, tree.next_line = next_id, next_line
