"""A session as the catalog holds it, kept beside the tree so that only differences are written."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forkserve.store.identity import CHUNK_TOKENS, chunk_id, root_id, token_bytes
from forkserve.tree import ContextTree, Node

__all__ = ["Change", "Kept", "Row", "Shadow", "keep", "row_of"]

Row = tuple[Any, ...]


@dataclass(slots=True)
class Kept:
    """A node as it was last written."""

    row: Row
    tokens: array[int]
    links: list[bytes]  # chain ids of the full chunks of the path, root first


@dataclass(slots=True)
class Shadow:
    """A session as it was last written, and what is noted and not written yet."""

    tree: ContextTree
    seed: int
    created: bool = False
    head: Row = ()
    nodes: dict[int, Kept] = field(default_factory=dict)
    tips: dict[int, int] = field(default_factory=dict)
    bindings: int = 0  # sequence number of the next
    notes: deque[tuple[str, Row]] = field(default_factory=deque)
    dropped: int = 0


@dataclass(slots=True)
class Change:
    """Statements of one transaction, and the shadow once they are committed."""

    statements: list[tuple[str, list[Row]]] = field(default_factory=list)
    head: Row = ()
    nodes: dict[int, Kept] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    tips: dict[int, int] = field(default_factory=dict)
    notes: int = 0

    def add(self, sql: str, rows: list[Row]) -> None:
        if rows:
            self.statements.append((sql, rows))


def row_of(node: Node) -> Row:
    """The columns of table `node` between session and chain."""
    return (
        node.id,
        node.parent.id if node.parent is not None else None,
        node.branch,
        node.alias_len,
        len(node.tokens),
        node.mode.value,
        node.line,
        node.generation,
        node.known,
    )


def keep(tree: ContextTree, node: Node, known: Mapping[int, Kept]) -> Kept:
    """The node as it is now, with the chain ids of its path.

    Ids of the parent's path are reused, and those of the node as it was before if it only grew.
    """
    kept = Kept(row_of(node), node.tokens[:], [])
    parent = known.get(node.parent.id) if node.parent is not None else None
    links = parent.links[: node.alias_len // CHUNK_TOKENS] if parent is not None else []
    before = known.get(node.id)
    if (
        before is not None
        and before.row[3] == node.alias_len
        and before.links[: len(links)] == links
        and kept.tokens[: len(before.tokens)] == before.tokens
    ):
        links = before.links[:]
    done, total = len(links), node.length // CHUNK_TOKENS
    if total > done:
        raw = token_bytes(tree.tokens(node, done * CHUNK_TOKENS, total * CHUNK_TOKENS))
        above, size = links[-1] if links else root_id(tree.salt), CHUNK_TOKENS * 4
        for number in range(total - done):
            above = chunk_id(above, raw[number * size : (number + 1) * size])
            links.append(above)
    kept.links = links
    return kept
