"""Is a store well?  Rows against files, the database against itself, who holds what.

Reads no payload and changes nothing, so that a reader may ask as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkserve.store import owner
from forkserve.store.depots.shared import local_part
from forkserve.store.lease import TTL_S
from forkserve.store.rebuild import integrity
from forkserve.store.schema import VERSION
from forkserve.values import counted

if TYPE_CHECKING:
    from forkserve.store.store import Store

__all__ = ["Check", "checkup"]

_LATE_S = 3600.0  # s after which a chunk should have reached the further place


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: ok is False when somebody should look at it."""

    name: str
    ok: bool
    found: str


def checkup(store: Store) -> list[Check]:
    """All checks.  Raises CatalogFault, OSError."""
    read, now = store.catalog.read, store.catalog.now()
    problems = integrity(store.vault)
    out = [
        Check("schema", True, f"version {VERSION}"),
        Check("database", not problems, "; ".join(problems) or "consistent"),
    ]
    for place, depot in store.vault.depots.items():
        rows = dict(
            read(
                "SELECT r.content, p.bytes FROM replica AS r JOIN part AS p USING (content)"
                " WHERE r.place = ?",
                (place,),
            )
        )
        stats = {stat.key: stat for stat in depot.entries()}
        there = {key: stat.bytes for key, stat in stats.items()}
        missing = rows.keys() - there.keys()
        wrong = sum(there[key] != rows[key] for key in rows.keys() & there.keys())
        orphans = sum(stat.own for key, stat in stats.items() if key not in rows)
        found = f"{counted(len(rows), 'chunk')}, {len(missing)} missing, {wrong} of a wrong length"
        found += f", {counted(orphans, 'file')} that nothing names, for gc to take" * bool(orphans)
        out.append(Check(f"files in {place}", not missing and not wrong, found))
    unread = {row[0] for row in read("SELECT DISTINCT place FROM replica")} - {*store.vault.depots}
    if unread:
        out.append(Check("other places", True, f"not looked at: {', '.join(sorted(unread))}"))
    ours = store.sealer.key_id.hex() if store.sealer is not None else ""
    (other,) = read("SELECT count(*) FROM part WHERE key != ?", (ours,))[0]
    found = f"{counted(other, 'chunk')} sealed, or opened by another key than the one given"
    out.append(Check("key", True, found if other else "opens every chunk"))
    out.append(_owner(store))
    leases = read("SELECT holder, at, ttl FROM lease")
    stale = sum(owner.is_dead(holder) or at + ttl < now for holder, at, ttl in leases)
    out.append(Check("leases", True, f"{len(leases)}, {stale} of them over (gc takes them)"))
    ahead = read("SELECT count(*) FROM lease WHERE at > ?", (now + TTL_S,))[0][0]
    ahead += read("SELECT count(*) FROM session WHERE updated_at > ?", (now + TTL_S,))[0][0]
    found = f"{counted(ahead, 'row')} from the future" if ahead else "in order"
    out.append(Check("clock", not ahead, found))
    late, tries = read(
        "SELECT count(*), coalesce(max(tries), 0) FROM outbox WHERE created_at < ?",
        (now - _LATE_S,),
    )[0]
    found = f"{counted(late, 'chunk')} late by more than an hour (tries: up to {tries})"
    found = found if late else "in time"
    out.append(Check("write-behind", not late, found))
    wastes = [local.waste() for d in store.vault.depots.values() if (local := local_part(d))]
    bad, half = sum(w.aside for w in wastes), sum(w.leftovers for w in wastes)
    found = f"{counted(bad, 'file')} set aside; yours to delete"
    out.append(Check("quarantine", True, found))
    out.append(Check("unfinished files", True, f"{half}; those of the dead go at the next opening"))
    return out


def _owner(store: Store) -> Check:
    rows = store.catalog.read("SELECT pid, boot, started, released, epoch FROM owner")
    if not rows or rows[0][3]:
        return Check("owner", True, "nobody")
    pid, boot, started, _, epoch = rows[0]
    state = owner.state(pid, boot, started)
    found = {
        "alive": f"process {pid}, epoch {epoch}",
        "dead": f"process {pid} has died; the next one takes over by itself",
        "unknown": f"process {pid} of another container or machine; force=True if it has ended",
    }[state]
    return Check("owner", True, found)
