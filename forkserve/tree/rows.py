"""Where KV rows live: reserving, reading, giving back and re-aligning them.

Who frees what, as half-open ranges of positions:

* reserve/settle   node gains [kv_end, kv_end + n); on failure only the fresh pages go back
* release          [kv_begin, kv_end) of the node, never an ancestor's rows
* cut at p         [p, kv_end) of the node
* realign          rows [A, kv_end) of a committed chain move to aligned pages of its last node
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forkserve.errors import OutOfPages
from forkserve.tree.node import Node, Segment, new_segment
from forkserve.tree.tails import choose_tail
from forkserve.tree.tree import ContextTree
from forkserve.types import NodeMode, RowCopy, Span

__all__ = [
    "Reservation",
    "cut",
    "fence",
    "missing",
    "release",
    "reserve",
    "rollback",
    "settle",
    "spans",
]


@dataclass(slots=True)
class Reservation:
    """Rows promised to one work, until the batch has run.

    fresh: pages allocated for it.  dropped: pages that lose this table's reference on success.
    before, sealed: the page list and the seal to go back to on failure.  created: the segment did
    not exist before.
    """

    node: Node
    segment: Segment
    begin: int
    count: int
    write: Span
    copies: list[RowCopy] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    created: bool = False
    sealed: bool = False


def missing(node: Node, upto: int) -> list[tuple[Node, int, int]]:
    """Rows still to compute before [0, upto) of the path is complete, root side first.

    Each entry (owner, begin, end) is to run in order.  A sole committed child takes over a pending
    last row of its parent instead of making the parent run a pass of its own for it.
    Rows that fell out of every window and were given back count as there; a work that would read
    one of them does not run (`forkserve.tree.window.in_reach`).
    """
    parts: list[tuple[Node, int, int]] = []
    need, current = upto, node
    while need > current.floor:
        if segments := current.segments:
            end = segments[-1].end
            if end < need:
                parts.append((current, end, need))
            need = min(need, segments[0].start)
        elif need > current.alias_len:
            begin = max(_inherited(current), current.floor)
            parts.append((current, begin, need))
            need = begin
        if current.parent is None or need <= current.floor:
            break
        current = current.parent
    return parts[::-1]


def _inherited(node: Node) -> int:
    """First position a node without rows has to compute: normally where its tokens begin."""
    parent = node.parent
    if parent is None or not parent.segments or node.mode is not NodeMode.COMMIT:
        return node.alias_len
    pending = node.alias_len - parent.kv_end
    return parent.kv_end if pending == 1 and len(parent.children) == 1 else node.alias_len


def fence(node: Node, begin: int) -> int | None:
    """The first position after `begin` where a child forked off; one reservation may not cross it.

    Rows up to there are sealed when they are written, rows after it start a new segment.
    """
    if not node.children:
        return None
    return min((c.alias_len for c in node.children.values() if c.alias_len > begin), default=None)


def spans(tree: ContextTree, node: Node, upto: int) -> tuple[Span, ...]:
    """The rows of positions [0, upto) on the path, in order.  They must exist (see `missing`).

    They begin above 0 where rows were given back, and are none if those were all.
    """
    begin = min(node.kv_begin, upto)
    cached = node.spans_cache
    if cached is None or cached[0] != tree.epoch or cached[1] != begin:
        above = _walk(node.parent, begin) if begin > node.floor else []
        node.spans_cache = cached = (tree.epoch, begin, _coalesce(above, tree.pool.page_size))
    own: list[Span] = []
    _take(node, upto, own)
    return (*cached[2], *own[::-1])


def _take(node: Node, need: int, found: list[Span]) -> int:
    """Append the node's own spans below `need`, last first; returns what is needed above it.

    Each span is cut where the next one begins: a packed tail repeats rows of the one before.
    """
    segments = node.segments
    for number in range(len(segments) - 1, -1, -1):
        segment = segments[number]
        if segment.start < need and (number == 0 or segments[number - 1].end < need):
            assert segment.end >= need, f"rows [{segment.end}, {need}) are missing"
            found.append(segment.span(need))
            need = segment.start
    return need


def _walk(node: Node | None, need: int) -> list[Span]:
    found: list[Span] = []
    while node is not None and need > 0:
        if need <= node.floor:
            return found[::-1]
        need = _take(node, need, found)
        if need <= node.floor:
            return found[::-1]
        node = node.parent
    assert need == 0, f"rows [0, {need}) are missing"
    return found[::-1]


def _coalesce(parts: list[Span], size: int) -> tuple[Span, ...]:
    """Join neighbours that end and begin on a page boundary: fewer parts to read and merge."""
    out: list[Span] = []
    for part in parts:
        last = out[-1] if out else None
        if last is not None and last.length % size == 0:
            pages = [*last.pages[: last.length // size], *part.pages[: -(-part.length // size)]]
            out[-1] = Span((last.key, part.key), pages, last.start, last.length + part.length)
        else:
            out.append(part)
    return tuple(out)


def reserve(tree: ContextTree, node: Node, begin: int, count: int) -> Reservation:
    """Pages for rows [begin, begin + count) of a node; raises OutOfPages and changes nothing then.

    `begin` is the node's kv_end, or for a node without rows what `missing` said; the rows end at
    the node's `fence` at the latest.
    """
    pool, size = tree.pool, tree.pool.page_size
    last = node.segments[-1] if node.segments else None
    if last is not None and (not last.sealed or not (last.shared or _watched(node, last))):
        held = _grow(tree, node, last, begin, count)
        held.sealed, last.sealed = last.sealed, False
        return held
    before = last
    if last is None and begin <= node.alias_len:  # else its first rows were given back
        before = _segment_at(node.parent, begin)
    rest = (begin - before.start) % size if before is not None else 0
    # A child that forked before this node had a row must not see its page: it would be written.
    seen = last is None and any(child.alias_len <= begin for child in node.children.values())
    if rest and last is None and not seen and _adoptable(tree, node, begin):
        extra = pool.pages_for(rest + count) - 1
        if extra > pool.free_pages:
            raise OutOfPages(extra, pool.free_pages, pool.capacity)
        return _grow(tree, node, _adopt(tree, node, begin, rest), begin, count)
    freeze = rest == 0 or seen or _freezes(tree, node, begin, rest, count)
    start = begin if freeze else begin - rest
    fresh = pool.alloc(pool.pages_for(begin + count - start))
    segment = new_segment(start, list(fresh), begin)
    copies = []
    if not freeze:
        assert before is not None
        source = before.pages[(begin - before.start) // size]
        copies.append(RowCopy(source, 0, fresh[0], 0, rest))
    node.segments.append(segment)
    _begun(tree, node)
    write = Span(segment.key, segment.pages, begin, count, begin - start)
    return Reservation(node, segment, begin, count, write, copies, fresh, created=True)


def settle(tree: ContextTree, held: Reservation) -> None:
    """The batch ran: the rows are valid."""
    segment = held.segment
    segment.end = held.begin + held.count
    if held.dropped:
        dropped, held.dropped = held.dropped, []
        tree.pool.decref(dropped)
    children = held.node.children
    if children and any(held.begin < c.alias_len <= segment.end for c in children.values()):
        segment.sealed = True  # forked here before the rows were written, or while they were
    if held.node.mode is NodeMode.SPEC:
        held.node.speculated += held.count
        tree.note_guess(held.node)


def rollback(tree: ContextTree, held: Reservation) -> None:
    """The batch failed or its node is gone: give back what was taken for it.  Idempotent."""
    node, segment = held.node, held.segment
    fresh, dropped, held.fresh, held.dropped = held.fresh, held.dropped, [], []
    if segment not in node.segments:  # released with the node, fresh pages and all
        tree.pool.decref(dropped)
    elif segment.end == held.begin and fresh:  # else it was settled, or took no page
        if held.created:
            node.segments.remove(segment)
        else:
            segment.pages, segment.sealed = held.before, segment.sealed or held.sealed
        tree.pool.decref(fresh)


def release(tree: ContextTree, node: Node) -> int:
    """Drop all own rows of a node; returns how many pages became free."""
    freed = 0
    for segment in node.segments:
        freed += tree.pool.decref(segment.pages)
    node.segments = []
    node.published, node.digest, node.floor = 0, b"", 0
    tree.epoch += 1
    return freed


def cut(tree: ContextTree, node: Node, position: int) -> int:
    """Drop the node's rows from `position` on; returns how many pages became free."""
    pool, freed, held = tree.pool, 0, node.segments
    # A packed tail that only repeats rows of the segment before goes too.
    while held and (held[-1].start >= position or (len(held) > 1 and held[-2].end >= position)):
        freed += pool.decref(held.pop().pages)
    if node.segments and node.segments[-1].end > position:
        segment = node.segments[-1]
        keep = pool.pages_for(position - segment.start)
        segment.pages, extra = segment.pages[:keep], segment.pages[keep:]
        segment.end = position
        freed += pool.decref(extra)
        if pool.refs[segment.pages[-1]] > 1:
            segment.sealed = True  # on another table as well: whoever goes on copies its rows
    if position < node.floor:
        node.floor = 0  # nothing is left of the rows that stood above it
    tree.epoch += 1
    return freed


def _grow(tree: ContextTree, node: Node, segment: Segment, begin: int, count: int) -> Reservation:
    """More rows at the end of an open segment; copies the last page first if it is not ours."""
    pool, size = tree.pool, tree.pool.page_size
    rest = (begin - segment.start) % size
    used = pool.pages_for(begin - segment.start)
    borrowed = rest > 0 and not pool.writable(segment.pages[used - 1])
    extra = pool.pages_for(begin + count - segment.start) - used
    before, copies, dropped, fresh = segment.pages, [], [], []
    if extra or borrowed:  # most steps of a generation take none
        fresh = pool.alloc(extra + borrowed)
        kept = before[:used]
        if borrowed:
            dropped = [kept[-1]]
            copies.append(RowCopy(kept[-1], 0, fresh[0], 0, rest))
            kept[-1] = fresh[0]
            tree.epoch += 1
        segment.pages = kept + fresh[borrowed:]
    write = Span(segment.key, segment.pages, begin, count, begin - segment.start)
    return Reservation(node, segment, begin, count, write, copies, fresh, dropped, before)


def _begun(tree: ContextTree, node: Node) -> None:
    """A segment was begun: a first one, where the node's tokens begin, stands on the rows above.

    Unless those were given back, which can only be if a row sees none but itself.  What the parent
    says does not count then: it may have lost count of rows that this node took over and gave back.
    """
    begin = node.kv_begin
    if len(node.segments) == 1 and begin <= node.alias_len:
        stands = node.parent is None or (begin > node.floor and spans(tree, node.parent, begin))
        node.floor = 0 if stands else begin


def _watched(node: Node, segment: Segment) -> bool:
    """True while a live child sees rows of this segment up to its end."""
    return any(
        child.alias_len <= segment.end and node.segment_at(child.alias_len) is segment
        for child in node.children.values()
    )


def _segment_at(node: Node | None, position: int) -> Segment | None:
    """The segment that holds row position - 1 for a child that begins at `position`.

    None if that row was given back.
    """
    while node is not None and position > 0:
        if (segment := node.segment_at(position)) is not None:
            return segment if segment.end >= position else None
        node = node.parent
    return None


def _adoptable(tree: ContextTree, node: Node, begin: int) -> bool:
    """True if the parent's partly filled last page can become the node's: nobody else wants it.

    Only a committed sole child may: the loser of a speculation must leave its trunk untouched.
    """
    parent = node.parent
    if parent is None or node.mode is not NodeMode.COMMIT or len(parent.children) != 1:
        return False
    if not parent.segments or parent.kv_end != begin or parent.line != node.line:
        return False
    if parent.segment_at(begin) is not parent.segments[-1]:
        return False  # the parent is growing behind the child's view
    return tree.pool.writable(parent.segments[-1].pages[-1])


def _adopt(tree: ContextTree, node: Node, begin: int, rest: int) -> Segment:
    """Take over the parent's last page with its `rest` rows."""
    parent = node.parent
    assert parent is not None
    tail = parent.segments[-1]
    page = tail.pages[-1]
    tail.pages = tail.pages[:-1]
    tail.end -= rest
    if not tail.pages:
        parent.segments.pop()
    taken = new_segment(begin - rest, [page], begin)
    node.segments.append(taken)
    _begun(tree, node)
    tree.epoch += 1
    return taken


def _freezes(tree: ContextTree, node: Node, begin: int, rest: int, count: int) -> bool:
    """Choose between sharing and copying the tail, for all children that fork at the same place."""
    size, policy, parent = tree.pool.page_size, tree.tail_policy, node.parent
    if node.segments or parent is None:  # growing past its own children: one more beside them
        lengths = [count, *(c.length - c.alias_len for c in node.children.values())]
        return choose_tail(rest, lengths, size, policy)
    siblings = [c for c in parent.children.values() if c.alias_len == node.alias_len]
    choice = parent.tail_choice
    if choice is None or choice[:2] != (node.alias_len, len(siblings)):
        lengths = [c.length - c.alias_len for c in siblings]
        freeze = choose_tail(rest, lengths, size, policy)
        parent.tail_choice = choice = (node.alias_len, len(siblings), freeze)
    return choice[2]
