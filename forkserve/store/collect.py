"""Garbage: what no root reaches, files that no row names, leftovers of writers that died.

Roots are names, pins whose time is not over, chains that somebody reads now (`lease`), and the
committed text of sessions that are not closed.  A chunk is kept with all its ancestors, one in its
grace as well: a chunk without those before it is of no use.  Rows go
first, in one transaction; then each file is deleted inside a transaction that has checked that no
row names it, so that a publish of the same chunk in another process sees it gone or keeps it.  An
object of a further place is deleted outside of it, under a lease that no copy to there overrides:
a place that takes its time must not keep everybody from the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forkserve.store import faults
from forkserve.store.catalog import doomed
from forkserve.store.lease import hold, let_go, tidy
from forkserve.store.pace import breathe, paced, restful
from forkserve.store.statements import add_count
from forkserve.store.vault import Vault

__all__ = ["GRACE_S", "Swept", "collect", "delete_unnamed", "reachable"]

GRACE_S = 24 * 3600.0  # s that garbage stays: a publish may be about to name it
_BATCH = 64  # files deleted while the catalog is locked
_FEW = 2  # the same in the background: a file's pages take a while to go
_DELETE_S = 86_400.0  # s of a lease to delete; it ends with its process, too


@dataclass(slots=True)
class Swept:
    """What a collection took away (or would take, in a dry run)."""

    chunks: int = 0
    bytes: int = 0
    orphans: int = 0
    leftovers: int = 0
    pins: int = 0
    sessions: int = 0


_ROOTS = """
WITH RECURSIVE kept (chain) AS (
  SELECT chain FROM name WHERE chain IS NOT NULL
  UNION SELECT chain FROM pin WHERE until IS NULL OR until > ?1
  UNION SELECT chain FROM lease WHERE at + ttl > ?1
  UNION SELECT n.chain FROM node AS n JOIN session AS s ON s.id = n.session
        WHERE s.closed_at IS NULL AND n.chain IS NOT NULL
"""
_UP = "UNION SELECT c.parent FROM kept JOIN chunk AS c ON c.chain = kept.chain)"
_KEPT = _ROOTS + _UP
# What stands below a chunk that is in its grace, though its own is over.
_WAITING = (
    _ROOTS
    + """
  UNION SELECT p.chain FROM chunk AS c JOIN chunk AS p ON p.chain = c.parent
        WHERE (c.used_at > ?2 OR c.created_at > ?2) AND p.used_at <= ?2 AND p.created_at <= ?2
"""
    + _UP
)

_OVER = "until IS NOT NULL AND until <= ?"  # pins
_ENDED = "closed_at IS NOT NULL AND closed_at <= ?"  # sessions
_DEAD = "p.content, r.place, r.used"
_GARBAGE = """
FROM chunk AS c JOIN part AS p ON p.chunk = c.id JOIN replica AS r USING (content)
WHERE c.used_at <= ?2 AND c.created_at <= ?2 AND c.chain NOT IN (SELECT chain FROM kept)
"""

# A copy under way names its object as well: see `Catalog.intend`.
_NAMED = """
SELECT 1 FROM replica WHERE content = ?1 AND place = ?2
UNION ALL SELECT 1 FROM outbox WHERE content = ?1 AND place = ?2
"""


def reachable(vault: Vault) -> set[str]:
    """Chain ids (hex) that a root keeps."""
    return {row[0] for row in vault.catalog.read(_KEPT + " SELECT chain FROM kept", (_now(vault),))}


def _now(vault: Vault) -> float:
    return vault.catalog.now()


def collect(
    vault: Vault,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Swept:
    """Mark and sweep; nothing younger than `grace_s` seconds goes.

    A file or row from the future (the clock was set back) counts as young.  Raises OSError,
    CatalogFault; what was swept before stays swept.  In a process with an engine it makes way for
    passes (`Pace`).
    """
    with vault.pace.beside():
        return _collect(vault, _now(vault) - grace_s, grace_s, dry_run, progress)


def _collect(
    vault: Vault,
    limit: float,
    grace_s: float,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> Swept:
    swept = Swept()
    catalog = vault.catalog
    if dry_run:
        dead = catalog.read(_WAITING + f" SELECT {_DEAD} {_GARBAGE}", (_now(vault), limit))
        count = "SELECT count(*) FROM"
        (swept.sessions,) = catalog.read(f"{count} session WHERE {_ENDED}", (limit,))[0]
        (swept.pins,) = catalog.read(f"{count} pin WHERE {_OVER}", (_now(vault),))[0]
    else:
        with catalog.write() as db:
            tidy(db, _now(vault))
        faults.reach("gc.marked")
        dead = _unlist(vault, limit, swept)
    swept.chunks, swept.bytes = len({row[0] for row in dead}), sum(row[2] for row in dead)
    faults.reach("gc.unlisted")
    gone = {row[0] for row in dead}
    for place, depot in vault.depots.items():
        rows = catalog.read("SELECT content FROM replica WHERE place = ?", (place,))
        named = {row[0] for row in rows}
        files = [
            stat.key
            for stat in restful(depot.entries())
            if stat.own and (stat.key in gone or (stat.key not in named and stat.at <= limit))
        ]
        swept.orphans += sum(key not in gone for key in files)
        if not dry_run:
            for done in delete_unnamed(vault, place, files):
                if progress is not None:
                    progress(done, len(files))
            swept.leftovers += depot.sweep(max(grace_s, 0.0))
    faults.reach("gc.deleted")
    return swept


def _unlist(vault: Vault, limit: float, swept: Swept) -> list[tuple[str, str, int]]:
    """Strike what is garbage at this moment: content, place and bytes of each part."""
    with vault.catalog.write() as db:
        swept.pins = db.execute(f"DELETE FROM pin WHERE {_OVER}", (_now(vault),)).rowcount
        swept.sessions = db.execute(f"DELETE FROM session WHERE {_ENDED}", (limit,)).rowcount
        db.execute("DELETE FROM decision WHERE session NOT IN (SELECT id FROM session)")
        # Listed first: a trigger changes `part` while rows go.
        dead = db.execute(_WAITING + f" SELECT {_DEAD} {_GARBAGE}", (_now(vault), limit)).fetchall()
        db.executemany(
            "DELETE FROM replica WHERE content = ? AND place = ?", [row[:2] for row in dead]
        )
        for place in vault.depots:
            freed = sum(used for _, where, used in dead if where == place)
            if freed:
                add_count(db, f"evicted_bytes/{place}/gc", freed)
    return dead


def delete_unnamed(vault: Vault, place: str, keys: Sequence[str]) -> Iterator[int]:
    """Delete files that no row names (asked again, under the lock); yields how many are done."""
    depot, catalog = vault.depots[place], vault.catalog
    near = place == next(iter(vault.depots))
    step = _FEW if paced() else _BATCH
    for begin in range(0, len(keys), step):
        breathe()
        batch = keys[begin : begin + step]
        with catalog.write() as db:
            free = [key for key in batch if not db.execute(_NAMED, (key, place)).fetchone()]
            if near:
                depot.delete(free)
            else:
                held = hold(db, [doomed(key, place) for key in free], catalog.now(), _DELETE_S)
        if not near:
            faults.reach("far.doomed")
            try:
                depot.delete(free)
            finally:
                let_go(catalog, held)
        yield begin + len(batch)
