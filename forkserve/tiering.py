"""Rows between the device's pages and host memory: down while nobody needs them, up before they do.

Copying down is work of a thread of its own behind a bounded queue; a verb only ever offers it.  A
node's pages are given back when the device's budget asks for it, when its time to live is over or
when pages run out, and by then the copy has usually been made.  Coming up is part of the verb that
needs the rows, or happens ahead of it: when a tool is about to return, and when a fork or a guess
shows that a session goes on.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections.abc import Collection, Hashable
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from math import inf
from typing import TYPE_CHECKING

from forkserve.control.core import Core
from forkserve.control.loop import Loop
from forkserve.control.pressure import active, evictable
from forkserve.control.retention import evict_rank
from forkserve.engine.protocol import Portable
from forkserve.errors import SessionError
from forkserve.raising import Raising
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree, committed
from forkserve.types import NodeMode
from forkserve.warming import hold, read_range, ready

if TYPE_CHECKING:
    from forkserve.store import Store
    from forkserve.store.chunks import Buffer
    from forkserve.store.host import Piece, Weighed
    from forkserve.store.identity import Link
    from forkserve.store.mover import Mover
    from forkserve.store.publish import Publisher

__all__ = ["Tiering"]

# rank, worth, -position, serial number, tree, node: the least goes first
_Idle = tuple[int, float, int, int, ContextTree, Node]
_CHUNK = 256  # tokens of a stored chunk: fewer missing rows are in memory or nowhere
_LOW = 0.9  # share of the device's budget that moving goes down to
_SETTLED_S = 0.25  # rows that came back stay at least this long: a verb is about to use them
_EARLY_MS = 20.0  # rows are back this long before a tool is expected to return, and the copy's time


class Tiering(Raising):
    """The part of `Engine` that moves rows between tiers; without a memory tier it rests."""

    def __init__(self, core: Core, store: Store | None) -> None:
        super().__init__(core, store)
        self._mover: Mover | None = None
        self._serial = count()
        if store is None or store.memory is None:
            return
        from forkserve.store.mover import Mover

        loop = weakref.ref(self._loop)
        store.memory.serve(self._print.digest, partial(_runs, loop))
        self._mover = Mover(core.clock, on_failure=store.failed, pace=store.pace)
        core.lent = partial(_relieve, store.publisher, self._mover)
        self._least = core.config.page_size  # the row of a token just sampled is no loss
        self._page_bytes = self._row_bytes * core.config.page_size
        store.memory.on_evicted = partial(self._spill, store)
        store.moving = lambda: self._mover.queued if self._mover is not None else 0

    def settle_tiers(self, timeout_s: float = 60.0) -> bool:
        """Wait until nothing is queued to move; False when that takes longer.  For tools and tests:
        no verb needs it."""
        if self._mover is None:
            return True
        self._balance()
        return self._mover.drain(timeout_s)

    # ---------------------------------------------------------------- hooks of the verbs

    def _saved(self, session: str, *, now: bool = False) -> None:
        super()._saved(session, now=now)
        self._balance()

    def _closing(self) -> None:
        self._unwatch()
        if self._mover is not None:
            self._mover.close()

    def _idled(self, tree: ContextTree, node: Node, tool_s: float) -> None:
        """Copy an idle path down at once, so that its pages cost nothing to give back; have it back
        when the tool is expected to return."""
        if self._mover is None or self.store is None:
            return
        size = node.length * self.backend.info.kv_bytes_per_token
        back_ms = self.store.restorer.memory_cost.predict_ms(size) + _EARLY_MS
        if tool_s * 1e3 <= 2 * back_ms:
            return  # over before it has paid
        self._mover.offer(("copy", tree.session, node.id), partial(self._copy_path, tree, node))
        due = self._core.clock.now_ms() + tool_s * 1e3 - back_ms
        self._mover.at(due, _wake(tree, node), partial(self._prefetch, tree, node))

    def _expected(self, tree: ContextTree, node: Node) -> None:
        if self._mover is None or not committed(node):
            return
        gone = node.length - ready(node)
        if gone >= self._least and (tree.session, node.id) not in self._core.tasks:
            self._mover.offer(_wake(tree, node), partial(self._prefetch, tree, node))

    def _prefetch(self, tree: ContextTree, node: Node) -> None:
        """Bring rows back into free and cached pages, unless somebody computes them already."""
        core = self._core
        with core.lock:
            here = core.trees.get(tree.session) is tree and node.live and committed(node)
            busy = (tree.session, node.id) in core.tasks or bool(core.pending)
            gone = node.length - ready(node) if here else 0
        if busy or gone < self._least:
            return
        with suppress(SessionError):  # closed meanwhile: no failure, nobody waits
            if gone >= _CHUNK:
                self._bring_back(tree, node, press=False)
            else:
                self._raise(tree, node, False)

    # ---------------------------------------------------------------- down

    def _balance(self) -> None:
        """Offer to move idle rows down if the device holds more than its budget."""
        if self._mover is not None and self._over() > 0:
            self._mover.offer("balance", self._move_down)

    def _over(self, share: float = 1.0) -> int:
        """Pages that the device holds beyond its budget (or a share of it)."""
        limit = self.store.device_bytes if self.store is not None else None
        if limit is None:
            return 0
        return self._core.pool.live_pages - int(limit * share) // self._page_bytes

    def _move_down(self) -> None:
        """Give pages back until the device is within its budget: cached ones, then idle rows.

        The lock is held for one tree, or for one node's pages, at a time.
        """
        core = self._core
        if self._over() <= 0:
            return
        heap: list[_Idle] = []
        for tree in list(core.trees.values()):
            with core.lock:
                busy = active(core.tasks.values())
                heap += [self._idle(tree, n) for n in tree if self._may_go(tree, n, busy)]
        heapq.heapify(heap)
        while True:
            with core.lock:
                core.index.reclaim(max(self._over(_LOW), 0))
            if self._over(_LOW) <= 0 or not heap:
                return
            tree, node = heapq.heappop(heap)[-2:]
            seen = node.used_ms
            copied = self._copy(tree, node)
            with core.lock:
                self._loop.quiesce(tree.session)
                busy = active(core.tasks.values())
                if node.used_ms != seen or not self._may_go(tree, node, busy):
                    continue
                core.drop_rows(tree, node, "device_budget" if copied else "device_budget_no_memory")
                core.changed.notify_all()
                above = node.parent
                if above is not None and self._may_go(tree, above, busy):
                    heapq.heappush(heap, self._idle(tree, above))

    def _idle(self, tree: ContextTree, node: Node) -> _Idle:
        """An entry of the heap: what waits for a tool first, then what is worth least."""
        from forkserve.store.policies import Held

        core = self._core
        begin, rows = node.kv_begin, node.kv_end - node.kv_begin
        saved = self._prefill_ms(begin, begin + rows)
        size = core.pool.pages_for(rows) * self._page_bytes
        idle_s = max(core.clock.now_ms() - node.used_ms, 0.0) / 1e3
        live = node.mode is NodeMode.COMMIT
        worth = self._require().policy.value(Held("", begin, rows, size, saved, 0, idle_s, live))
        rank = -int(evict_rank(node.mode, 0))
        return rank, worth, -begin, next(self._serial), tree, node

    def _may_go(self, tree: ContextTree, node: Node, busy: Collection[Node]) -> bool:
        """True if a committed node has rows that nobody needs now or in a moment."""
        core, mover = self._core, self._mover
        if core.trees.get(tree.session) is not tree or not node.live or not node.segments:
            return False
        if not committed(node) or not evictable(node, busy):
            return False
        if (tree.session, node.id) in core.tasks:
            return False
        if time.monotonic() - self._rose.get(tree.session, -inf) < _SETTLED_S:
            return False
        due = mover.due(_wake(tree, node)) if mover is not None else None
        return due is None or due - core.clock.now_ms() > 2 * _EARLY_MS

    def _copy_path(self, tree: ContextTree, node: Node) -> None:
        """Copy what a path holds in pages, root side first: a trunk serves more than its tip."""
        for member in [*list(node.ancestors())[::-1], node]:
            if committed(member):
                self._copy(tree, member)

    def _copy(self, tree: ContextTree, node: Node) -> bool:
        """Copy a node's own rows to memory, piece by piece; True if all of them are there now."""
        from forkserve.store.host import Piece, Prefixes, Weighed
        from forkserve.store.pace import breathe
        from forkserve.store.restore import clock_ms

        core, store = self._core, self._require()
        backend, memory, mover = core.backend, store.memory, self._mover
        assert isinstance(backend, Portable)
        assert memory is not None
        assert mover is not None
        with core.lock:
            if core.trees.get(tree.session) is not tree or not node.live or core.pending:
                return False
            begin, end = node.kv_begin, node.kv_end
            if begin >= end:
                return True
            tokens = tree.tokens(node, 0, end)
            parts, pages = hold(core, tree, node, end, begin)
            mover.holding += 1
        start, whole, moved, closest = clock_ms(), True, 0, Weighed(True)
        try:
            prefixes = Prefixes(tokens, tree.salt)
            for low, high in _cuts(begin, end):
                above, ids = prefixes.at(low), prefixes.tokens(low, high)
                if memory.has(above, ids):
                    continue
                rows = read_range(backend, parts, low, high, self._row_bytes, rest=breathe)
                saved = self._prefill_ms(low, high)
                moved += len(rows)
                piece = Piece(above, prefixes.at(high), low, ids, rows, saved)
                weighed = memory.offer(piece)
                if moved == len(rows) or weighed.against is not None or not weighed.taken:
                    closest = weighed  # the last one for which something else had to go
                if not weighed.taken:
                    whole = False
                    break
                breathe()
        finally:
            with core.lock:
                mover.holding -= 1
                core.pool.unpin(pages)
                core.changed.notify_all()
        if moved:
            took = clock_ms() - start
            store.meter.add("moved_bytes", moved)
            store.meter.took("move", took)
            self._moved(tree, node, begin, end, closest, took)
        return whole

    def _moved(
        self, tree: ContextTree, node: Node, begin: int, end: int, closest: Weighed, ms: float
    ) -> None:
        """Note what became of a copy of rows [begin, end)."""
        if self._journal is None:
            return
        reason = "idle"
        if not closest.taken:
            reason = "worth_less" if closest.against is not None else "too_large"
        self._journal.decided(
            tree.session,
            node.id,
            "move",
            "memory" if closest.taken else "refused",
            reason,
            end - begin,
            self._prefill_ms(begin, end),
            self._require().restorer.memory_cost.predict_ms((end - begin) * self._row_bytes),
            ms,
            closest.worth,
            closest.against,
        )

    # ---------------------------------------------------------------- further down

    def _spill(self, store: Store, gone: list[Piece]) -> None:
        """Whole chunks that leave memory go to the disk, if the publish queue has room."""
        from forkserve.store.publish import Capture

        assert store.memory is not None
        size = sum(len(p.rows) for p in gone)
        store.meter.add("evicted_bytes", size, tier="memory", reason="budget")
        if store.catalog.role == "reader":
            return
        done: set[bytes] = set()
        for piece in sorted(gone, key=lambda p: -p.start):
            if piece.below in done or piece.link is None:
                continue
            line = [*store.memory.line(piece)]
            done.update(p.below for p in line)
            links = {p.link.id: p for p in line if p.link is not None}
            if len(links) < len(line) or line[0].start:
                continue  # its beginning is not here: alone it would be of no use
            chain = [p.link for p in line if p.link is not None]
            rows = {key: p.rows for key, p in links.items()}
            store.publisher.offer(Capture(self._print, chain, partial(_of, rows), lambda: None))


def _runs(loop: weakref.ref[Loop]) -> bool:
    """Whether an engine is there and not shut down; a store must not keep one that was dropped."""
    here = loop()
    return here is not None and not here.stopped


def _relieve(publisher: Publisher, mover: Mover) -> bool:
    """Ask for pages that are held for reading; True while some still are."""
    return any([publisher.relieve(), mover.relieve()])


def _of(rows: dict[bytes, Buffer], link: Link, spare: list[memoryview]) -> Buffer:
    """Rows of memory; they are not to be filled again."""
    return rows[link.id]


def _wake(tree: ContextTree, node: Node) -> Hashable:
    return ("wake", tree.session, node.id)


def _cuts(begin: int, end: int) -> list[tuple[int, int]]:
    """[begin, end) cut at multiples of a chunk."""
    from forkserve.store.identity import CHUNK_TOKENS

    inner = range(begin // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS, end, CHUNK_TOKENS)
    edges = [begin, *inner, end]
    return list(pairwise(edges))
