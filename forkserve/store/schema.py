"""Tables of the catalog, their versions, and how a connection is opened.

Everything is STRICT, keys are real foreign keys, ids of chunks and fingerprints are hex text: the
file is made to be joined with an application's own tables, by sqlite-utils or Datasette as well.
Times are seconds since the epoch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.broken import cannot_open
from forkserve.store.migrations import V2, V3, V4, V5

__all__ = [
    "APPLICATION_ID",
    "FILE",
    "VERSION",
    "connect",
    "migrate",
    "version_of",
]

FILE = "catalog.db"
APPLICATION_ID = 0x464B5631  # "FKV1"
_BUSY_S = 30.0  # how long a statement waits for another process
# KiB of pages that a connection keeps: what a look-up of a long chain reads is scattered over the
# file.  Not a memory map: a disk that fails would end the process there, not the query.
_CACHE_KIB = 16_384

_V1 = """
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT;

-- Who may write the sessions: one process, until it releases the row or dies.
CREATE TABLE owner (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  token TEXT NOT NULL,
  pid INTEGER NOT NULL,
  boot TEXT NOT NULL,
  started TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  since REAL NOT NULL,
  released INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE fingerprint (
  id INTEGER PRIMARY KEY,
  digest TEXT NOT NULL UNIQUE,
  fields TEXT NOT NULL CHECK (json_valid(fields)),
  created_at REAL NOT NULL
) STRICT;

-- One link of a prefix chain.  A row exists only while bytes of it are durable somewhere.
CREATE TABLE chunk (
  id INTEGER PRIMARY KEY,
  fingerprint INTEGER NOT NULL REFERENCES fingerprint (id),
  chain TEXT NOT NULL,
  parent TEXT NOT NULL,
  start INTEGER NOT NULL CHECK (start >= 0),
  tokens INTEGER NOT NULL CHECK (tokens > 0),
  created_at REAL NOT NULL,
  used_at REAL NOT NULL,
  uses INTEGER NOT NULL DEFAULT 0,
  UNIQUE (fingerprint, chain)
) STRICT;
CREATE INDEX chunk_parent ON chunk (parent);

-- The bytes of a chunk in one format; content is the file's name.
CREATE TABLE part (
  content TEXT PRIMARY KEY,
  chunk INTEGER NOT NULL REFERENCES chunk (id) ON DELETE CASCADE,
  format TEXT NOT NULL,
  bytes INTEGER NOT NULL,
  UNIQUE (chunk, format)
) STRICT;

-- Where a part lies.  used: what it takes from the place's budget.
CREATE TABLE replica (
  content TEXT NOT NULL REFERENCES part (content) ON DELETE CASCADE,
  place TEXT NOT NULL,
  used INTEGER NOT NULL,
  created_at REAL NOT NULL,
  PRIMARY KEY (content, place)
) STRICT, WITHOUT ROWID;

CREATE TABLE place (
  name TEXT PRIMARY KEY,
  used INTEGER NOT NULL DEFAULT 0,
  parts INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TRIGGER replica_added AFTER INSERT ON replica BEGIN
  INSERT INTO place (name, used, parts) VALUES (new.place, new.used, 1)
    ON CONFLICT (name) DO UPDATE SET used = used + new.used, parts = parts + 1;
END;
CREATE TRIGGER replica_gone AFTER DELETE ON replica BEGIN
  UPDATE place SET used = used - old.used, parts = parts - 1 WHERE name = old.place;
  DELETE FROM part WHERE content = old.content
    AND NOT EXISTS (SELECT 1 FROM replica WHERE content = old.content);
END;
CREATE TRIGGER part_gone AFTER DELETE ON part BEGIN
  DELETE FROM chunk WHERE id = old.chunk
    AND NOT EXISTS (SELECT 1 FROM part WHERE chunk = old.chunk);
END;
CREATE TRIGGER part_fixed BEFORE UPDATE OF content, chunk, format ON part BEGIN
  SELECT RAISE (ABORT, 'a part never changes');
END;

-- The conversation trees.  Speculative nodes are not here.
CREATE TABLE session (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL,
  salt BLOB NOT NULL,
  seed TEXT NOT NULL,
  fingerprint INTEGER NOT NULL REFERENCES fingerprint (id),
  next_node INTEGER NOT NULL,
  next_line INTEGER NOT NULL,
  created_at REAL NOT NULL,
  updated_at REAL NOT NULL,
  closed_at REAL
) STRICT;

CREATE TABLE node (
  session TEXT NOT NULL REFERENCES session (id) ON DELETE CASCADE,
  id INTEGER NOT NULL,
  parent INTEGER,
  branch TEXT NOT NULL,
  start INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  mode TEXT NOT NULL CHECK (mode IN ('commit', 'idle')),
  line INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  known INTEGER NOT NULL,
  chain TEXT,
  PRIMARY KEY (session, id),
  FOREIGN KEY (session, parent) REFERENCES node (session, id) DEFERRABLE INITIALLY DEFERRED
) STRICT, WITHOUT ROWID;
CREATE INDEX node_chain ON node (chain) WHERE chain IS NOT NULL;

-- Token ids of a node, little-endian int32, in runs; sealed when the store is encrypted.
CREATE TABLE run (
  session TEXT NOT NULL,
  node INTEGER NOT NULL,
  start INTEGER NOT NULL,
  ids BLOB NOT NULL,
  PRIMARY KEY (session, node, start),
  FOREIGN KEY (session, node) REFERENCES node (session, id) ON DELETE CASCADE
    DEFERRABLE INITIALLY DEFERRED
) STRICT;

-- The last committed node of each line; line 0 is the main one.
CREATE TABLE tip (
  session TEXT NOT NULL,
  line INTEGER NOT NULL,
  node INTEGER NOT NULL,
  PRIMARY KEY (session, line),
  FOREIGN KEY (session, node) REFERENCES node (session, id) ON DELETE CASCADE
    DEFERRABLE INITIALLY DEFERRED
) STRICT, WITHOUT ROWID;

CREATE TABLE binding (
  session TEXT NOT NULL REFERENCES session (id) ON DELETE CASCADE,
  seq INTEGER NOT NULL,
  node INTEGER NOT NULL,
  winner INTEGER NOT NULL,
  role TEXT NOT NULL,
  branch TEXT NOT NULL,
  hit TEXT NOT NULL,
  lcp INTEGER NOT NULL,
  tail INTEGER NOT NULL,
  skipped INTEGER NOT NULL,
  aborted INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  at REAL NOT NULL,
  PRIMARY KEY (session, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE tool_time (
  id INTEGER PRIMARY KEY,
  session TEXT NOT NULL REFERENCES session (id) ON DELETE CASCADE,
  tool TEXT NOT NULL,
  ms REAL NOT NULL,
  at REAL NOT NULL
) STRICT;
CREATE INDEX tool_time_session ON tool_time (session, tool);

CREATE TABLE meter (
  tenant TEXT NOT NULL,
  name TEXT NOT NULL,
  value REAL NOT NULL,
  PRIMARY KEY (tenant, name)
) STRICT, WITHOUT ROWID;

-- Why something was or was not done: speculate, restore, keep, evict.
CREATE TABLE decision (
  id INTEGER PRIMARY KEY,
  session TEXT,
  node INTEGER,
  what TEXT NOT NULL,
  verdict TEXT NOT NULL,
  reason TEXT NOT NULL,
  tokens INTEGER NOT NULL DEFAULT 0,
  gain_ms REAL,
  cost_ms REAL,
  actual_ms REAL,
  at REAL NOT NULL
) STRICT;
CREATE INDEX decision_session ON decision (session);

CREATE TABLE event (
  id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  detail TEXT NOT NULL,
  at REAL NOT NULL
) STRICT;

-- Named states: a root of what gc keeps.
CREATE TABLE name (
  name TEXT PRIMARY KEY,
  session TEXT NOT NULL,
  node INTEGER NOT NULL,
  tenant TEXT NOT NULL,
  salt BLOB NOT NULL,
  seed TEXT NOT NULL,
  fingerprint INTEGER NOT NULL REFERENCES fingerprint (id),
  root TEXT NOT NULL,
  chain TEXT,
  tokens INTEGER NOT NULL,
  ids BLOB NOT NULL,
  created_at REAL NOT NULL
) STRICT;

CREATE TABLE pin (
  chain TEXT NOT NULL,
  owner TEXT NOT NULL,
  until REAL,
  PRIMARY KEY (chain, owner)
) STRICT, WITHOUT ROWID;

CREATE TABLE weights (
  path TEXT PRIMARY KEY,
  bytes INTEGER NOT NULL,
  mtime_ns INTEGER NOT NULL,
  inode INTEGER NOT NULL,
  digest TEXT NOT NULL
) STRICT;
"""

# MIGRATIONS[i] brings version i to i + 1.  A released one is never edited.
MIGRATIONS: list[str | Callable[[sqlite3.Connection], None]] = [_V1, V2, V3, V4, V5]
VERSION = len(MIGRATIONS)


def connect(
    folder: Path, *, read_only: bool = False, full_sync: bool = False
) -> sqlite3.Connection:
    """Open (or make) the catalog of a store directory; transactions are begun by hand.

    Raises StoreError when the file is foreign, corrupt, cannot be opened, or of a newer version.
    """
    path = folder / FILE
    if read_only:
        return _checked(_reader(path))
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        _version(db)  # before anything is changed in a file that may not be ours
        path.chmod(0o600)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if full_sync else 'NORMAL'}")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute(
            "PRAGMA foreign_keys = OFF"
        )  # a table that is made anew must not take others along
        migrate(db)
        db.execute("PRAGMA foreign_keys = ON")
        return _checked(db)
    except BaseException as error:
        if db is not None:
            db.close()
        if isinstance(error, (sqlite3.Error, OSError)):
            raise cannot_open(path, error) from error
        raise


def version_of(folder: Path) -> int:
    """Schema version of the catalog in a directory.  Raises StoreError: none, foreign, newer."""
    db = _reader(folder / FILE)
    try:
        return _version(db)
    except sqlite3.Error as error:
        raise cannot_open(folder / FILE, error) from error
    finally:
        db.close()


def _reader(path: Path) -> sqlite3.Connection:
    """A read-only connection; on a read-only file system one that needs no side files."""
    if not path.exists():
        raise StoreError(f"there is no catalog {path}: is this the directory of a store?")
    for mode in ("mode=ro", "immutable=1"):
        if mode != "mode=ro" and Path(f"{path}-wal").exists():
            break
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            db.execute("PRAGMA user_version")
            db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            return db
        except sqlite3.Error as error:
            db.close()
            fault = error
    raise cannot_open(path, fault)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the schema to VERSION, one transaction a step; does nothing when it is there."""
    while True:
        version = _version(db)
        if version >= VERSION:
            return
        faults.reach("migrate.begin")
        db.execute("BEGIN IMMEDIATE")
        try:
            if _version(db) == version:  # else another process was faster
                step = MIGRATIONS[version]
                if callable(step):
                    step(db)
                else:
                    _script(db, step)
                faults.reach("migrate.step")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        faults.reach("migrate.done")


def _script(db: sqlite3.Connection, text: str) -> None:
    """Run statements inside the open transaction (`executescript` would commit it)."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""


def _version(db: sqlite3.Connection) -> int:
    """Schema version of a file that is ours, or empty.  Raises StoreError for any other."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    mark = int(db.execute("PRAGMA application_id").fetchone()[0])
    tables = int(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    if mark != APPLICATION_ID and (tables or version):
        raise StoreError(
            f"{FILE} is a database of another program (application id {mark:#x}, {tables} objects);"
            " give the store a directory of its own"
        )
    if version > VERSION:
        raise StoreError(
            f"the store's schema has version {version}, this version of ForkServe knows {VERSION}; "
            "use the newer ForkServe, or another directory"
        )
    return version


def _checked(db: sqlite3.Connection) -> sqlite3.Connection:
    if _version(db) != VERSION:
        raise StoreError(
            "the catalog is empty or of an older version; open it once for writing to migrate it"
        )
    return db
