"""Rows that come up again from host memory into pages, if that is faster than computing them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forkserve.control.core import Core
from forkserve.keeping import Keeping
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.warming import put_rows, ready

if TYPE_CHECKING:
    from forkserve.store import Store
    from forkserve.store.host import Prefixes
    from forkserve.store.identity import Link
    from forkserve.store.vault import Loaded

__all__ = ["Raising"]


class Raising(Keeping):
    """The part of `Engine` that brings rows back from the tier in memory."""

    def __init__(self, core: Core, store: Store | None) -> None:
        super().__init__(core, store)
        self._row_bytes = core.backend.info.kv_bytes_per_token
        self._rose: dict[str, float] = {}  # session -> when rows came back, on the real clock

    def _raise(self, tree: ContextTree, node: Node, press: bool) -> int:
        """Write what memory holds of a node's missing rows into pages; returns how many.

        The way is chosen once for all of them, and noted with both predictions.
        """
        from forkserve.store.decisions import choose
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
        end = store.memory.reach(prefixes, first)
        if end <= first:
            return 0
        size = (end - first) * self._row_bytes
        predicted = store.restorer.memory_cost.predict_ms(size)
        prefill = self._prefill_ms(first, end)
        worth, why = choose(store.restore, predicted, prefill)
        at, start = first, clock_ms()
        while worth and at < end and self._raise_piece(tree, node, prefixes, at, press):
            with core.lock:
                before, at = at, ready(node)
            if at <= before:
                break
        took = clock_ms() - start
        if at > first:
            self._rose[tree.session] = time.monotonic()
            store.restorer.memory_cost.observe((at - first) * self._row_bytes, took)
            store.meter.add("restored_tokens", at - first, tier="memory")
            store.meter.took("raise", took)
            with core.lock:
                core.count.cached_tokens += at - first
        journal = self._journal
        if journal is not None:
            reason = "memory" + "_always" * (why == "always")
            journal.decided(
                tree.session,
                node.id,
                "restore",
                "restored" if at > first else "computed",
                reason + "_no_room" * (worth and at < end),
                max(at - first, 0),
                prefill,
                predicted,
                took if worth else None,
            )
        return max(at - first, 0)

    def _raise_piece(
        self, tree: ContextTree, node: Node, prefixes: Prefixes, at: int, press: bool
    ) -> bool:
        """Bring back the piece that holds position `at`; False if none does, or it has no room."""
        from forkserve.store.host import begins

        store = self._require()
        assert store.memory is not None
        for low in begins(at):
            with store.memory.find(prefixes.at(low), prefixes.tokens(low, prefixes.count)) as hit:
                if hit is None or low + hit[1] <= at:
                    continue
                piece, high = hit[0], low + hit[1]
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
