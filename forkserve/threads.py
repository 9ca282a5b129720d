"""Threads of the package's own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forkserve.errors import BackendError

__all__ = ["no_thread", "started"]


def started(target: Callable[[], object], name: str) -> threading.Thread:
    """A thread that runs `target`, and does not keep the interpreter alive.

    Raises BackendError where the system gives none.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(name, error) from error
    return thread


def no_thread(name: str, error: BaseException) -> BackendError:
    """What to raise where the system gives no thread."""
    return BackendError(
        f"no thread for '{name}' ({error}): {threading.active_count()} run in this process; "
        "raise the limit (ulimit -u, or the container's), or run fewer at once"
    )
