"""The callback handler that knows when a run begins, pauses and ends."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent

from forkserve.adapters.langgraph import turns
from forkserve.adapters.langgraph.registry import Registry, Run

__all__ = ["Sweeper"]


class Sweeper(GraphCallbackHandler):
    """Follows the tree of callback runs from its roots.

    A root is a run whose parent this handler has not seen: the bound graph, also inside a larger
    chain.  Entries go when their run ends, and all of a root's when the root ends.
    """

    run_inline = True  # in the event loop's thread too: a node must find its run
    raise_error = False

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self.runs: dict[UUID, Run] = {}
        self._members: dict[str, set[UUID]] = {}  # ids below each root

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A graph, a node, or something inside a node begins."""
        with self._lock:
            if run_id in self.runs:
                return
            known = metadata or {}
            run = self.runs.get(parent_run_id) if parent_run_id is not None else None
            if run is None:
                thread = known.get("thread_id")
                run = Run(str(run_id), str(thread) if thread is not None else None)
                self._members[run.key] = set()
            self.runs[run_id] = run
            self._members[run.key].add(run_id)
        if str(run_id) == run.key or "langgraph_node" not in known:  # also inside a chain
            turns.told(self._registry, run, inputs, known)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It ended, or paused."""
        self._end(run_id, failed=False)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It failed, was cancelled, or its stream was dropped."""
        self._end(run_id, failed=True)

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """The graph pauses; its run is about to end, and may be resumed."""
        with self._lock:
            run = self.runs.get(event.run_id) if event.run_id is not None else None
            if run is not None:
                run.interrupted = True

    def on_resume(self, event: GraphResumeEvent) -> None:
        """The graph goes on, also one inside another that is not ours: it is given its state."""
        with self._lock:
            run = self.runs.get(event.run_id) if event.run_id is not None else None
        if run is not None and run.key == str(event.run_id):
            turns.resumed(self._registry, run, "|".join(event.checkpoint_ns))

    def _end(self, run_id: UUID, *, failed: bool) -> None:
        with self._lock:
            run = self.runs.pop(run_id, None)
            if run is None:
                return
            members = self._members.get(run.key, set())
            members.discard(run_id)
            if run.key != str(run_id):
                return
            for member in members:
                self.runs.pop(member, None)
            self._members.pop(run.key, None)
        self._registry.finish(run, failed=failed)
