"""Bringing rows back: what is stored, whether that is worth it, and into the pages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forkserve.control.core import Core
from forkserve.engine.protocol import Portable
from forkserve.errors import SessionError, StoreError
from forkserve.speculating import Speculating
from forkserve.tree.node import Node
from forkserve.tree.spine import take_prefix
from forkserve.tree.tree import ContextTree
from forkserve.warming import Warmed, put_rows, ready

if TYPE_CHECKING:
    from forkserve.store import Store
    from forkserve.store.identity import Link
    from forkserve.store.journal import TreeJournal
    from forkserve.store.lookups import Found
    from forkserve.store.vault import Loaded

__all__ = ["Restoring"]


class Restoring(Speculating):
    """The part of `Engine` that reads from a store."""

    def __init__(self, core: Core, store: Store | None) -> None:
        super().__init__(core)
        self.store = store
        self._journal: TreeJournal | None = None
        self._unwatch: Callable[[], None] = lambda: None
        if store is None:
            return
        if not isinstance(core.backend, Portable):
            raise StoreError(
                f"the backend {core.backend.info.name} cannot give its KV away; open it without a "
                "store, or use the mock or the bundled engine"
            )
        self._print = store.identify(core.backend.identity)
        core.lent = store.publisher.relieve
        self._unwatch = store.pace.watch(partial(_passing, weakref.ref(core)))
        if store.catalog.role == "owner":
            self._journal = core.journal = store.journal(self._print, core.lock, core.meter.bill)

    def _require(self) -> Store:
        if self.store is None:
            raise StoreError("this engine has no store; give it one: Engine(backend, store='DIR')")
        return self.store

    def _require_open(self, tree: ContextTree, node: Node) -> None:
        """SessionError if another caller has closed the session.  Called under the lock."""
        if self._core.trees.get(tree.session) is not tree or not node.live:
            raise SessionError(f"session '{tree.session}' was closed meanwhile")

    def _raise(self, tree: ContextTree, node: Node, press: bool) -> int:
        """Rows brought back from host memory; see `forkserve.tiering`."""
        return 0

    def _loaded(self, link: Link, loaded: Loaded) -> None:
        """A chunk was brought back; see `forkserve.tiering`."""

    def _bring_back(self, tree: ContextTree, node: Node, *, press: bool = True) -> Warmed:
        """Restore missing rows if that is worth it, and note the decision.

        press: make room for them as for committed work; else free and cached pages have to do.
        Raises SessionError when the session is closed before that.
        """
        core = self._core
        with core.lock:
            self._require_open(tree, node)
            bare = tree.root.evicted
            if bare and self.config.prefix_index:
                core.count.cached_tokens += take_prefix(tree, core.index)
        raised = self._raise(tree, node, press)
        with core.lock:
            self._require_open(tree, node)
            length, begin = node.length, ready(node)
            tokens = tree.tokens(node)
        if begin >= length:
            if raised:
                return Warmed(raised, "restored", "memory")
            return Warmed(0, "resident", "no row is missing")
        try:
            warmed = self._weigh(tree, node, begin, length, tokens, press)
        except StoreError as error:  # a catalog that cannot be read must not stop anybody
            self._require().failed(error)
            warmed = Warmed(0, "computed", "store_failed")
        journal = self._journal
        if journal is not None and warmed.restore_ms is not None:
            journal.decided(
                tree.session,
                node.id,
                "restore",
                warmed.verdict,
                warmed.reason,
                warmed.tokens,
                warmed.prefill_ms,
                warmed.restore_ms,
                warmed.actual_ms,
            )
        if warmed.tokens:  # what stands behind the last whole chunk
            raised += self._raise(tree, node, press)
        if not raised:
            return warmed
        return replace(warmed, tokens=warmed.tokens + raised, verdict="restored")

    def _weigh(
        self,
        tree: ContextTree,
        node: Node,
        begin: int,
        length: int,
        tokens: Sequence[int],
        press: bool,
    ) -> Warmed:
        """Look up, predict both ways, and restore when that is the shorter one."""
        from forkserve.store.decisions import choose
        from forkserve.store.identity import plan_chain
        from forkserve.store.lease import lease

        store = self._require()
        found = store.vault.find(self._print, plan_chain(tokens, tree.salt))
        found = [f for f in found if f.link.start + f.link.count > begin]
        if not found:
            store.meter.add("computed_tokens", length - begin, reason="not_stored")
            return Warmed(0, "computed", "not_stored")
        end = found[-1].link.start + found[-1].link.count
        size = sum(f.bytes for f in found)
        plan = Warmed(
            0,
            "computed",
            "faster",
            store.restorer.cost.predict_ms(size),
            self._prefill_ms(begin, end),
        )
        assert plan.restore_ms is not None
        assert plan.prefill_ms is not None
        worth, reason = choose(store.restore, plan.restore_ms, plan.prefill_ms)
        plan = replace(plan, reason=reason)
        if not worth:
            store.meter.add("computed_tokens", end - begin, reason=reason)
            return plan
        with lease(store.catalog, [found[-1].link.id.hex()]):
            return self._fetch(tree, node, begin, found, plan, press)

    def _fetch(
        self,
        tree: ContextTree,
        node: Node,
        begin: int,
        found: list[Found],
        plan: Warmed,
        press: bool,
    ) -> Warmed:
        """Verified chunks into pages, up to the first bad one; the rest is computed as ever."""
        from forkserve.store.restore import clock_ms

        store, core, start = self._require(), self._core, clock_ms()
        reason, size, used = plan.reason, 0, []
        forced = "always_" if reason == "always" else ""
        for loaded in store.restorer.fetch(found):
            link = loaded.found.link
            low, high = link.start, link.start + link.count
            if not put_rows(core, self._loop, tree, node, loaded.payload, low, high, press=press):
                reason = f"{forced}no_room"
                break
            self._loaded(link, loaded)
            size += len(loaded.payload)
            used.append(loaded.found.chunk)
            store.meter.add("restored_tokens", link.count, tier=loaded.place)
        else:
            if len(used) < len(found):
                reason = f"{forced}damaged"
        took = clock_ms() - start
        store.restorer.cost.observe(size, took)
        store.meter.took("restore", took)
        if used and store.catalog.role != "reader":
            with suppress(StoreError):
                store.catalog.touch(used)
        with core.lock:
            rows = max(ready(node) - begin, 0)
            core.count.cached_tokens += rows
        verdict = replace(plan, tokens=rows, reason=reason, actual_ms=took)
        return replace(verdict, verdict="restored") if rows else verdict

    def _prefill_ms(self, begin: int, end: int) -> float:
        """Predicted time to compute rows [begin, end), chunk by chunk."""
        step, predict = self.config.prefill_chunk, self.backend.predict_ms
        return sum(predict(min(step, end - at), at) for at in range(begin, end, step))


def _passing(core: weakref.ref[Core]) -> bool:
    """Whether passes run; a store must not keep an engine that was dropped."""
    here = core()
    return here is not None and here.passing()
