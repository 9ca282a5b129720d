"""The catalog: which chunks exist, where their bytes lie, and what happened.

Plain SQLite.  One connection a process, one lock; every write is one IMMEDIATE transaction, so that
processes queue up instead of failing half-way.  Tensor bytes never enter the database.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EBUSY
from pathlib import Path
from typing import Any, Literal

from forkserve.errors import StoreError
from forkserve.store import owner, schema
from forkserve.store.broken import advice, cannot_open
from forkserve.store.chunks import Header
from forkserve.store.identity import Fingerprint, Link
from forkserve.store.lookups import LOOKUP, Found, choose, fitting
from forkserve.store.setback import Setback
from forkserve.store.statements import add_count, add_event, file_identity, require_equal

__all__ = ["CLAIM_S", "INTENT", "Catalog", "CatalogFault", "Role", "doomed"]

Role = Literal["owner", "shared", "reader"]


class CatalogFault(StoreError):
    """The database could not be written or read: full, read-only, broken, or busy for too long."""


INTENT = 1e18  # `due_at` of an outbox row that stands for a copy under way, not for a queued one
CLAIM_S = 120.0  # s that a process may take to copy one chunk


def doomed(content: str, place: str) -> str:
    """What a lease holds while an object of a further place is deleted (`collect`)."""
    return f"delete {content} in {place}"


_FINGERPRINT = "SELECT id, fields FROM fingerprint WHERE digest = ?"


class Catalog:
    """Open the catalog of a directory.

    role: "owner" may write sessions and is alone in that; "shared" writes chunks, names and pins
    beside others; "reader" writes nothing.  full_sync: survive a power cut, not only a crash of the
    process, at the price of a sync per transaction.  now: wall clock in seconds.

    Raises StoreError: foreign, corrupt, newer or owned by a living process.
    """

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
        # A further place that every new chunk is to reach, and how many may wait for it.
        self.behind: tuple[str, int] | None = None
        self._lock = threading.RLock()
        self._db = schema.connect(folder, read_only=role == "reader", full_sync=full_sync)
        self._file = file_identity(folder / schema.FILE)
        self._pid = os.getpid()
        self._prints: dict[bytes, int] = {}
        try:
            self._clock = Setback(self._db)
        except sqlite3.Error as error:
            self._db.close()
            raise cannot_open(folder / schema.FILE, error) from error
        if role == "owner":
            try:
                with self.write() as db:
                    self.own = owner.acquire(db, force=force)
            except BaseException:
                self._db.close()
                raise
            if self.own.taken_from is not None:
                self.event("takeover", pid=self.own.taken_from, epoch=self.own.epoch)

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

    # ---------------------------------------------------------------- transactions

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
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                raise CatalogFault(f"the catalog cannot be written: {error}") from error
            try:
                if owned and self.own is not None:
                    owner.check(self._db, self.own)
                self._clock.look(self._db, self.now())
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    with suppress(sqlite3.Error):  # the device is gone: SQLite undoes it later
                        self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.IntegrityError):
                    raise
                if isinstance(error, sqlite3.Error):
                    raise CatalogFault(f"the catalog cannot be written: {error}") from error
                if isinstance(error, UnicodeEncodeError):
                    raise StoreError(f"{error.object!r} is no text: {error}") from None
                raise

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

    # ---------------------------------------------------------------- chunks

    def fingerprint(self, db: sqlite3.Connection, made: Fingerprint) -> int:
        """Row id of a fingerprint; written on first use.  StoreError: see `known_fingerprint`."""
        known = self._prints.get(made.digest)
        if known is not None:
            return known
        row = db.execute(_FINGERPRINT, (made.digest.hex(),)).fetchone()
        if row is not None:
            require_equal(made, row[1])
        else:
            row = db.execute(
                "INSERT INTO fingerprint (digest, fields, created_at) VALUES (?, ?, ?)"
                " RETURNING id",
                (made.digest.hex(), made.text, self.now()),
            ).fetchone()
        return int(row[0])  # cached by `known_fingerprint` only: this insert may roll back

    def known_fingerprint(self, made: Fingerprint) -> int | None:
        """Row id of a fingerprint that was committed before, or None.

        Raises StoreError when another process has given the digest to other fields.
        """
        known = self._prints.get(made.digest)
        if known is None:
            rows = self.read(_FINGERPRINT, (made.digest.hex(),))
            if not rows:
                return None
            require_equal(made, rows[0][1])
            known = self._prints[made.digest] = int(rows[0][0])
        return known

    def lookup(
        self,
        made: Fingerprint | Sequence[Fingerprint],
        links: Sequence[Link],
        *,
        lossy: bool = False,
        key: str | None = None,
    ) -> list[Found]:
        """The longest catalogued prefix of a chain, in one query a fingerprint.

        A hole ends it whatever lies beyond; so does a row whose parent, start or count differ.
        made: if several, each chunk is of the first that has it, in an exact format if there is
        one.  key: only parts that open with it (`Header.key`), None for all.
        """
        several = [made] if isinstance(made, Fingerprint) else made
        return choose([self.listed(one, links, key) for one in several], lossy)

    def listed(
        self, made: Fingerprint, links: Sequence[Link], key: str | None = None
    ) -> list[list[Found]]:
        """Of each link the catalogued parts, in one query.  key: see `lookup`."""
        which = self.known_fingerprint(made)
        if which is None or not links:
            return [[] for _ in links]
        wanted = json.dumps([link.id.hex() for link in links])
        return fitting(made, links, self.read(LOOKUP, (wanted, which, key)))

    def record(
        self,
        place: str,
        stored: Sequence[tuple[Header, int]],
        present: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """Note durable chunks of one place: (header, bytes it takes there), in one transaction.

        The first writer of a chunk in a format under a key wins; returns the content ids that lost
        to other bytes for the same chunk, which nothing names now.  present: asked inside the
        transaction, which gc deletes files in as well.  Raises FileNotFoundError when a file has
        gone meanwhile (nothing is noted then), CatalogFault.
        """
        lost, now = [], self.now()
        with self.write() as db:
            for header, used in stored:
                if present is not None and not present(header.content):
                    raise FileNotFoundError(f"chunk {header.content[:16]} was collected meanwhile")
                made = Fingerprint(header.fingerprint, header.meta)
                chunk = self._chunk(db, self.fingerprint(db, made), header, now)
                self._learn(db, header)
                db.execute(
                    "INSERT OR IGNORE INTO part (content, chunk, format, key, bytes)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (header.content, chunk, header.format, header.key, header.file_bytes),
                )
                (kept,) = db.execute(
                    "SELECT content FROM part WHERE chunk = ? AND format = ? AND key = ?",
                    (chunk, header.format, header.key),
                ).fetchone()
                if kept != header.content:
                    lost.append(header.content)
                    if not made.lossy:  # rows that came from others may differ
                        add_event(db, now, "divergence", {"kept": kept, "refused": header.content})
                    continue
                db.execute(
                    "INSERT OR IGNORE INTO replica (content, place, used, created_at)"
                    " VALUES (?, ?, ?, ?)",
                    (header.content, place, used, now),
                )
            if self.behind is not None and place != self.behind[0]:
                kept = [header.content for header, _ in stored if header.content not in lost]
                self._promise(db, kept, *self.behind, now)
        return lost

    def learn(self, header: Header) -> None:
        """Note with which key a part opens that an older version has catalogued."""
        with self.write() as db:
            self._learn(db, header)

    @staticmethod
    def _learn(db: sqlite3.Connection, header: Header) -> None:
        """If another part has that place meanwhile, this one is one too many."""
        where = "WHERE content = ? AND key IS NULL"
        done = db.execute(
            f"UPDATE OR IGNORE part SET key = ? {where}", (header.key, header.content)
        )
        if not done.rowcount:
            of = f"content IN (SELECT content FROM part {where})"
            db.execute(f"DELETE FROM replica WHERE {of}", (header.content,))

    @staticmethod
    def _promise(
        db: sqlite3.Connection, contents: Sequence[str], place: str, most: int, now: float
    ) -> None:
        """Note that chunks are to reach a further place, as far as not too many wait for it."""
        (waiting,) = db.execute("SELECT count(*) FROM outbox WHERE place = ?", (place,)).fetchone()
        for content in contents:
            there = "SELECT 1 FROM replica WHERE content = ? AND place = ?"
            if db.execute(there, (content, place)).fetchone():
                continue
            if waiting >= most:
                add_count(db, "behind_dropped", 1)
                continue
            waiting += db.execute(
                "INSERT OR IGNORE INTO outbox (content, place, due_at, created_at)"
                " VALUES (?, ?, ?, ?)",
                (content, place, now, now),
            ).rowcount

    @staticmethod
    def _chunk(db: sqlite3.Connection, which: int, header: Header, now: float) -> int:
        key = (which, header.chain.hex())
        row = db.execute("SELECT id FROM chunk WHERE fingerprint = ? AND chain = ?", key).fetchone()
        if row is None:
            row = db.execute(
                "INSERT INTO chunk (fingerprint, chain, parent, start, tokens, created_at, used_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING id",
                (*key, header.parent.hex(), header.start, header.count, now, now),
            ).fetchone()
        return int(row[0])

    def intend(self, content: str, place: str) -> Callable[[str], bool]:
        """Note that this process is writing a part to a place; `record` ends that.

        Returns the question, for `record`, whether the note still stands: it goes with the part
        when gc takes that, and the object with it.  Raises FileNotFoundError when the part is not
        in the catalog any more, OSError while gc is deleting that very object, CatalogFault.
        """
        now = self.now()
        with self.write() as db:
            if not db.execute("SELECT 1 FROM part WHERE content = ?", (content,)).fetchone():
                raise FileNotFoundError(f"chunk {content[:16]} was collected meanwhile")
            gone = db.execute("SELECT 1 FROM lease WHERE chain = ?", (doomed(content, place),))
            if gone.fetchone():
                raise OSError(EBUSY, f"chunk {content[:16]} is being deleted from {place}")
            db.execute(
                "INSERT OR IGNORE INTO outbox"
                " (content, place, due_at, taken_by, taken_until, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (content, place, INTENT, owner.who(), now + CLAIM_S, now),
            )
            note = "SELECT created_at FROM outbox WHERE content = ? AND place = ?"
            noted = db.execute(note, (content, place)).fetchone()
        return lambda key: self.read(note, (content, place)) == [noted]

    def forgo(self, content: str, place: str) -> None:
        """An intended copy did not come to be."""
        with self.write() as db:
            db.execute(
                "DELETE FROM outbox WHERE content = ? AND place = ? AND due_at = ?",
                (content, place, INTENT),
            )

    def forget(
        self, place: str, contents: Iterable[str], present: Callable[[str], bool] | None = None
    ) -> int:
        """These parts are no longer at a place; a chunk without any part goes with its last.

        present: asked inside the transaction, as in `record`; what is there by then stays.  Returns
        how many rows went.
        """
        with self.write() as db:
            return sum(
                db.execute(
                    "DELETE FROM replica WHERE place = ? AND content = ?", (place, content)
                ).rowcount
                for content in contents
                if present is None or not present(content)
            )

    def touch(self, chunks: Iterable[int]) -> None:
        """Note a use of chunks: eviction goes by it.  The time never runs backwards."""
        now = self.now()
        with self.write() as db:
            db.executemany(
                "UPDATE chunk SET uses = uses + 1, used_at = max(used_at, ?) WHERE id = ?",
                [(now, chunk) for chunk in chunks],
            )

    def usage(self) -> dict[str, tuple[int, int]]:
        """Place -> (bytes used, parts), kept by triggers: no scan."""
        return {row[0]: (row[1], row[2]) for row in self.read("SELECT * FROM place")}

    # ---------------------------------------------------------------- events, settings

    def event(self, kind: str, **detail: Any) -> None:
        """Write down that something happened; a database that can't be written is no error here."""
        with suppress(StoreError), self.write() as db:
            add_event(db, self.now(), kind, detail)

    def events(self, kind: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """The latest events, newest first."""
        rows = self.read(
            "SELECT kind, detail, at FROM event WHERE kind = coalesce(?, kind)"
            " ORDER BY id DESC LIMIT ?",
            (kind, limit),
        )
        return [{"kind": k, "at": at, **json.loads(detail)} for k, detail, at in rows]

    def count(self, name: str, by: float = 1) -> None:
        """Add to a total that outlives the process; a catalog that can't be written loses it."""
        with suppress(StoreError), self.write() as db:
            add_count(db, name, by)

    def counters(self) -> dict[str, float]:
        """Totals since the store was made."""
        return dict(self.read("SELECT name, value FROM counter ORDER BY name"))

    def setting(self, key: str) -> str | None:
        """A value of table `meta`."""
        rows = self.read("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_setting(self, key: str, value: str) -> None:
        """Write a value of table `meta`."""
        with self.write() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def get_digest(self, key: tuple[str, int, int, int]) -> str | None:
        """`StatCache`: the digest of a weights file with this path, size, mtime and inode."""
        rows = self.read(
            "SELECT digest FROM weights"
            " WHERE path = ? AND bytes = ? AND mtime_ns = ? AND inode = ?",
            key,
        )
        return str(rows[0][0]) if rows else None

    def put_digest(self, key: tuple[str, int, int, int], hexdigest: str) -> None:
        """`StatCache`: note it; a cache that cannot be written is no reason to stop."""
        with suppress(StoreError), self.write() as db:
            db.execute("INSERT OR REPLACE INTO weights VALUES (?, ?, ?, ?, ?)", (*key, hexdigest))
