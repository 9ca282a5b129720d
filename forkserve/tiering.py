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
from collections.abc import Collection, Hashable
from functools import partial
from itertools import count, pairwise
from math import inf
from typing import TYPE_CHECKING

from forkserve.control.core import Core
from forkserve.control.pressure import active, evictable
from forkserve.control.retention import evict_rank
from forkserve.engine.protocol import Portable
from forkserve.keeping import Keeping
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree, committed
from forkserve.types import NodeMode
from forkserve.warming import hold, put_rows, read_range, ready

if TYPE_CHECKING:
    from forkserve.store import Store
    from forkserve.store.chunks import Buffer
    from forkserve.store.host import Piece, Prefixes
    from forkserve.store.identity import Link
    from forkserve.store.mover import Mover
    from forkserve.store.vault import Loaded

__all__ = ["Tiering"]

# rank, worth, -position, serial number, tree, node: the least goes first
_Idle = tuple[int, float, int, int, ContextTree, Node]
_CHUNK = 256  # tokens of a stored chunk: fewer missing rows are in memory or nowhere
_LOW = 0.9  # share of the device's budget that moving goes down to
_SETTLED_S = 0.25  # rows that came back stay at least this long: a verb is about to use them
_EARLY_MS = 20.0  # rows are back this long before a tool is expected to return, and the copy's time


class Tiering(Keeping):
    """The part of `Engine` that moves rows between tiers; without a memory tier it rests."""

    def __init__(self, core: Core, store: Store | None) -> None:
        super().__init__(core, store)
        self._mover: Mover | None = None
        self._serial = count()
        self._rose: dict[str, float] = {}  # session -> when rows came back, on the real clock
        if store is None or store.memory is None:
            return
        from forkserve.store.mover import Mover

        self._mover = Mover(core.clock, on_failure=store.failed)
        self._least = core.config.page_size  # the row of a token just sampled is no loss
        self._page_bytes = core.backend.info.kv_bytes_per_token * core.config.page_size
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
        from forkserve.store.host import Piece, Prefixes
        from forkserve.store.restore import clock_ms

        core, store = self._core, self._require()
        backend, memory = core.backend, store.memory
        assert isinstance(backend, Portable)
        assert memory is not None
        with core.lock:
            if core.trees.get(tree.session) is not tree or not node.live or core.pending:
                return False
            begin, end = node.kv_begin, node.kv_end
            if begin >= end:
                return True
            tokens = tree.tokens(node, 0, end)
            parts, pages = hold(core, tree, node, end, begin)
        start, whole, moved = clock_ms(), True, 0
        try:
            prefixes = Prefixes(tokens, tree.salt)
            for low, high in _cuts(begin, end):
                above, ids = prefixes.at(low), prefixes.tokens(low, high)
                if memory.has(above, ids):
                    continue
                rows = read_range(backend, parts, low, high)
                saved = self._prefill_ms(low, high)
                moved += len(rows)
                if not memory.put(Piece(above, prefixes.at(high), low, ids, rows, saved)):
                    whole = False
                    break
        finally:
            with core.lock:
                core.pool.unpin(pages)
                core.changed.notify_all()
        if moved:
            took = clock_ms() - start
            store.meter.add("moved_bytes", moved)
            store.meter.took("move", took)
            self._decided(tree, node, "move", "memory" if whole else "refused", end - begin, took)
        return whole

    def _decided(
        self, tree: ContextTree, node: Node, what: str, verdict: str, tokens: int, ms: float
    ) -> None:
        if self._journal is not None:
            reason = {"memory": "idle", "refused": "worth_less", "restored": "memory"}[verdict]
            begin = max(node.length - tokens, 0)
            gain = self._prefill_ms(begin, begin + tokens)
            cost = self._require().restorer.memory_cost.predict_ms(
                tokens * self.backend.info.kv_bytes_per_token
            )
            self._journal.decided(
                tree.session, node.id, what, verdict, reason, tokens, gain, cost, ms
            )

    # ---------------------------------------------------------------- up

    def _raise(self, tree: ContextTree, node: Node, press: bool) -> int:
        """Write what memory holds of a node's missing rows into pages; returns how many."""
        from forkserve.store.host import Prefixes
        from forkserve.store.restore import clock_ms

        store, core = self.store, self._core
        if store is None or store.memory is None or store.restore == "never":
            return 0
        with core.lock:
            if core.trees.get(tree.session) is not tree or not node.live:
                return 0
            self._rose = {s: at for s, at in self._rose.items() if s in core.trees}
            first = ready(node)
            if first >= node.length or not len(store.memory):
                return 0
            prefixes = Prefixes(tree.tokens(node), tree.salt)
        start, at = clock_ms(), first
        while self._raise_piece(tree, node, prefixes, at, press):
            with core.lock:
                before, at = at, ready(node)
            if at <= before:
                break
        if at > first:
            self._rose[tree.session] = time.monotonic()
            took = clock_ms() - start
            size = (at - first) * self.backend.info.kv_bytes_per_token
            store.restorer.memory_cost.observe(size, took)
            store.meter.add("restored_tokens", at - first, tier="memory")
            store.meter.took("raise", took)
            with core.lock:
                core.count.cached_tokens += at - first
            self._decided(tree, node, "restore", "restored", at - first, took)
        return max(at - first, 0)

    def _raise_piece(
        self, tree: ContextTree, node: Node, prefixes: Prefixes, at: int, press: bool
    ) -> bool:
        """Bring back the piece that holds position `at`; False if none does, or it has no room."""
        from forkserve.store.identity import CHUNK_TOKENS

        store = self._require()
        assert store.memory is not None
        length = len(prefixes.raw) // 4
        for low in dict.fromkeys((at, at // CHUNK_TOKENS * CHUNK_TOKENS)):
            if low >= length:
                continue
            with store.memory.find(prefixes.at(low), prefixes.tokens(low, length)) as hit:
                if hit is None or low + hit[1] <= at:
                    continue
                piece, high = hit[0], low + hit[1]
                size = len(piece.rows) // piece.count * (high - at)
                predicted = store.restorer.memory_cost.predict_ms(size)
                if store.restore == "auto" and predicted >= self._prefill_ms(at, high):
                    return False
                core, loop = self._core, self._loop
                self._rose[tree.session] = time.monotonic()
                return put_rows(core, loop, tree, node, piece.rows, low, high, press=press)
        return False

    def _loaded(self, link: Link, loaded: Loaded) -> None:
        """What came from afar stays in memory for the next one: the page cache does not hold it."""
        from forkserve.store.host import Piece

        store = self._require()
        if store.memory is not None and loaded.place != next(iter(store.vault.depots)):
            saved = self._prefill_ms(link.start, link.start + link.count)
            rows = loaded.payload
            store.memory.put(Piece(link.parent, link.id, link.start, link.tokens, rows, saved))

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


def _of(rows: dict[bytes, Buffer], link: Link, spare: list[bytearray]) -> Buffer:
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
