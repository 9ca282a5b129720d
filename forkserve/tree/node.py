"""Nodes and segments: the two records a context tree is made of.

A node owns the tokens it adds (its residual); a segment owns the pages of a run of KV rows.

::

    position   0 ............ alias_len ................. length
    parent     [-------------------]                             tokens of the ancestors
    node                            [----- tokens ------]        its own residual
    KV rows              [r copied | own rows ....)              first segment of the node
                         kv_begin                  kv_end

`kv_begin < alias_len` when the tail of the parent's last page was copied (pack) or taken over;
``kv_begin == alias_len`` when it is shared (freeze).  Rows below `kv_begin` are the ancestors'.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from forkserve.types import NodeMode, Span

__all__ = ["MAIN_LINE", "Node", "Segment", "new_segment"]

MAIN_LINE = 0
_uids = iter(range(1, 2**62))


@dataclass(slots=True, eq=False)
class Segment:
    """A contiguous run of KV rows with its own page alignment.

    Position p is row ``(p - start) % P`` of ``pages[(p - start) // P]``; rows [start, end) are
    written.  sealed: a child looks at it, so the owner may not write here until that child is gone.
    shared: taken from the prefix index; its key is common to several sessions, so it never grows.
    A `pages` list is replaced, never changed in place: batches in flight read it.
    """

    key: Hashable
    start: int
    pages: list[int]
    end: int
    sealed: bool = False
    shared: bool = False

    def span(self, upto: int) -> Span:
        """Rows [start, upto) for a backend to read."""
        return Span(self.key, self.pages, self.start, upto - self.start)


def new_segment(start: int, pages: list[int], end: int) -> Segment:
    """A segment with a key of its own: no other table names the same run of rows by it."""
    return Segment(next(_uids), start, pages, end)


class Node:
    """One node of a context tree; see the module's drawing for its positions.

    known: absolute position up to which the tokens are certain (the rest is a guess).
    line: which committed line a Commit or Idle node belongs to (MAIN_LINE, or an attempt's).
    published: full pages, counted from position 0, that the prefix index knows, with `digest` at
    their end.  floor: rows of the path below it were given back on purpose
    (`forkserve.tree.window`).  tail_choice: the last one, as (alias_len, children, freeze).
    speculated: rows computed here while the node was speculative.
    """

    __slots__ = (
        *("id", "parent", "branch", "alias_len", "tokens", "mode", "generation", "created_ms"),
        *("line", "known", "children", "segments", "published", "digest", "floor", "tail_choice"),
        *("speculated", "used_ms", "ttl_deadline_ms", "spans_cache"),
    )

    # By hand, as a fork makes one: a dataclass would call a factory for each of the containers.
    def __init__(
        self,
        id: int,
        parent: Node | None,
        branch: str,
        alias_len: int,
        tokens: array[int],
        mode: NodeMode,
        generation: int,
        created_ms: float,
        line: int,
        known: int,
    ) -> None:
        self.id = id
        self.parent = parent
        self.branch = branch
        self.alias_len = alias_len
        self.tokens = tokens
        self.mode = mode
        self.generation = generation
        self.created_ms = self.used_ms = created_ms
        self.line = line
        self.known = known
        self.children: dict[int, Node] = {}
        self.segments: list[Segment] = []
        self.published = self.floor = self.speculated = 0
        self.digest = b""
        self.tail_choice: tuple[int, int, bool] | None = None
        self.ttl_deadline_ms: float | None = None
        self.spans_cache: tuple[int, int, tuple[Span, ...]] | None = None

    def __repr__(self) -> str:
        above = self.parent.id if self.parent is not None else None
        return f"Node({self.id}, {self.mode.value}, parent={above}, length={self.length})"

    @property
    def length(self) -> int:
        """Tokens from the root to the end of this node."""
        return self.alias_len + len(self.tokens)

    @property
    def kv_begin(self) -> int:
        """Position of the node's first own row; its ancestors hold those before."""
        return self.segments[0].start if self.segments else self.alias_len

    @property
    def kv_end(self) -> int:
        """Rows [kv_begin, kv_end) are written by this node."""
        return self.segments[-1].end if self.segments else self.alias_len

    def segment_at(self, position: int) -> Segment | None:
        """The own segment that holds row position - 1, or would by its place; None if above it.

        Where a packed tail repeats rows of the segment before, the one before counts: what a child
        sees never moves to a page that is still being written.
        """
        segments = self.segments
        for number in range(len(segments) - 1, -1, -1):
            segment = segments[number]
            if segment.start < position and (number == 0 or segments[number - 1].end < position):
                return segment
        return None

    @property
    def evicted(self) -> bool:
        """None of its rows is in a page: they were dropped, or never computed."""
        return not self.segments

    @property
    def live(self) -> bool:
        return self.mode is not NodeMode.DEAD

    def ancestors(self) -> Iterator[Node]:
        """Parent, grandparent, ... root."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
