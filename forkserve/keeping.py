"""What a store's policy does on its own: keep what a session grows into, bring back what went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from forkserve.control.core import Core
from forkserve.control.generation import Generation
from forkserve.durable import Durable
from forkserve.errors import NodeError
from forkserve.tree.tree import committed
from forkserve.types import GREEDY, SamplingParams
from forkserve.warming import ready

if TYPE_CHECKING:
    from forkserve.store import Store

__all__ = ["Keeping"]

_CHUNK = 256  # tokens of a stored chunk: fewer missing rows are not in the catalog
_BEGINNINGS = 8192  # chunks of prompts that are counted; the least recent are forgotten


class Keeping(Durable):
    """The part of `Engine` that follows a store's policy."""

    def __init__(self, core: Core, store: Store | None) -> None:
        super().__init__(core, store)
        self._least = _CHUNK  # missing rows that are worth a look below the device's pages
        self._begun: OrderedDict[bytes, int] = OrderedDict()  # chain id -> sessions that began so
        self._kept: dict[str, int] = {}  # tokens of each session that the policy has published
        if store is not None:
            for budget in store.budgets.values():
                budget.recompute_ms = core.backend.predict_ms

    def start(
        self,
        session: str,
        max_tokens: int = 128,
        *,
        node: int | None = None,
        params: SamplingParams = GREEDY,
    ) -> Generation:
        """Begin a generation and return its handle: wait for it, iterate it, or cancel it.

        Rows that were evicted come back first, from the store if that is faster.  Without a
        background loop it advances while somebody waits on the engine.
        """
        self._touched(session, node)
        return super().start(session, max_tokens, node=node, params=params)

    def _touched(self, session: str, node: int | None) -> None:
        """Bring back what a node lacks, if that is enough to be worth a look.

        A name that is wrong is left to the verb.
        """
        if self.store is None:
            return
        with self._core.lock:
            tree = self._core.trees.get(session)
            target = None if tree is None else tree.tip if node is None else tree.nodes.get(node)
            if tree is None or target is None or not committed(target):
                return
            busy = (session, target.id) in self._core.tasks
            gone = target.length - ready(target)
        if busy or gone < self._least:
            return
        if gone >= _CHUNK:
            self._bring_back(tree, target)
        else:
            self._raise(tree, target, True)

    def _saved(self, session: str, *, now: bool = False) -> None:
        super()._saved(session, now=now)
        if now and self.store is not None and self.store.catalog.role != "reader":
            self._keep(self.store, session)

    def _keep(self, store: Store, session: str) -> None:
        """Publish, in the background, what the policy wants of a session after a verb."""
        from forkserve.store.identity import CHUNK_TOKENS

        with self._core.lock:
            tree = self._core.trees.get(session)
            if tree is None:
                self._kept.pop(session, None)
                return
            first, tip = session not in self._kept, tree.tip
            done = self._kept.setdefault(session, 0)
            whole = ready(tip) // CHUNK_TOKENS * CHUNK_TOKENS
            prompt = tree.root.tokens[:] if first else None
        if not store.policy.publish("commit", 0):
            if prompt is None:
                return
            whole = min(whole, self._hot(store, prompt, tree.salt))
        if whole > done:
            with suppress(NodeError):  # gone meanwhile
                if self._capture(tree, tip, None, 0.0, whole).accepted:
                    self._kept[session] = whole

    def _hot(self, store: Store, prompt: Sequence[int], salt: str) -> int:
        """Count a beginning; tokens of it that the policy wants to keep."""
        from forkserve.store.identity import plan_chain

        hot = 0
        for link in plan_chain(prompt, salt):
            seen = self._begun[link.id] = self._begun.pop(link.id, 0) + 1
            if store.policy.publish("open", seen):
                hot = link.start + link.count
        while len(self._begun) > _BEGINNINGS:
            self._begun.popitem(last=False)
        return hot
