"""The catalog: which chunks exist, and where their bytes lie.

Plain SQLite.  Tensor bytes never enter the database.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from errno import EBUSY
from pathlib import Path

from forkserve.errors import StoreError
from forkserve.store import owner
from forkserve.store.chunks import Header
from forkserve.store.identity import Fingerprint, Link
from forkserve.store.lookups import LOOKUP, Found, choose, fitting
from forkserve.store.notes import Notes
from forkserve.store.statements import add_count, add_event, require_equal
from forkserve.store.transactions import CatalogFault, Role

__all__ = ["CLAIM_S", "INTENT", "Catalog", "CatalogFault", "Orphaned", "Role", "doomed"]

INTENT = 1e18  # `due_at` of an outbox row that stands for a copy under way, not for a queued one
CLAIM_S = 120.0  # s that a process may take to copy one chunk


class Orphaned(FileNotFoundError):
    """The chunk that another one goes on from is not listed any more: gc has taken it."""


def doomed(content: str, place: str) -> str:
    """What a lease holds while an object of a further place is deleted (`collect`)."""
    return f"delete {content} in {place}"


_USED = "UPDATE chunk SET used_at = max(used_at, ?)"  # the time never runs backwards
_FINGERPRINT = "SELECT id, fields FROM fingerprint WHERE digest = ?"


class Catalog(Notes):
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
        super().__init__(folder, role, full_sync=full_sync, force=force, now=now)
        # A further place that every new chunk is to reach, and how many may wait for it.
        self.behind: tuple[str, int] | None = None
        self.leases: set[str] = set()  # tokens of those that read through this (`lease`)
        self._prints: dict[bytes, int] = {}

    def close(self) -> None:
        """Let go of what is still being read, give ownership back, close the file.  Idempotent."""
        tokens = [] if self.inherited else list(self.leases)
        if tokens:
            with suppress(StoreError), self.write() as db:
                db.executemany("DELETE FROM lease WHERE token = ?", [(token,) for token in tokens])
        super().close()

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
        *,
        fresh: bool = False,
        after: Collection[bytes] = (),
    ) -> list[str]:
        """Note durable chunks of one place: (header, bytes it takes there), in one transaction.

        The first writer of a chunk in a format under a key wins; returns the content ids that lost
        to other bytes for the same chunk, which nothing names now.  present: asked inside the
        transaction, which gc deletes files in as well.  fresh: somebody stores them now, so that a
        chunk that is there already begins its grace anew.  after: chains that are listed, as far as
        the caller knows: a chunk that goes on from one of them, and finds it gone, is not noted.
        Raises FileNotFoundError when a file has gone meanwhile, Orphaned (nothing is noted then),
        CatalogFault.
        """
        lost, now = [], self.now()
        with self.write() as db:
            for header, used in stored:
                if present is not None and not present(header.content):
                    raise FileNotFoundError(f"chunk {header.content[:16]} was collected meanwhile")
                made = Fingerprint(header.fingerprint, header.meta)
                which = self.fingerprint(db, made)
                if header.parent in after and not self._listed(db, which, header.parent):
                    raise Orphaned(
                        f"chunk {header.parent.hex()[:16]} was collected before the next was stored"
                    )
                chunk = self._chunk(db, which, header, now)
                if fresh:
                    db.execute(f"{_USED} WHERE id = ?", (now, chunk))
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
    def _listed(db: sqlite3.Connection, which: int, chain: bytes) -> bool:
        sql = "SELECT 1 FROM chunk WHERE fingerprint = ? AND chain = ?"
        return db.execute(sql, (which, chain.hex())).fetchone() is not None

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

    def renew(self, place: str, contents: Iterable[str]) -> set[str]:
        """Begin the grace of chunks anew whose bytes are at a place; returns which still are.

        In one transaction, so that gc takes one before (it is not returned) or leaves it alone.
        Raises CatalogFault.
        """
        now = self.now()
        which = (
            "WHERE id = (SELECT p.chunk FROM part AS p JOIN replica AS r USING (content)"
            " WHERE p.content = ? AND r.place = ?)"
        )
        with self.write() as db:
            return {
                content
                for content in contents
                if db.execute(f"{_USED} {which}", (now, content, place)).rowcount
            }

    def touch(self, chunks: Iterable[int]) -> None:
        """Note a use of chunks: eviction goes by it."""
        now = self.now()
        with self.write() as db:
            db.executemany(
                f"{_USED}, uses = uses + 1 WHERE id = ?",
                [(now, chunk) for chunk in chunks],
            )

    def usage(self) -> dict[str, tuple[int, int]]:
        """Place -> (bytes used, parts), kept by triggers: no scan."""
        return {row[0]: (row[1], row[2]) for row in self.read("SELECT * FROM place")}
