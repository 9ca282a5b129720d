"""What the commands ask a store: plain dictionaries, ready for JSON.  Nothing here prints."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkserve.errors import StoreError
from forkserve.store.catalog import Catalog
from forkserve.store.chunks import parse_header
from forkserve.store.identity import parse_fingerprint, plan_chain
from forkserve.store.schema import FILE
from forkserve.store.store import Store

__all__ = [
    "describe",
    "disk_usage",
    "find_prefix",
    "names",
    "open_store",
    "pin",
    "query",
    "resolve",
    "sessions",
    "sort_out",
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


def names(catalog: Catalog) -> list[dict[str, Any]]:
    """Named states by name.  stored: tokens whose KV is there; far: those with a receipt of a
    further place."""
    keys = ("name", "session", "node", "tenant", "tokens", "chain", "created_at", "stored", "far")
    rows = catalog.read(
        "SELECT n.name, n.session, n.node, n.tenant, n.tokens, n.chain, n.created_at,"
        " coalesce((SELECT max(c.start + c.tokens) FROM chunk AS c WHERE c.chain = n.chain"
        " AND c.fingerprint = n.fingerprint), 0), (WITH RECURSIVE path (chain) AS (SELECT n.chain"
        " UNION SELECT c.parent FROM path JOIN chunk AS c ON c.chain = path.chain)"
        " SELECT coalesce(sum(c.tokens), 0) FROM path JOIN chunk AS c USING (chain)"
        " WHERE c.fingerprint = n.fingerprint AND EXISTS (SELECT 1 FROM part AS p JOIN replica AS r"
        " USING (content) WHERE p.chunk = c.id AND r.place != 'disk'))"
        " FROM name AS n ORDER BY n.name"
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


def describe(store: Store, what: str) -> dict[str, Any]:
    """All about a name, a session, a chain id or a chunk file.  Raises StoreError, OSError."""
    path = Path(what)
    if path.suffix == ".kv" and path.is_file():
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


def pin(catalog: Catalog, what: str, owner: str, ttl_s: float | None) -> str:
    """Keep a chain from gc and eviction, for `ttl_s` seconds or for good; returns its id."""
    chain = resolve(catalog, what)
    until = None if ttl_s is None else time.time() + ttl_s
    with catalog.write() as db:
        db.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (chain, owner, until))
    return chain


def unpin(catalog: Catalog, what: str, owner: str) -> int:
    """Take a pin away; returns how many there were."""
    chain = resolve(catalog, what)
    with catalog.write() as db:
        return db.execute("DELETE FROM pin WHERE chain = ? AND owner = ?", (chain, owner)).rowcount


def disk_usage(store: Store) -> dict[str, Any]:
    """Bytes by place as the catalog counts them, and as the places themselves do."""
    usage = store.catalog.usage()
    places: dict[str, dict[str, int | None]] = {}
    for place, depot in store.vault.depots.items():
        used = files = 0
        for stat in depot.entries():
            used, files = used + stat.used, files + 1
        listed, parts = usage.get(place, (0, 0))
        places[place] = {"listed": listed, "parts": parts, "used": used, "files": files}
    for place, (listed, parts) in usage.items():  # not looked at: without --far
        places.setdefault(place, {"listed": listed, "parts": parts, "used": None, "files": None})
    for place, waiting in store.catalog.read("SELECT place, count(*) FROM outbox GROUP BY place"):
        places.setdefault(place, {"listed": 0, "parts": 0, "used": None, "files": None})
        places[place]["waiting"] = waiting
    aside = store.folder / "quarantine"
    bad = [p.stat().st_size for p in aside.iterdir()] if aside.is_dir() else []
    base = [p.stat().st_size for p in store.folder.glob(FILE + "*")]
    return {"places": places, "catalog": sum(base), "quarantine": sum(bad), "bad_files": len(bad)}


def query(folder: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query on a read-only connection.  Raises StoreError for a wrong one."""
    import sqlite_utils

    catalog = Catalog(folder, "reader")
    try:
        with catalog.locked() as db:
            return list(sqlite_utils.Database(db).query(sql))
    except (sqlite3.Error, ValueError) as error:
        raise StoreError(f"the query failed: {error}") from None
    finally:
        catalog.close()
