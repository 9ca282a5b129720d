"""Write-behind: every stored chunk is brought to a further place, some time after.

What is still to be brought is a table (`outbox`), filled in the transaction that catalogues a
chunk, so that a restart goes on where the last process stopped.  A row goes with its receipt, the
replica row of the far place, which is written when that place has confirmed the object.  A place
that is away is asked again, later each time; the table is bounded, and what does not fit in is
counted and left to `WriteBehind.catch_up`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from forkserve.errors import BackendError, StoreError
from forkserve.store import faults, owner
from forkserve.store.catalog import CLAIM_S
from forkserve.store.chunks import ChunkFault
from forkserve.store.pace import Pace, breathe
from forkserve.store.vault import Vault
from forkserve.threads import started

__all__ = ["FIRST_S", "LONGEST_S", "Sent", "WriteBehind"]

_log = logging.getLogger(__name__)
FIRST_S = 0.5  # s before the second try; it doubles with each
LONGEST_S = 300.0
_POLL_S = 1.0  # how often an idle thread looks for what other processes have left


@dataclass(slots=True)
class Sent:
    """Totals of this process."""

    chunks: int = 0
    bytes: int = 0
    failed: int = 0
    last_error: str = ""


class WriteBehind:
    """Brings chunks from the first depot of a vault to `place`, in a thread of its own.

    limit: chunks that may wait.  on_failure: told of every try that failed.  pace: of the thread.
    """

    def __init__(
        self,
        vault: Vault,
        place: str,
        limit: int = 65_536,
        on_failure: Callable[[BaseException], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        if place not in vault.depots or limit < 1:
            raise StoreError(f"no depot for place '{place}', or no room in an outbox of {limit}")
        self.place = place
        self.sent = Sent()
        self._vault = vault
        self._limit = limit
        self._on_failure = on_failure
        self._pace = pace or Pace()
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        vault.catalog.behind = (place, limit)
        vault.stored = self.wake

    # ---------------------------------------------------------------- the queue

    def start(self) -> None:
        """Begin to send; also what an earlier process has left."""
        with self._starting:  # publishing threads call this, and whoever drains
            if self._thread is None and not self._stop:
                with suppress(BackendError):  # what waits is tried with the next chunk
                    self._thread = started(self._serve, "forkserve-behind")

    def wake(self) -> None:
        """There is something to send."""
        self.start()
        self._wake.set()

    def waiting(self) -> int:
        """Chunks without a receipt."""
        sql = "SELECT count(*) FROM outbox WHERE place = ?"
        return int(self._vault.catalog.read(sql, (self.place,))[0][0])

    def catch_up(self) -> int:
        """Queue every chunk that the far place lacks, as far as there is room; returns how many."""
        catalog = self._vault.catalog
        near = next(iter(self._vault.depots))
        with catalog.write() as db:
            (full,) = db.execute(
                "SELECT count(*) FROM outbox WHERE place = ?", (self.place,)
            ).fetchone()
            count = db.execute(
                "INSERT OR IGNORE INTO outbox (content, place, due_at, created_at)"
                " SELECT r.content, ?1, ?2, ?2 FROM replica AS r JOIN part AS p USING (content)"
                " JOIN chunk AS c ON c.id = p.chunk WHERE r.place = ?3 AND NOT EXISTS"
                " (SELECT 1 FROM replica AS f WHERE f.content = r.content AND f.place = ?1)"
                " ORDER BY c.start LIMIT ?4",
                (self.place, catalog.now(), near, max(self._limit - full, 0)),
            ).rowcount
        self.wake()
        return int(count)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until every chunk has its receipt; False when that takes longer."""
        end = time.monotonic() + timeout_s
        self.wake()
        while self.waiting():
            if time.monotonic() > end:
                return False
            self._wake.set()
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End the thread after the chunk in hand, or after a minute; the rest waits in the table.

        Idempotent.
        """
        with self._starting:
            self._stop = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join(60.0)

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        with self._pace.worker():
            self._send()

    def _send(self) -> None:
        while not self._stop:
            breathe()
            self._wake.clear()
            if self._stop:  # set before this cleared the call that came with it
                return
            try:
                pause = 0.0 if self.step() else self._pause()
            except (StoreError, sqlite3.Error) as error:  # the catalog is away: so are the rows
                self._failed(error)
                pause = _POLL_S
            if pause:
                self._wake.wait(pause)

    def step(self) -> bool:
        """Send one chunk that is due; False when none is.  Raises CatalogFault."""
        content = self._claim()
        if content is None:
            return False
        faults.reach("behind.taken")
        near = next(iter(self._vault.depots))
        try:
            size = self._vault.copy_one(content, near, self.place)
        except ChunkFault as fault:  # damaged here: it was set aside, and is computed again
            self._give_up(content, str(fault))
        except FileNotFoundError:
            self._give_up(content, "the file is gone")
        except (OSError, StoreError) as error:
            self._again(content, error)
            self._failed(error)
        else:
            self.sent.chunks += 1
            self.sent.bytes += size
        return True

    def _claim(self) -> str | None:
        """One due chunk, root side first, marked as ours for a while."""
        catalog = self._vault.catalog
        now = catalog.now()
        due = (
            "SELECT o.content, o.taken_by, o.taken_until FROM outbox AS o"
            " JOIN part AS p USING (content) JOIN chunk AS c ON c.id = p.chunk"
            # What is due after the longest pause was noted before the clock was set back.
            " WHERE o.place = ?1 AND (o.due_at <= ?2 OR o.due_at > ?2 + ?3)"
            " ORDER BY c.start, o.created_at LIMIT 64"
        )
        if not catalog.read(due, (self.place, now, LONGEST_S)):
            return None
        with catalog.write() as db:
            for content, holder, until in db.execute(due, (self.place, now, LONGEST_S)).fetchall():
                held = holder is not None and now < until <= now + CLAIM_S
                if held and not owner.is_dead(holder):
                    continue
                db.execute(
                    "UPDATE outbox SET taken_by = ?, taken_until = ?"
                    " WHERE content = ? AND place = ?",
                    (owner.who(), now + CLAIM_S, content, self.place),
                )
                return str(content)
        return None

    def _again(self, content: str, error: BaseException) -> None:
        """A later try: 0.5 s, 1 s, 2 s, ... , 5 min; chunks spread a little around that."""
        now = self._vault.catalog.now()
        spread = 0.75 + int(content[:4], 16) / 0xFFFF / 2
        with self._vault.catalog.write() as db:
            db.execute(
                "UPDATE outbox SET tries = tries + 1, taken_by = NULL, taken_until = NULL,"
                " error = ?, due_at = ? + ? * min(?, ? * (1 << min(tries, 20)))"
                " WHERE content = ? AND place = ?",
                (str(error)[:500], now, spread, LONGEST_S / 1.25, FIRST_S, content, self.place),
            )

    def _give_up(self, content: str, why: str) -> None:
        catalog = self._vault.catalog
        with catalog.write() as db:
            sql = "DELETE FROM outbox WHERE content = ? AND place = ?"
            waited = db.execute(sql, (content, self.place)).rowcount
        if waited:  # else it was collected meanwhile, and nothing is lost
            catalog.event("behind_lost", place=self.place, content=content, why=why)

    def _failed(self, error: BaseException) -> None:
        self.sent.failed += 1
        if str(error) != self.sent.last_error:  # once, not at every try
            _log.warning("write-behind to %s: %s", self.place, error)
            if self._on_failure is not None:
                self._on_failure(error)
        self.sent.last_error = str(error)

    def _pause(self) -> float:
        """Seconds until the next try is due; a look at the table now and then in any case."""
        rows: list[tuple[float | None]] = []
        with suppress(StoreError):
            sql = "SELECT min(due_at) FROM outbox WHERE place = ?"
            rows = self._vault.catalog.read(sql, (self.place,))
        due = rows[0][0] if rows else None
        if due is None:
            return _POLL_S
        return min(max(due - self._vault.catalog.now(), 0.02), _POLL_S)
