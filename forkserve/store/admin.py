"""What the commands ask a store: plain dictionaries, ready for JSON.  Nothing here prints."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkserve.errors import StoreError
from forkserve.store.catalog import Catalog
from forkserve.store.chunks import LOSSY, parse_header
from forkserve.store.depots.shared import is_store_id, local_part
from forkserve.store.identity import parse_fingerprint, plan_chain
from forkserve.store.schema import FILE
from forkserve.store.store import Store

__all__ = [
    "describe",
    "describe_file",
    "disk_usage",
    "find_prefix",
    "lossy_only",
    "making_room",
    "names",
    "open_store",
    "pin",
    "query",
    "resolve",
    "sessions",
    "sort_out",
    "take_id",
    "tree_rows",
    "unpin",
]

_HEX = re.compile(r"[0-9a-f]{8,64}\Z")


def open_store(
    folder: Path, *, write: bool, key: str | None = None, far: str | None = None
) -> Store:
    """The store in a directory that has one; none is made.  StoreError says what is there."""
    if not folder.is_dir():
        raise StoreError(f"there is no directory {folder}")
    if not (folder / FILE).exists():
        if (folder / "chunks").is_dir():
            raise StoreError(
                f"{folder} has chunks but no {FILE}: bring it back with `forkserve store rebuild`"
            )
        what = "is empty" if not any(folder.iterdir()) else f"holds no {FILE}"
        raise StoreError(f"{folder} {what}: it is not a store")
    places = [far] if far is not None else []
    return Store(folder, "shared" if write else "reader", encrypt=key, far=places)


@contextmanager
def making_room(folder: Path) -> Iterator[None]:
    """For a command that makes a store if there is none: an error leaves the directory as it was.

    Raises StoreError for a directory that holds other things.
    """
    there = set(folder.iterdir()) if folder.is_dir() else None
    if there and not (folder / FILE).exists():
        raise StoreError(
            f"{folder} holds other things and no {FILE}: give the store a directory of its own"
        )
    try:
        yield
    except BaseException:
        if not there:
            _unmake(folder, there is None)
        raise


def _unmake(folder: Path, whole: bool) -> None:
    """Take away what a failed command has made in an empty directory, and (whole) that as well.

    What somebody else has begun to use meanwhile stays, and what has copies in a further place:
    they lie under its id.
    """
    with suppress(StoreError), closing(Catalog(folder, "reader")) as catalog:
        used = ("session", "name", "pin", "lease", "replica WHERE place != 'disk'")
        if any(catalog.read(f"SELECT 1 FROM {rows} LIMIT 1") for rows in used):
            return
    for path in folder.glob(FILE + "*"):
        path.unlink()
    for name in ("chunks", "quarantine"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if whole:
        with suppress(OSError):
            folder.rmdir()


def take_id(folder: Path, store: str) -> None:
    """Give a store that holds nothing yet the id of one whose database was lost.

    Its folder in further places is this one's again.  Raises StoreError: no id, or not empty.
    """
    if not is_store_id(store):
        raise StoreError(f"'{store}' is no id of a store: 32 hex digits, as its folder is called")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(Catalog(folder)) as catalog, catalog.write() as db:
        tables = ("part", "session", "name")
        if any(db.execute(f"SELECT 1 FROM {table}").fetchone() for table in tables):
            raise StoreError(
                f"{folder} is a store with an id of its own; only one without chunks, sessions and "
                "names can take the id of another"
            )
        db.execute("UPDATE meta SET value = ? WHERE key = 'store'", (store,))


def sessions(catalog: Catalog) -> list[dict[str, Any]]:
    """Sessions, the latest first."""
    keys = ("session", "tenant", "nodes", "lines", "tokens", "updated_at", "closed_at")
    rows = catalog.read(
        "SELECT s.id, s.tenant, (SELECT count(*) FROM node WHERE session = s.id),"
        " (SELECT count(*) FROM tip WHERE session = s.id),"
        " (SELECT n.start + n.tokens FROM tip AS t JOIN node AS n ON n.session = t.session"
        "  AND n.id = t.node WHERE t.session = s.id AND t.line = 0), s.updated_at, s.closed_at"
        " FROM session AS s ORDER BY s.updated_at DESC, s.id"
    )
    return [dict(zip(keys, row, strict=True)) for row in rows]


def names(catalog: Catalog, near: str = "disk") -> list[dict[str, Any]]:
    """Named states by name.  stored: tokens whose KV is there; far: those with a receipt of
    another place than `near`."""
    keys = ("name", "session", "node", "tenant", "tokens", "chain", "created_at", "stored", "far")
    rows = catalog.read(
        "SELECT n.name, n.session, n.node, n.tenant, n.tokens, n.chain, n.created_at,"
        " coalesce((SELECT max(c.start + c.tokens) FROM chunk AS c WHERE c.chain = n.chain"
        " AND c.fingerprint = n.fingerprint), 0), (WITH RECURSIVE path (chain) AS (SELECT n.chain"
        " UNION SELECT c.parent FROM path JOIN chunk AS c ON c.chain = path.chain)"
        " SELECT coalesce(sum(c.tokens), 0) FROM path JOIN chunk AS c USING (chain)"
        " WHERE c.fingerprint = n.fingerprint AND EXISTS (SELECT 1 FROM part AS p JOIN replica AS r"
        " USING (content) WHERE p.chunk = c.id AND r.place != ?))"
        " FROM name AS n ORDER BY n.name",
        (near,),
    )
    return [dict(zip(keys, row, strict=True)) for row in rows]


def tree_rows(catalog: Catalog, session: str) -> list[dict[str, Any]]:
    """Committed nodes of a session, parents first.  Raises StoreError for an unknown one."""
    keys = ("node", "parent", "branch", "start", "tokens", "mode", "line", "generation", "chain")
    rows = catalog.read(
        "SELECT id, parent, branch, start, tokens, mode, line, generation, chain FROM node"
        " WHERE session = ? ORDER BY id",
        (session,),
    )
    if not rows:
        raise StoreError(f"the store has no session '{session}'")
    tips = {row[0] for row in catalog.read("SELECT node FROM tip WHERE session = ?", (session,))}
    return [{**dict(zip(keys, row, strict=True)), "tip": row[0] in tips} for row in rows]


def resolve(catalog: Catalog, what: str) -> str:
    """The chain id (hex) that a name, a session or the beginning of an id stands for.

    Raises StoreError when it is unknown, ambiguous, or has no stored chunk.
    """
    found = catalog.read("SELECT chain FROM name WHERE name = ?", (what,))
    found = found or catalog.read(
        "SELECT n.chain FROM tip AS t JOIN node AS n ON n.session = t.session AND n.id = t.node"
        " WHERE t.session = ? AND t.line = 0",
        (what,),
    )
    if not found and _HEX.match(what):
        found = catalog.read("SELECT DISTINCT chain FROM chunk WHERE chain LIKE ?", (what + "%",))
        if len(found) > 1:
            raise StoreError(f"'{what}' is the beginning of {len(found)} ids; give more of it")
    if not found:
        raise StoreError(f"'{what}' is no name, session or chain id of this store")
    if found[0][0] is None:
        raise StoreError(f"'{what}' is shorter than one chunk: it has no stored KV")
    return str(found[0][0])


def sort_out(catalog: Catalog, what: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of states, and ids of sessions.  Raises StoreError for what is neither, or both."""
    names: list[str] = []
    sessions: list[str] = []
    for one in what:
        state = catalog.read("SELECT 1 FROM name WHERE name = ?", (one,))
        session = catalog.read("SELECT 1 FROM session WHERE id = ?", (one,))
        if state and session:
            raise StoreError(f"'{one}' is a state and a session: say --session for the session")
        if not state and not session:
            raise StoreError(f"the store has no state named '{one}', and no session '{one}'")
        (names if state else sessions).append(one)
    return names, sessions


def describe_file(path: Path) -> dict[str, Any]:
    """What a chunk file says of itself, without a store.  Raises ChunkFault, OSError."""
    data = path.read_bytes()
    header = parse_header(data, len(data))
    return {
        "content": header.content,
        "chain": header.chain.hex(),
        "parent": header.parent.hex(),
        "start": header.start,
        "tokens": header.count,
        "format": header.format,
        "bytes": header.file_bytes,
        "sealed": header.sealed,
        "fingerprint": parse_fingerprint(header.meta).fields,
    }


def describe(store: Store, what: str) -> dict[str, Any]:
    """The chunks behind a name, a session or a chain id.  Raises StoreError."""
    chain = resolve(store.catalog, what)
    keys = ("chain", "parent", "start", "tokens", "uses", "format", "content", "bytes", "places")
    rows = store.catalog.read(
        "WITH RECURSIVE path (chain) AS (SELECT ? UNION"
        " SELECT c.parent FROM path JOIN chunk AS c ON c.chain = path.chain)"
        " SELECT c.chain, c.parent, c.start, c.tokens, c.uses, p.format, p.content, p.bytes,"
        " group_concat(r.place) FROM path JOIN chunk AS c USING (chain)"
        " JOIN part AS p ON p.chunk = c.id JOIN replica AS r USING (content)"
        " GROUP BY p.content ORDER BY c.start, p.format",
        (chain,),
    )
    pins = store.catalog.read("SELECT owner, until FROM pin WHERE chain = ?", (chain,))
    return {
        "chain": chain,
        "chunks": [dict(zip(keys, row, strict=True)) for row in rows],
        "pins": [{"owner": owner, "until": until} for owner, until in pins],
    }


def find_prefix(store: Store, tokens: Sequence[int], salt: str) -> list[dict[str, Any]]:
    """Of each fingerprint in the store, how much of `tokens` is there."""
    links, out = plan_chain(tokens, salt), []
    for digest, text in store.catalog.read("SELECT digest, fields FROM fingerprint ORDER BY id"):
        made = parse_fingerprint(text)
        found = store.catalog.lookup(made, links)
        out.append(
            {
                "fingerprint": digest,
                "architecture": made.fields["architecture"],
                "kv_dtype": made.fields["kv_dtype"],
                "tokens": sum(f.link.count for f in found),
                "chunks": len(found),
                "bytes": sum(f.bytes for f in found),
            }
        )
    return out


def pin(catalog: Catalog, what: str, owner: str, ttl_s: float | None) -> dict[str, Any]:
    """Keep a chain from gc and eviction, for `ttl_s` seconds or for good; returns chain and end.

    A pin that lasts longer stays as it is.  Raises StoreError: nothing to pin, no time, or a pin
    for good where a time was asked for.
    """
    if ttl_s is not None and not 0 < ttl_s < 1e10:
        raise StoreError(f"a pin for {ttl_s} s makes no sense; leave the time out for good")
    chain = resolve(catalog, what)
    until = None if ttl_s is None else catalog.now() + ttl_s
    with catalog.write() as db:
        row = db.execute(
            "SELECT until FROM pin WHERE chain = ? AND owner = ?", (chain, owner)
        ).fetchone()
        if row is not None and until is not None:
            if row[0] is None:
                raise StoreError(
                    f"'{what}' is pinned for good by '{owner}': unpin it first, or pin it as "
                    "another owner"
                )
            until = max(until, float(row[0]))
        db.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (chain, owner, until))
    return {"chain": chain, "until": until}


def lossy_only(catalog: Catalog, names: Sequence[str], sessions: Sequence[str]) -> int:
    """Chunks of these states (of all names if none is given) that an export leaves out.

    They are stored in a lossy format alone, and a bundle holds exact rows.
    """
    every = not names and not sessions
    (count,) = catalog.read(
        "WITH RECURSIVE kept (chain) AS (SELECT chain FROM name WHERE ?1 OR name IN"
        " (SELECT value FROM json_each(?2)) UNION SELECT chain FROM node WHERE session IN"
        " (SELECT value FROM json_each(?3))"
        " UNION SELECT c.parent FROM kept JOIN chunk AS c ON c.chain = kept.chain)"
        " SELECT count(*) FROM chunk AS c WHERE c.chain IN (SELECT chain FROM kept) AND NOT EXISTS"
        " (SELECT 1 FROM part AS p WHERE p.chunk = c.id AND p.format NOT IN"
        " (SELECT value FROM json_each(?4)))",
        (every, json.dumps(list(names)), json.dumps(list(sessions)), json.dumps(sorted(LOSSY))),
    )[0]
    return int(count)


def unpin(catalog: Catalog, what: str, owner: str) -> int:
    """Take a pin away; returns how many there were."""
    chain = resolve(catalog, what)
    with catalog.write() as db:
        return db.execute("DELETE FROM pin WHERE chain = ? AND owner = ?", (chain, owner)).rowcount


def disk_usage(store: Store) -> dict[str, Any]:
    """Bytes by place as the catalog counts them, and as the places themselves do.

    leftovers: files that writers have not finished.  aside: damaged ones.  outside: objects that
    can be read and are not this store's to delete.
    """
    usage = store.catalog.usage()
    places: dict[str, dict[str, int | None]] = {}
    for place, depot in store.vault.depots.items():
        used = files = outside = 0
        for stat in depot.entries():
            outside += not stat.own
            used, files = used + stat.used * stat.own, files + stat.own
        listed, parts = usage.get(place, (0, 0))
        row = places[place] = {"listed": listed, "parts": parts, "used": used, "files": files}
        row["outside"] = outside
        if (local := local_part(depot)) is not None:
            row |= asdict(local.waste())
    for place, (listed, parts) in usage.items():  # not looked at: without --far
        places.setdefault(place, {"listed": listed, "parts": parts, "used": None, "files": None})
    for place, waiting in store.catalog.read("SELECT place, count(*) FROM outbox GROUP BY place"):
        places.setdefault(place, {"listed": 0, "parts": 0, "used": None, "files": None})
        places[place]["waiting"] = waiting
    base = [p.stat().st_size for p in store.folder.glob(FILE + "*")]
    return {"store": store.catalog.setting("store"), "places": places, "catalog": sum(base)}


def query(folder: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query on a read-only connection.  Raises StoreError for a wrong one."""
    import sqlite_utils

    catalog = Catalog(folder, "reader")
    try:
        with catalog.locked() as db:
            try:
                return list(sqlite_utils.Database(db).query(sql))
            except ValueError:  # the library's words are for its own users
                raise StoreError("the query returns no rows: give one that reads") from None
    except sqlite3.Error as error:
        raise StoreError(f"the query failed: {error}") from None
    finally:
        catalog.close()
