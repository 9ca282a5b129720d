"""The context tree of one session: tokens, modes and generations.  Rows live in `rows`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import numpy as np

from forkserve.errors import NodeError
from forkserve.tree.node import MAIN_LINE, Node
from forkserve.tree.pool import PagePool
from forkserve.types import NodeMode, Tokens

__all__ = ["ROOT", "ContextTree", "committed", "lcp"]

ROOT = 1  # id of the root: ids count from here in every tree

_EDGES = {
    (NodeMode.SPEC, NodeMode.COMMIT),
    (NodeMode.SPEC, NodeMode.IDLE),
    (NodeMode.COMMIT, NodeMode.IDLE),
    (NodeMode.IDLE, NodeMode.COMMIT),
    (NodeMode.SPEC, NodeMode.DEAD),
    (NodeMode.COMMIT, NodeMode.DEAD),
    (NodeMode.IDLE, NodeMode.DEAD),
}


class ContextTree:
    """Nodes of one session over the shared page pool.

    A node is named by (session, node id) everywhere outside; ids count from 1 and are never used
    twice.  Dead nodes leave the tree at once; `get` still tells a dead id from an unknown one.
    """

    def __init__(
        self,
        session: str,
        pool: PagePool,
        *,
        tenant: str = "default",
        salt: str = "",
        tail: Literal["auto", "pack", "freeze"] = "auto",
    ) -> None:
        self.session = session
        self.pool = pool
        self.tenant = tenant
        self.salt = salt
        self.tail_policy = tail
        self.nodes: dict[int, Node] = {}
        self.tips: dict[int, Node] = {}  # line -> its last committed node
        self.epoch = 0  # bumped whenever rows of a committed node move or go away
        self.dead: list[Node] = []  # aborted lazily: pages still held
        self.next_id = ROOT
        self.next_line = MAIN_LINE + 1
        self.guessed: dict[int, set[Node]] = {}  # parent -> children that ever were speculated on
        self.cached = 0  # rows of the root that other sessions had computed
        self.reached = 0  # rows that the root had before they were evicted

    # ---------------------------------------------------------------- look-up

    @property
    def root(self) -> Node:
        return self.nodes[ROOT]

    @property
    def tip(self) -> Node:
        """Last node of the main line: what `generate` extends."""
        return self.tips[MAIN_LINE]

    def get(self, node_id: int) -> Node:
        """A live node.  Raises NodeError for a dead or unknown id, saying which."""
        try:
            node = self.nodes.get(node_id)
        except TypeError:
            node = None
        if node is not None:
            return node
        if self.is_dead(node_id):
            raise NodeError(
                f"node {node_id} of session '{self.session}' is dead: aborted, or lost to a commit"
            )
        raise NodeError(f"session '{self.session}' has no node {node_id!r}")

    def is_dead(self, node_id: int) -> bool:
        """True for an id that was a node of this tree once."""
        return isinstance(node_id, int) and 0 < node_id < self.next_id and node_id not in self.nodes

    def tokens(self, node: Node, begin: int = 0, end: int | None = None) -> array[int]:
        """Tokens of positions [begin, end) on the path root..node."""
        above = node.alias_len
        if begin >= above:  # its own alone, as for every step of a generation
            return node.tokens[begin - above : None if end is None else max(end - above, 0)]
        need = node.length if end is None else min(end, node.length)
        parts: list[array[int]] = []
        current: Node | None = node
        while current is not None and need > begin:
            if need > current.alias_len:
                low = max(begin - current.alias_len, 0)
                parts.append(current.tokens[low : need - current.alias_len])
                need = current.alias_len
            current = current.parent
        out = array("i")
        for part in reversed(parts):
            out.extend(part)
        return out

    def owner(self, node: Node, length: int) -> Node:
        """The node on the path root..node that a fork after `length` tokens hangs under."""
        while node.parent is not None and length <= node.alias_len:
            node = node.parent
        return node

    def match(self, child: Node, tokens: array[int], end: int | None = None) -> int:
        """How many of `tokens`, observed after the child's parent, the child holds already.

        A child that forked before its parent grew must also hold what the parent added since.
        end: where the parent ends, if it is to be taken back.
        """
        parent = child.parent
        assert parent is not None
        grown = (parent.length if end is None else end) - child.alias_len
        if grown and child.tokens[:grown] != self.tokens(parent, child.alias_len)[:grown]:
            return 0
        return lcp(child.tokens[grown : grown + len(tokens)], tokens)

    def spine(self, line: int = MAIN_LINE) -> list[Node]:
        """The committed path root..tip of a line (an attempt's path includes its trunk)."""
        tip = self.tips[line]
        return [*reversed(list(tip.ancestors())), tip]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    # ---------------------------------------------------------------- structure

    def open_root(self, tokens: Tokens, now_ms: float) -> Node:
        """Node 1: committed, on the main line."""
        ids, mode = array("i", tokens), NodeMode.COMMIT
        node = Node(ROOT, None, "root", 0, ids, mode, 0, now_ms, MAIN_LINE, len(ids))
        self.next_id = ROOT + 1
        self.nodes[ROOT] = self.tips[MAIN_LINE] = node
        return node

    def fork(
        self,
        parent: Node,
        branch: str,
        tokens: Tokens,
        now_ms: float,
        alias_len: int | None = None,
        mode: NodeMode = NodeMode.SPEC,
    ) -> Node:
        """A child that sees the parent's first `alias_len` positions (default: all of them).

        No page is touched.  Seals the parent's open segment: what the parent writes from now on
        goes elsewhere, so that the child's view cannot change under it.
        """
        at = parent.length if alias_len is None else alias_len
        number, ids, known = self.next_id, array("i", tokens), at + len(tokens)
        generation, line = parent.generation, parent.line
        # By place, as names would take a tenth of a fork.
        node = Node(number, parent, branch, at, ids, mode, generation, now_ms, line, known)
        self.next_id = number + 1
        self.nodes[number] = parent.children[number] = node
        last = parent.segments[-1] if parent.segments else None
        if last is not None and last.end >= at and not last.sealed:
            last.sealed = parent.segment_at(at) is last  # or when its rows are written
        return node

    def extend(self, node: Node, tokens: Tokens) -> None:
        """Add tokens at the end of a node.  Children keep the view they forked from."""
        node.tokens.extend(tokens)

    def note_guess(self, node: Node) -> None:
        """The node has speculative work or rows now."""
        assert node.parent is not None
        self.guessed.setdefault(node.parent.id, set()).add(node)

    def detach(self, node: Node) -> list[Node]:
        """Take a subtree out of the tree and mark it Dead; rows are not touched."""
        gone = list(node.subtree())
        for dead in gone:
            dead.mode = NodeMode.DEAD
            del self.nodes[dead.id]
            self.guessed.pop(dead.id, None)
            if self.tips.get(dead.line) is dead:
                self._retreat(dead)
        if node.parent is not None:
            node.parent.children.pop(node.id, None)
        return gone

    def set_mode(self, node: Node, mode: NodeMode) -> None:
        """Change a node's mode along an allowed edge; anything else is a NodeError."""
        if node.mode is mode:
            return
        if (node.mode, mode) not in _EDGES:
            raise NodeError(
                f"node {node.id} cannot go from {node.mode.value} to {mode.value}"
                + ("; a dead node never revives" if node.mode is NodeMode.DEAD else "")
            )
        node.mode = mode

    def start_line(self, node: Node) -> int:
        """Make a speculative node the committed tip of a line of its own (an attempt)."""
        self.set_mode(node, NodeMode.COMMIT)
        node.line = self.next_line
        self.next_line += 1
        self.tips[node.line] = node
        return node.line

    def move_tip(self, line: int, node: Node) -> None:
        """`node` becomes the tip of `line`; a line of its own that it had ends."""
        if node.line != line and self.tips.get(node.line) is node:
            del self.tips[node.line]
        node.line = line
        self.tips[line] = node

    def split_line(self, node: Node) -> None:
        """Give the committed chain that starts at `node` a line of its own, idle until promoted."""
        old, new = node.line, self.next_line
        self.next_line += 1
        last: Node | None = node
        while last is not None:
            last.line = new
            self.set_mode(last, NodeMode.IDLE)
            self.tips[new] = last
            last = next((c for c in last.children.values() if c.line == old and committed(c)), None)

    def _retreat(self, node: Node) -> None:
        """The tip of a line died: the line goes back to its nearest live node, or ends."""
        line = node.line
        del self.tips[line]
        above = node.parent
        while above is not None and not above.live:  # dead together with the tip
            above = above.parent
        if above is not None and above.line == line and committed(above):
            self.tips[line] = above


def committed(node: Node) -> bool:
    """True for a node on a committed line, running or idle."""
    return node.mode is NodeMode.COMMIT or node.mode is NodeMode.IDLE


def lcp(a: array[int], b: array[int]) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return int(np.argmin(np.frombuffer(a, np.int32, n) == np.frombuffer(b, np.int32, n)))
