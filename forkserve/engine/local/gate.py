"""What is used by several threads is freed when the last of them has left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forkserve.errors import BackendError

__all__ = ["Gate"]


class Gate:
    """``with gate:`` around every use of memory that `free` gives back.

    After `close` nobody enters any more (`BackendError`); `free` runs as soon as nobody is inside.
    `close` itself never waits, so a signal handler may call it in the middle of a pass.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        self._free: Callable[[], None] | None = free
        self._inside = 0
        self._closed = False
        self._lock = threading.RLock()  # that handler may come while its own thread is in here

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise BackendError("this backend is closed")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            self._settle()

    def close(self) -> None:
        """Let nobody in any more.  Idempotent."""
        with self._lock:
            self._closed = True
            self._settle()

    def _settle(self) -> None:
        if self._closed and not self._inside and self._free is not None:
            free, self._free = self._free, None
            free()
