"""One connection to the catalog's database, its transactions, and who may write.

One connection a process, one lock; every write is one IMMEDIATE transaction, so that processes
queue up instead of failing half-way.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from forkserve.errors import StoreError
from forkserve.store import owner, schema
from forkserve.store.broken import advice, cannot_open
from forkserve.store.setback import Setback
from forkserve.store.statements import add_event, file_identity

__all__ = ["CatalogFault", "Role", "Transactions"]

Role = Literal["owner", "shared", "reader"]


class CatalogFault(StoreError):
    """The database could not be written or read: full, read-only, broken, or busy for too long."""


class Transactions:
    """The database of a directory, open in a role: see `Catalog`."""

    def __init__(
        self,
        folder: Path,
        role: Role = "shared",
        *,
        full_sync: bool = False,
        force: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.role = role
        self.now = now
        self.own: owner.Ownership | None = None
        self._lock = threading.RLock()
        self._db = schema.connect(folder, read_only=role == "reader", full_sync=full_sync)
        self._file = file_identity(folder / schema.FILE)
        self._pid = os.getpid()
        try:
            self._clock = Setback(self._db)
        except sqlite3.Error as error:
            self._db.close()
            raise cannot_open(folder / schema.FILE, error) from error
        if role == "owner":
            try:
                with self.write() as db:
                    own = owner.acquire(db, force=force)
                    if own.taken_from is not None:
                        taken = {"pid": own.taken_from, "epoch": own.epoch}
                        add_event(db, self.now(), "takeover", taken)
                self.own = own
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Give ownership back and close the file.  Idempotent; a forked child has neither."""
        if self.inherited:
            return
        with self._lock:
            if self.own is not None:
                try:
                    with self.write() as db:
                        owner.release(db, self.own)
                except (StoreError, sqlite3.Error):
                    owner.forget(self.own)  # the row stays, and the next one finds a dead owner
                self.own = None
            self._db.close()

    @property
    def inherited(self) -> bool:
        """True in a process that was forked from the one that opened this."""
        return os.getpid() != self._pid

    def _require_mine(self) -> None:
        """A connection of SQLite must not be used on both sides of a fork."""
        if self.inherited:
            raise StoreError(
                f"this store belongs to process {self._pid}; open one of your own after a fork"
            )

    def _busy(self) -> bool:
        """Whether a transaction is open; False once the file is closed."""
        try:
            return self._db.in_transaction
        except sqlite3.Error:
            return False

    @contextmanager
    def write(self, *, owned: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction; commits at the end of the block, rolls back on an error.

        owned: also check that this process still owns the sessions.  Raises CatalogFault when the
        database cannot be written, or is not the file any more that was opened (what SQLite writes
        to a deleted file is lost without an error); StoreError for a reader or after a take-over.
        """
        if self.role == "reader":
            raise StoreError("this store was opened for reading only")
        self._require_mine()
        with self._lock:
            if file_identity(self.folder / schema.FILE) != self._file:
                raise CatalogFault(
                    f"{self.folder / schema.FILE} was removed or replaced while it was open; "
                    "open the store again"
                )
            if self._busy():
                raise CatalogFault("the catalog cannot be written: a transaction is open already")
            try:
                self._db.execute("BEGIN IMMEDIATE")  # an interrupt may come right behind it
                if owned and self.own is not None:
                    owner.check(self._db, self.own)
                self._clock.look(self._db, self.now())
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._busy():
                    with suppress(sqlite3.Error):  # the device is gone: SQLite undoes it later
                        self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.IntegrityError):
                    raise
                if isinstance(error, sqlite3.Error):
                    raise CatalogFault(f"the catalog cannot be written: {error}") from error
                if isinstance(error, UnicodeEncodeError):
                    raise StoreError(f"{error.object!r} is no text: {error}") from None
                raise

    @contextmanager
    def moment(self) -> Iterator[None]:
        """All that is read in the block is of one moment, whatever other processes write.

        Raises CatalogFault.
        """
        self._require_mine()
        with self._lock:
            if self._busy():
                yield
                return
            try:
                self._db.execute("BEGIN")
                yield
            except sqlite3.Error as error:
                raise CatalogFault(f"the catalog cannot be read: {error}{advice(error)}") from error
            finally:
                if self._busy():
                    with suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")

    def read(
        self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Rows of one query.  Raises CatalogFault."""
        self._require_mine()
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise CatalogFault(f"the catalog cannot be read: {error}{advice(error)}") from error
            except UnicodeEncodeError as error:
                raise StoreError(f"{error.object!r} is no text: {error}") from None

    @contextmanager
    def locked(self) -> Iterator[sqlite3.Connection]:
        """The connection, for tools that read with sqlite-utils.  StoreError after a fork."""
        self._require_mine()
        with self._lock:
            yield self._db
