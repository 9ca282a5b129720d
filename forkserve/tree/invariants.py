"""The invariants of the design, each a function that raises AssertionError with the numbers.

They recompute everything from scratch and cost O(state): tests call `check_all` after every step,
users can call `Engine.check`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import compress

from forkserve.tree.index import PrefixIndex
from forkserve.tree.node import Node, Segment
from forkserve.tree.pool import PagePool
from forkserve.tree.rows import missing
from forkserve.tree.tree import ContextTree, committed
from forkserve.types import NodeMode

__all__ = [
    "check_all",
    "check_isolation",
    "check_partition",
    "check_prefix",
    "check_references",
    "check_residency",
    "check_rows",
    "check_spine",
    "check_write_safety",
    "standing_rows",
]


def check_prefix(tree: ContextTree) -> None:
    """Every node continues a prefix of its parent: positions run 0..n-1 without a gap."""
    for node in tree:
        if node.parent is None:
            assert (node.alias_len, node.id) == (0, 1), f"node {node.id} has no parent"
            continue
        assert node.parent.children.get(node.id) is node, (
            f"node {node.id} is no child of its parent"
        )
        assert tree.nodes.get(node.parent.id) is node.parent, f"parent of {node.id} is not live"
        assert 0 <= node.alias_len <= node.parent.length, (
            f"node {node.id} sees {node.alias_len} of {node.parent.length} positions"
        )


def check_spine(tree: ContextTree) -> None:
    """At most one committed child per node and line; committed nodes have committed ancestors."""
    for node in tree:
        lines = Counter(c.line for c in node.children.values() if committed(c))
        assert all(n == 1 for n in lines.values()), f"node {node.id} has two committed children"
        if committed(node) and node.parent is not None:
            assert committed(node.parent), f"committed node {node.id} hangs under a guess"
    for line, tip in tree.tips.items():
        assert tree.nodes.get(tip.id) is tip, f"the tip of line {line} is not live"
        assert tip.line == line, f"node {tip.id} of line {tip.line} is no tip of line {line}"
        assert committed(tip), f"the tip {tip.id} of line {line} is {tip.mode.value}"
        below = [c.id for c in tip.children.values() if committed(c) and c.line == line]
        assert not below, f"line {line} goes on after its tip {tip.id}: {below}"


def check_modes(tree: ContextTree) -> None:
    """Dead nodes are out of the tree, and only there."""
    for node in tree:
        assert node.mode is not NodeMode.DEAD, f"dead node {node.id} is still in the tree"
    for node in tree.dead:
        assert node.mode is NodeMode.DEAD, f"node {node.id} waits for reclaim but is not dead"


def check_rows(tree: ContextTree) -> None:
    """Own rows begin at or before the residual, end inside it, and fill the pages of a table."""
    size = tree.pool.page_size
    for node in [*tree, *tree.dead]:
        previous = None
        for segment in node.segments:
            rows = segment.end - segment.start
            assert rows > 0, f"node {node.id} keeps an empty segment"
            assert len(segment.pages) == -(-rows // size), (
                f"node {node.id}: {len(segment.pages)} pages for {rows} rows"
            )
            if previous is not None:
                assert previous.start <= segment.start <= previous.end, f"hole in node {node.id}"
            previous = segment
            assert segment.end <= node.length, f"node {node.id} has rows past its tokens"


def check_residency(tree: ContextTree) -> None:
    """No hole above a row: a node with rows keeps its ancestors' rows up to where they begin."""
    for node in tree:
        if node.segments and node.parent is not None and node.kv_begin > node.floor:
            holes = [p for p in missing(node.parent, node.kv_begin) if p[2] > p[1]]
            assert not holes, f"node {node.id} has rows above a hole: {_show(holes)}"


def check_references(
    pool: PagePool, trees: Iterable[ContextTree], index: PrefixIndex | None = None
) -> None:
    """References of a page = tables + pins + index entries."""
    expected: Counter[int] = Counter()
    for tree in trees:
        for node in [*tree, *tree.dead]:
            for segment in node.segments:
                expected.update(segment.pages)
    listed = Counter(index.pages()) if index is not None else Counter()
    wanted, marks = list(pool.pins), [0] * pool.capacity
    for page, count in listed.items():
        marks[page] = count
    for page, count in (expected + listed).items():
        wanted[page] += count
    if pool.refs == wanted and list(pool.indexed) == marks:
        return  # as nearly always: only what is wrong is looked at page by page
    for page in range(pool.capacity):
        assert listed[page] == pool.indexed[page], f"page {page}: index and mark disagree"
        want = expected[page] + pool.pins[page] + listed[page]
        assert pool.refs[page] == want, (
            f"page {page} has {pool.refs[page]} references; {expected[page]} tables, "
            f"{pool.pins[page]} pins and {listed[page]} index entries name it"
        )


def check_partition(pool: PagePool) -> None:
    """free + private + shared + index-only = total: what the pool counts is what the pages say."""
    assert min(pool.refs, default=0) >= 0, "a page has fewer than no references"
    free = pool.refs.count(0)
    index_only = list(compress(pool.refs, pool.indexed)).count(1)
    assert free == pool.free_pages == len(set(pool._free)), (
        f"{free} pages have no reference but {pool.free_pages} are in the free list"
    )
    assert index_only == pool.index_only, (
        f"{index_only} index-only pages, {pool.index_only} counted"
    )


def standing_rows(
    pool: PagePool, trees: Iterable[ContextTree], begun: Collection[Segment] = ()
) -> dict[int, int]:
    """Page -> how many of its first slots hold rows of some table; all of a page in the index.

    begun: segments that have no row yet.  No work may write these slots.
    """
    size, skipped = pool.page_size, set(map(id, begun))
    rows = dict.fromkeys(compress(range(pool.capacity), pool.read_only), size)
    for tree in trees:
        for node in [*tree, *tree.dead]:
            for segment in node.segments:
                if id(segment) in skipped:
                    continue
                for number, page in enumerate(segment.pages):
                    held = min(size, segment.end - segment.start - number * size)
                    if held > rows.get(page, 0):
                        rows[page] = held
    return rows


def check_write_safety(pool: PagePool, tree: ContextTree) -> None:
    """A page that is written next is nobody else's: an open segment's partly filled last page."""
    for node in tree:
        for segment in node.segments:
            if (segment.end - segment.start) % pool.page_size and not segment.sealed:
                page = segment.pages[-1]
                if pool.read_only[page]:
                    continue  # whoever goes on here copies its rows first
                others = pool.refs[page] - 1 - pool.pins[page] - pool.indexed[page]
                assert others == 0, f"open page {page} of node {node.id} is on {others} more tables"
        if node.segments and not node.segments[-1].sealed:
            last = node.segments[-1]
            seen = [
                c.id
                for c in node.children.values()
                if c.alias_len <= last.end and node.segment_at(c.alias_len) is last
            ]
            assert not seen, f"node {node.id} may write under its children {seen}"


def check_isolation(tree: ContextTree) -> None:
    """Speculative pages are never in the prefix index and never published."""
    for node in tree:
        if node.mode is NodeMode.SPEC:
            assert not node.published, f"speculative node {node.id} was published"
            for segment in node.segments:
                marked = [p for p in segment.pages if tree.pool.indexed[p]]
                assert not marked, f"speculative pages {marked} are in the index"


def check_all(
    pool: PagePool, trees: Iterable[ContextTree], index: PrefixIndex | None = None
) -> None:
    """Every invariant over every tree."""
    trees = list(trees)
    for tree in trees:
        check_prefix(tree)
        check_modes(tree)
        check_spine(tree)
        check_rows(tree)
        check_residency(tree)
        check_write_safety(pool, tree)
        check_isolation(tree)
    check_references(pool, trees, index)
    check_partition(pool)


def _show(parts: Iterable[tuple[Node, int, int]]) -> str:
    return ", ".join(f"node {node.id} rows [{a}, {b})" for node, a, b in parts)
