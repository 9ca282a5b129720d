"""One process may write the sessions of a store: who it is, whether it lives, and taking over.

A process is named by its pid, when it started, and the boot and pid namespace it runs in, so that a
reused pid is not taken for the owner.  Every take-over raises the epoch; each write checks it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from forkserve.errors import StoreError

__all__ = ["Ownership", "acquire", "check", "forget", "is_dead", "release", "state", "who"]

_mine: set[str] = set()  # tokens of the owners that live in this process


@dataclass(frozen=True, slots=True)
class Ownership:
    """Proof of ownership: valid while the row holds this token."""

    token: str
    epoch: int
    taken_from: int | None  # pid of a dead owner that was replaced


def acquire(db: sqlite3.Connection, *, force: bool = False) -> Ownership:
    """Take the owner row; call inside a transaction.

    force: take it from a process whose life cannot be checked from here (another host or pid
    namespace).  Raises StoreError while another living engine owns the store.
    """
    row = db.execute("SELECT token, pid, boot, started, epoch, released FROM owner").fetchone()
    epoch, taken = 1, None
    if row is not None:
        token, pid, boot, started, last, released = row
        epoch = last + 1
        if not released:
            seen = state(pid, boot, started, token)
            if seen == "alive" or (seen == "unknown" and not force):
                raise StoreError(_refusal(pid, last, seen))
            taken = pid
    made = Ownership(uuid.uuid4().hex, epoch, taken)
    db.execute(
        "INSERT OR REPLACE INTO owner (one, token, pid, boot, started, epoch, since, released)"
        " VALUES (1, ?, ?, ?, ?, ?, ?, 0)",
        (made.token, os.getpid(), _boot(), _started(os.getpid()), epoch, time.time()),
    )
    _mine.add(made.token)
    return made


def check(db: sqlite3.Connection, own: Ownership) -> None:
    """Raise StoreError if somebody else took over; call inside the transaction that writes."""
    row = db.execute("SELECT token, pid FROM owner").fetchone()
    if row is None or row[0] != own.token:
        raise StoreError(
            f"the store was taken over by process {row[1] if row else '?'}: "
            f"this engine (epoch {own.epoch}) may not write its sessions any more"
        )


def release(db: sqlite3.Connection, own: Ownership) -> None:
    """Give the row back; does nothing when it was taken over."""
    db.execute("UPDATE owner SET released = 1 WHERE token = ?", (own.token,))
    _mine.discard(own.token)


def forget(own: Ownership) -> None:
    """The engine ends without being able to write: this process no longer counts as alive."""
    _mine.discard(own.token)


def who() -> str:
    """This process, in a form that `is_dead` understands later, in any process."""
    return json.dumps([os.getpid(), _boot(), _started(os.getpid())])


def is_dead(holder: str) -> bool:
    """True if the process that `who` named has certainly ended; False if that can't be known."""
    try:
        pid, boot, started = json.loads(holder)
        return state(int(pid), str(boot), str(started)) == "dead"
    except (ValueError, TypeError):
        return True


def state(pid: int, boot: str, started: str, token: str | None = None) -> str:
    """alive, dead, or unknown (a process this one can't see).

    token: also ask whether that owner of this very process has been forgotten.
    """
    here = _boot()
    if boot.split("/", maxsplit=1)[0] != here.split("/")[0]:
        # Another boot of this machine is dead.  Without a boot id it may be another machine.
        return "dead" if here and boot else "unknown"
    if boot != here:
        return "unknown"
    if pid == os.getpid() and started == _started(pid):
        return "alive" if token is None or token in _mine else "dead"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass
    return "alive" if _started(pid) == started else "dead"


def _refusal(pid: int, epoch: int, seen: str) -> str:
    if seen == "alive":
        return (
            f"the store is in use by process {pid} (epoch {epoch}); close it there, or open this "
            "one with role='shared' or role='reader'"
        )
    return (
        f"the store belongs to process {pid} of another container or machine, whose life cannot "
        "be checked from here; make sure that it has ended, then open with force=True"
    )


def _boot() -> str:
    """Identity of this boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: the host's name is the best there is
        return f"{sys.platform}-{os.uname().nodename}" if hasattr(os, "uname") else sys.platform


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" for a zombie or where it can't be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
