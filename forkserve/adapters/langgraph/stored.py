"""Sessions that another process left in the engine's store: their refs name what they named."""

from __future__ import annotations

import logging

from forkserve.adapters.langgraph.registry import Live, Registry, Run
from forkserve.adapters.langgraph.state import Ref, checked
from forkserve.adapters.langgraph.turns import Turn, unfinished
from forkserve.errors import SessionError, StoreError
from forkserve.session import Session

__all__ = ["revive"]

_log = logging.getLogger(__name__)


def revive(registry: Registry, run: Run, ref: Ref, step: int | None) -> None:
    """Bring a ref's session back, if it is closed here and the engine's store has it.

    A session belongs to a thread; a run without one would end it, and leaves it alone.
    step: of the node in its graph; None inside a subgraph.
    """
    engine, name = registry.engine, checked(ref)["session"]
    if engine.store is None or run.thread is None:
        return
    with registry.lock:
        known = registry.sessions.get(name)
        if known is not None and not known.session.closed:
            return
        try:
            handle = engine.resume(name)
        except SessionError:  # another adapter has it open, or the store doesn't have it
            return
        except StoreError as error:
            _log.warning("session '%s' is not resumed: %s", name, error)
            return
        gen, seed = registry.next_gen()
        live = Live(Session(engine, handle), gen, run.home, seed)
        tree = engine.tree(name)
        live.stored = {node.id: node.length for node in tree}
        registry.sessions[name] = live
        registry.count["resumed"] += 1
        registry.touch(run, live)
        node = tree.nodes.get(ref["node"])
        if run.turn is None and node is not None and unfinished(tree, node, step):
            run.turn = Turn()
