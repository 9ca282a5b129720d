"""The KV rows that a session holds at this moment."""

from __future__ import annotations

from typing import Any, cast

from forkserve import Engine
from forkserve.tree.rows import spans
from forkserve.warming import ready


def resident_rows(eng: Engine, session: str) -> tuple[int, bytes]:
    """How many rows of a session's tip exist without a hole, and these.

    Under the engine's lock, after the copies that are still to run: above a budget, rows move down
    in the background.
    """
    tree, backend, core = eng.tree(session), cast(Any, eng.backend), eng._core
    while True:
        with core.lock:
            if not core.pending:
                upto = ready(tree.tip)
                parts = spans(tree, tree.tip, upto) if upto else ()
                return upto, bytes(backend.read_rows(parts)) if parts else b""
        eng._loop.run_until(lambda: not core.pending)
