"""The catalog from the chunk files alone, and the cross-check of the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from forkserve.errors import StoreError
from forkserve.store.broken import ADVICE
from forkserve.store.catalog import doomed
from forkserve.store.chunks import HEAD, Buffer, ChunkFault, Header, check_payload, parse_header
from forkserve.store.depots import Depot, SharedDepot
from forkserve.store.pace import breathe
from forkserve.store.vault import TRIES, Vault

__all__ = ["Report", "integrity", "rebuild", "verify"]

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Report:
    """What a check found.

    faults: (place, content, kind).  orphans: files that no row names.  copied: objects that
    `rebuild` copied into this store's folder.  others: ids of stores with a folder beside it.
    """

    checked: int = 0
    bytes: int = 0
    adopted: int = 0
    copied: int = 0
    others: list[str] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    orphans: int = 0
    dangling: int = 0  # rows without a file
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.faults and not self.dangling and not self.problems


def rebuild(vault: Vault, progress: Progress | None = None, take: Sequence[str] = ()) -> Report:
    """Enter every sound file into the catalog, and strike rows whose file has gone.

    Only headers are read; payloads are verified when they are first used, as always.
    take: ids of other stores, or "all", whose objects in a further place are copied into this
    store's folder there, verified, and entered as well.  What rows name outside of that folder is
    copied in any case.  Raises StoreError (unknown id, no place that is shared, a full budget),
    OSError, CatalogFault.
    """
    report = Report()
    shared = [d for d in vault.depots.values() if isinstance(d, SharedDepot)]
    if take and not shared:
        raise StoreError("there is no further place that stores share; give one (--far URL)")
    with vault.pace.beside():
        try:
            for depot in shared:
                report.others += depot.stores()
                _copy_in(vault, depot, take, report)
        except (OSError, StoreError):
            if report.copied:  # what is there by now is not to be forgotten there
                with suppress(OSError, StoreError):
                    _adopt_files(vault, report, progress)
            raise
        _adopt_files(vault, report, progress)
    return report


def _copy_in(vault: Vault, depot: SharedDepot, take: Sequence[str], report: Report) -> None:
    """Bring objects of others into the store's own folder, where nobody else deletes them."""
    rows = vault.catalog.read("SELECT content FROM replica WHERE place = ?", (depot.place,))
    named = {str(content) for (content,) in rows}
    wanted: list[tuple[Depot, set[str] | None]] = [(depot.whole, named)]
    wanted += [(source, None) for source in depot.sources(take)]
    for source, only in wanted:
        for stat in source.entries():
            if (only is None or stat.key in only) and depot.own.stat(stat.key) is None:
                _copy(vault, depot, source, stat.key, report)


def _copy(vault: Vault, depot: SharedDepot, source: Depot, key: str, report: Report) -> None:
    breathe()
    try:
        blob = source.open(key)
    except FileNotFoundError:
        return  # its store has deleted it
    try:
        data = blob.data
        header = parse_header(data, len(data))
        check_payload(header, data[header.length :])
        if header.content != key:
            raise ChunkFault("name", "the object has another name than its content")
        room = vault.rooms.get(depot.place)
        if room is not None:
            room(len(data), [header.parent.hex()])
        _write(depot.own, key, data)
        report.copied += 1
    except ChunkFault as fault:  # not ours to set aside
        report.faults.append((depot.place, key, fault.kind))
    finally:
        blob.close()


def _write(depot: Depot, key: str, data: Buffer) -> None:
    """Put an object, again when a gc that began before takes it: no row names it yet.

    Raises OSError.
    """
    for attempt in range(TRIES):
        try:
            depot.put([(key, [data])])
            return
        except FileNotFoundError as error:
            fault = OSError(f"{depot.place} doesn't keep chunk {key[:16]}: {error}")
            if attempt == TRIES - 1:
                raise fault from error


def _adopt_files(vault: Vault, report: Report, progress: Progress | None) -> None:
    for place, depot in vault.depots.items():
        rows = vault.catalog.read("SELECT content FROM replica WHERE place = ?", (place,))
        named = {content for (content,) in rows}
        # What lies outside of the store's folder counts if a row names it (its copy was damaged).
        stats = {s.key: s for s in depot.entries() if s.own or s.key in named}
        batch: list[tuple[Header, int]] = []
        lost: set[str] = set()
        for number, (key, stat) in enumerate(stats.items()):
            header = _header(depot, key, report)
            if header is not None:
                batch.append((header, stat.used))
            elif (found := depot.stat(key)) is None or not found.own:
                lost.add(key)
            if len(batch) >= 256:
                _adopt(vault, place, batch, report)
            if progress is not None:
                progress(number + 1, len(stats))
        _adopt(vault, place, batch, report)
        gone = [content for content in named if content not in stats or content in lost]
        vault.catalog.forget(place, gone)
        report.dangling += len(gone)


def _header(depot: Depot, key: str, report: Report) -> Header | None:
    breathe()
    try:
        stat, data = depot.head(key, HEAD)
        header = parse_header(data, stat.bytes)
        if header.content != key:
            raise ChunkFault("name", "the file has another name than its content")
    except FileNotFoundError:
        return None
    except ChunkFault as fault:
        report.faults.append((depot.place, key, fault.kind))
        if fault.damaged:
            depot.quarantine(key, fault.kind)
        return None
    report.checked += 1
    report.bytes += header.file_bytes
    return header


def _adopt(vault: Vault, place: str, batch: list[tuple[Header, int]], report: Report) -> None:
    """Parents before children, so that the same first writer wins every time."""
    batch.sort(key=lambda pair: (pair[0].start, pair[0].content))
    known = {
        content
        for header, _ in batch
        for (content,) in vault.catalog.read(
            "SELECT content FROM replica WHERE place = ? AND content = ?", (place, header.content)
        )
    }
    depot, catalog = vault.depots[place], vault.catalog
    near = place == next(iter(vault.depots))

    def stands(key: str) -> bool:
        """Asked under the lock in which gc decides what goes: it may have decided meanwhile."""
        if near:
            return depot.stat(key) is not None
        return not catalog.read("SELECT 1 FROM lease WHERE chain = ?", (doomed(key, place),))

    while True:
        try:
            lost = catalog.record(place, batch, stands)
            break
        except FileNotFoundError:
            batch[:] = [pair for pair in batch if stands(pair[0].content)]
    if not near:  # gone before the row came; what a row names now stays
        new = [header.content for header, _ in batch if header.content not in known]
        gone = {content for content in new if depot.stat(content) is None}
        catalog.forget(place, gone)
        batch[:] = [pair for pair in batch if pair[0].content not in gone]
        lost = [content for content in lost if content not in gone]
    report.adopted += sum(h.content not in known for h, _ in batch) - len(lost)
    report.orphans += len(lost)
    batch.clear()


def verify(vault: Vault, progress: Progress | None = None) -> Report:
    """Hash every catalogued part, and check the database; damaged parts are quarantined.

    Files that no row names are counted, not touched: they are garbage, or a publish under way.
    Raises OSError, CatalogFault.
    """
    report = Report()
    with vault.pace.beside():
        report.problems = integrity(vault)
        _hash_all(vault, report, progress)
    return report


def _hash_all(vault: Vault, report: Report, progress: Progress | None) -> None:
    for place, depot in vault.depots.items():
        rows = vault.catalog.read(
            "SELECT r.content, p.bytes FROM replica AS r JOIN part AS p USING (content)"
            " WHERE r.place = ? ORDER BY r.content",
            (place,),
        )
        for number, (content, size) in enumerate(rows):
            fault = vault.verify(place, content)
            report.checked += 1
            report.bytes += size
            if fault is not None and fault.kind == "missing":
                report.dangling += 1
            elif fault is not None:
                report.faults.append((place, content, fault.kind))
            if progress is not None:
                progress(number + 1, len(rows))
        named = {content for content, _ in rows}
        report.orphans += sum(stat.own and stat.key not in named for stat in depot.entries())


def integrity(vault: Vault) -> list[str]:
    """Faults of the database itself, and of what its rows promise each other."""
    read = vault.catalog.read
    found = [str(row[0]) for row in read("PRAGMA integrity_check(20)") if row[0] != "ok"]
    found += [ADVICE] * bool(found)
    found += [
        f"foreign key of table {row[0]}, row {row[1]}" for row in read("PRAGMA foreign_key_check")
    ]
    checks = {
        "chunks without a part": "SELECT count(*) FROM chunk WHERE id NOT IN"
        " (SELECT chunk FROM part)",
        "parts without a replica": "SELECT count(*) FROM part WHERE content NOT IN"
        " (SELECT content FROM replica)",
        "parts whose places are wrong": "SELECT count(*) FROM part AS p WHERE EXISTS (SELECT 1 FROM"
        " replica AS r WHERE r.content = p.content AND instr(',' || p.places || ',',"
        " ',' || r.place || ',') = 0) OR (SELECT count(*) FROM replica AS r WHERE"
        " r.content = p.content) != 1 + length(p.places) - length(replace(p.places, ',', ''))",
        "places whose total is wrong": "SELECT count(*) FROM place AS p WHERE (p.used, p.parts) !="
        " (SELECT coalesce(sum(used), 0), count(*) FROM replica WHERE place = p.name)",
        "nodes whose tokens are incomplete": "SELECT count(*) FROM node AS n WHERE n.tokens > 0"
        " AND NOT EXISTS (SELECT 1 FROM run AS r WHERE r.session = n.session AND r.node = n.id)",
        "sessions without a tip": "SELECT count(*) FROM session AS s WHERE closed_at IS NULL AND"
        " NOT EXISTS (SELECT 1 FROM tip AS t WHERE t.session = s.id AND t.line = 0)",
    }
    for what, sql in checks.items():
        (count,) = read(sql)[0]
        if count:
            found.append(f"{count} {what}")
    return found
