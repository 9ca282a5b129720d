"""Threads that must not disturb: lower priority for work that nobody waits for."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["be_calm"]

# A thirtieth of a busy core, not less: such a thread takes the interpreter's lock now and then, and
# must get to the point of giving it back also on a machine that others keep busy.
_NICE = 15


def be_calm() -> None:
    """Lower the priority of the calling thread where threads have one of their own (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
