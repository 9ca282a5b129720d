"""What another process left: the thread's checkpoint, and its sessions in the engine's store.

Both are read before a node gets its branch, which may take a while; a coroutine has it done in a
thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from forkserve.adapters.langgraph import turns
from forkserve.adapters.langgraph.registry import Live, Registry, Run, prefix
from forkserve.adapters.langgraph.state import Ref, checked
from forkserve.errors import SessionError, StoreError
from forkserve.session import Session

__all__ = ["close_runs", "close_thread", "look", "may_wait"]

_log = logging.getLogger(__name__)


def may_wait(registry: Registry, run: Run) -> bool:
    """Whether a node's branch may need a database: to look, to open, or to write it down."""
    return registry.engine.store is not None or _asks(run)


def look(registry: Registry, run: Run, ref: Ref | None, saver: Any) -> None:
    """Find out, once, whether the run's turn waits; bring a ref's session back if it is stored.

    saver: None to leave the first to others.  Nodes of one thread look one after the other; nobody
    else waits for them.
    """
    if run.thread is None:  # a session belongs to a thread; a run without one would end it
        return
    name = checked(ref)["session"] if ref is not None else None
    ask = saver is not None and _asks(run)
    if ask or (name is not None and _absent(registry, name)):
        with registry.door(run.home):
            if ask and not run.asked:
                run.waits, run.asked = _waiting(run, saver), True
            if name is not None and _absent(registry, name):
                _revive(registry, run, name)


def _asks(run: Run) -> bool:
    return run.resumes is not None and run.thread is not None and not run.asked


def _waiting(run: Run, saver: Any) -> turns.Place | None:
    """Asks the checkpoint that the run began with.  What the run itself saves may not be there."""
    where = {"thread_id": run.thread, "checkpoint_ns": run.resumes}
    if run.checkpoint is not None:
        where["checkpoint_id"] = run.checkpoint
    try:
        found = saver.get_tuple({"configurable": where})
    except NotImplementedError:  # a saver for coroutines alone, and a node that is none
        _log.warning(
            "%s cannot be read by a node that is no coroutine, so an input that thread '%s' was "
            "given and no node has seen is not rendered: decorate coroutines",
            type(saver).__name__,
            run.thread,
        )
        return None
    return turns.waiting(found.checkpoint) if found is not None else None


def _absent(registry: Registry, name: str) -> bool:
    """Whether a session is not open here, and may be stored."""
    if registry.engine.store is None:
        return False
    with registry.lock:
        known = registry.sessions.get(name)
        return known is None or known.session.closed


def _revive(registry: Registry, run: Run, name: str) -> None:
    engine = registry.engine
    try:
        handle = engine.resume(name)
    except SessionError:  # another adapter has it open, or the store doesn't have it
        return
    except StoreError as error:
        _log.warning("session '%s' is not resumed: %s", name, error)
        return
    tree = engine.tree(name)
    with registry.lock:
        gen, seed = registry.next_gen()
        live = Live(Session(engine, handle), gen, run.home, seed)
        live.stored = {node.id: node.length for node in tree}
        registry.sessions[name] = live
        registry.count["resumed"] += 1
        if not run.ended:  # else it stays open for the thread's next run
            registry.touch(run, live)


# ---------------------------------------------------------------- what nobody resumes


def close_runs(registry: Registry) -> None:
    """Close stored sessions of runs without a thread, which a killed process has left open."""
    with suppress(StoreError):
        _close(registry, None)


def close_thread(registry: Registry, thread: str) -> int:
    """Close the sessions of a thread, open here or stored; returns how many."""
    with registry.door(f"thread:{thread}"):  # none is opened or brought back meanwhile
        return registry.forget_thread(thread) + _close(registry, thread)


def _close(registry: Registry, thread: str | None) -> int:
    store = registry.engine.store
    if store is None or store.catalog.role != "owner":
        return 0
    from forkserve.store.records import close_sessions

    return close_sessions(store.catalog, prefix(thread), registry.engine.sessions)
