"""The committed spine: publishing its pages, taking published ones, and keeping it aligned."""

from __future__ import annotations

from collections.abc import Iterable

from forkserve.tree.index import PrefixIndex, page_digest, root_digest
from forkserve.tree.node import Node, Segment, new_segment
from forkserve.tree.rows import cut, missing, spans
from forkserve.tree.tree import ContextTree
from forkserve.types import RowCopy, Span

__all__ = [
    "Realignment",
    "copy_plan",
    "finish",
    "publish",
    "realign",
    "realignable",
    "take_prefix",
    "trim",
    "unpublish",
]


def take_prefix(tree: ContextTree, index: PrefixIndex) -> int:
    """Give the root the longest published prefix by reference; returns the rows it gained.

    A root that is being computed goes on behind its own whole pages; rows of its own behind them
    are given back for the shared page.
    """
    root, size = tree.root, tree.pool.page_size
    have = root.published
    if root.floor or have != root.kv_end // size:
        return 0  # given back, or pages that the index does not know stand in between
    pages, digest = index.lookup(tree.salt, root.tokens, have, root.digest)
    if not pages:
        return 0
    tree.pool.incref(pages)
    before, start = root.kv_end, have * size
    if before > start:
        cut(tree, root, start)
    end = start + len(pages) * size
    key = ("prefix", start, digest)
    root.segments.append(Segment(key, start, pages, end, sealed=True, shared=True))
    root.published, root.digest = have + len(pages), digest
    tree.epoch += 1
    return end - before


def publish(tree: ContextTree, index: PrefixIndex, node: Node) -> int:
    """Enter the full aligned pages of a committed path into the index; returns how many are new.

    Stops at the first page that is not aligned from position 0 (`realign` mends that later), or
    that comes after pages which were given back before they could be entered.  A
    page whose content the index holds already is folded into the older frame.
    """
    size = tree.pool.page_size
    done, digest = _published(tree, node)
    begin, wanted = done, _complete(node) // size
    if wanted <= done:
        return 0
    entered = []
    for span in spans(tree, node, wanted * size):
        stop = (span.start + span.length) // size
        if stop <= done:
            continue
        if span.start % size or span.start > done * size:
            break
        for number in range(done, stop):
            ids = tree.tokens(node, number * size, (number + 1) * size)
            page = span.pages[number - span.start // size]
            digest, kept = index.publish(digest, ids, page)
            entered.append(digest)
            if kept != page:
                _replace(tree, node, page, kept)
        done = stop
    index.touch(entered)
    node.published, node.digest = done, digest
    return done - begin


def unpublish(tree: ContextTree, node: Node, rows: int) -> None:
    """Rows of a node from position `rows` on went: those pages do not count as published by it.

    Nodes below that have no row of their own may count them too.
    """
    size = tree.pool.page_size
    for member in node.subtree():
        if member.published * size <= rows or (member is not node and member.segments):
            continue
        member.published, member.digest = 0, b""
        if member is node and rows > node.alias_len:
            done, digest = _published(tree, node)
            for number in range(done, rows // size):
                ids = tree.tokens(node, number * size, (number + 1) * size)
                digest = page_digest(digest, ids)
            node.published, node.digest = max(done, rows // size), digest


def _complete(node: Node) -> int:
    """Rows of the path that exist without a hole from position 0."""
    parts = missing(node, node.length)
    return parts[0][1] if parts else node.length


def _published(tree: ContextTree, node: Node) -> tuple[int, bytes]:
    """Pages of this path that are in the index already, and the digest at their end."""
    current: Node | None = node
    limit = node.length
    while current is not None:
        if current.published and current.published * tree.pool.page_size <= limit:
            return current.published, current.digest
        limit = current.alias_len
        current = current.parent
    return 0, root_digest(tree.salt)


def _replace(tree: ContextTree, node: Node, page: int, kept: int) -> None:
    """Let the table that lists `page` list `kept` instead: same rows, one frame."""
    current: Node | None = node
    while current is not None:
        for segment in current.segments:
            if page in segment.pages:
                segment.pages = [kept if p == page else p for p in segment.pages]
                tree.pool.incref((kept,))
                tree.pool.decref((page,))
                tree.epoch += 1
                return
        current = current.parent
    raise AssertionError(f"page {page} is on no table of node {node.id}")


def trim(tree: ContextTree, node: Node) -> int:
    """Give back rows that only repeat what the sole child holds; returns pages freed."""
    if len(node.children) != 1:
        return 0
    (child,) = node.children.values()
    if child.segments and child.kv_begin < node.kv_end and child.line == node.line:
        return cut(tree, node, child.kv_begin)
    return 0


class Realignment:
    """Rows of a committed chain on their way to aligned pages of its last node."""

    __slots__ = ("begin", "chain", "copies", "fresh", "node")

    def __init__(self, node: Node, chain: list[Node], begin: int) -> None:
        self.node = node
        self.chain = chain
        self.begin = begin
        self.fresh: list[int] = []
        self.copies: list[RowCopy] = []


def realignable(tree: ContextTree, tip: Node) -> tuple[list[Node], int] | None:
    """The chain of nodes to rewrite and the aligned position to begin at, or None.

    A chain can be rewritten where it has no branch: every row from the first misaligned segment
    on is seen by the tip alone.  Only a path without a hole is worth it; rows pending at its end,
    as after every generation, are none.  One that gave rows back will not be published any more.
    """
    size = tree.pool.page_size
    if tip.children or not tip.segments or missing(tip, tip.kv_end):
        return None
    if any(node.floor for node in (tip, *tip.ancestors())):
        return None
    chain: list[Node] = []
    crooked: int | None = None
    node: Node | None = tip
    need = tip.length
    best: tuple[list[Node], int] | None = None
    while node is not None and (not chain or len(node.children) == 1):
        if chain and node.line != tip.line:
            break
        chain.append(node)
        for segment in reversed(node.segments):
            if segment.start < need and not segment.shared:
                if segment.start % size:
                    crooked = segment.start
                need = min(need, segment.start)
        if crooked is not None and crooked // size * size >= node.kv_begin:
            best = (chain[::-1], crooked // size * size)
        node = node.parent
    return best


def realign(tree: ContextTree, chain: list[Node], begin: int) -> Realignment:
    """Allocate and describe the move; the caller runs the copies, then calls `finish`."""
    tip, pool, size = chain[-1], tree.pool, tree.pool.page_size
    move = Realignment(tip, chain, begin)
    move.fresh = pool.alloc(pool.pages_for(tip.kv_end - begin))
    move.copies = copy_plan(spans(tree, tip, tip.kv_end), begin, move.fresh, size)
    return move


def copy_plan(parts: Iterable[Span], begin: int, pages: list[int], size: int) -> list[RowCopy]:
    """Copies that bring the rows of `parts` from position `begin` on into `pages`, packed."""
    copies = []
    for span in parts:
        low, high = max(begin, span.start), span.start + span.length
        while low < high:
            source, target = low - span.start, low - begin
            rows = min(size - source % size, size - target % size, high - low)
            pair = span.pages[source // size], pages[target // size]
            copies.append(RowCopy(pair[0], source % size, pair[1], target % size, rows))
            low += rows
    return copies


def finish(tree: ContextTree, move: Realignment) -> int:
    """The copies ran: swap the tables; returns how many pages that freed on balance."""
    pool, end, before = tree.pool, move.node.kv_end, tree.pool.free_pages
    for node in move.chain:
        cut(tree, node, move.begin)
    move.node.segments.append(new_segment(move.begin, move.fresh, end))
    return pool.free_pages - before - len(move.fresh)
