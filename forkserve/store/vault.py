"""Chunks in and out: encode and seal, store and catalogue; open, verify, or set aside.

Order of writing: bytes durable in every place that has to hold them, then one catalog transaction.
A crash in between leaves files that no row names, never a row without its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from forkserve.store import codecs, faults
from forkserve.store.catalog import Catalog, Orphaned
from forkserve.store.chunks import (
    HEAD,
    Buffer,
    ChunkFault,
    Header,
    build,
    check_link,
    hash_parts,
    parse_header,
)
from forkserve.store.depots.protocol import Blob, Depot
from forkserve.store.identity import Fingerprint, Link, exact_of
from forkserve.store.lookups import Found
from forkserve.store.pace import Pace
from forkserve.store.seal import Sealer
from forkserve.store.soundness import Soundness

__all__ = ["TRIES", "Loaded", "Stored", "Vault"]

TRIES = 64  # each that fails is a gc that began before: as many as run at once may get in between
_STAGED = 8 << 20  # bytes held in memory before they are made durable


@dataclass(slots=True)
class Stored:
    """What a `Vault.put` did.  known: chunks that were there already; bytes: written anew."""

    written: int = 0
    known: int = 0
    bytes: int = 0
    diverged: int = 0


@dataclass(slots=True)
class Loaded:
    """A verified chunk.  payload: decoded rows; valid while this object lives.  place: it came
    from there."""

    found: Found
    payload: Buffer
    place: str = ""
    blob: Blob | None = field(default=None, repr=False)


class Vault(Soundness):
    """Depots in order of preference for reading, under one catalog.

    format: of what is written.  sealer: with which it is sealed, and what is read is opened.  The
    first depot is where chunks are written; `copy_one` brings them to others.  pace: how fast a
    thread may work beside passes.  Raises StoreError for an unknown format.
    """

    def __init__(
        self,
        catalog: Catalog,
        depots: Sequence[Depot],
        *,
        format: str = "raw",
        sealer: Sealer | None = None,
        pace: Pace | None = None,
    ) -> None:
        codecs.require(format)
        super().__init__(catalog, depots)
        self.pace = pace or Pace()
        self.format = format
        self.sealer = sealer
        # By place, asked before a write: for how many bytes, and the chains that they go on from.
        self.rooms: dict[str, Callable[[int, Collection[str]], object]] = {}
        self.stored: Callable[[], None] = lambda: None  # told when chunks were catalogued
        self._key = sealer.key_id.hex() if sealer is not None else ""

    # ---------------------------------------------------------------- writing

    def _absent(self, made: Fingerprint, links: Sequence[Link]) -> list[Link]:
        """Links whose bytes are not there: not catalogued, or their file has gone or changed size.

        A row is not believed: a lost file is written again (and the row was wrong).  What another
        key has sealed counts as absent, and stays beside what is written.  What is there begins its
        grace anew: it is published once more, and gc must not take it as old.
        """
        listed = self.catalog.listed(made, links, self._key)
        mine = ((part for part in parts if part.format == self.format) for parts in listed)
        there = [
            next((part.content for part in parts if self._present(part)), None) for parts in mine
        ]
        known = [content for content in there if content is not None]
        kept = self.catalog.renew(self._first.place, known) if known else set[str]()
        return [link for link, content in zip(links, there, strict=True) if content not in kept]

    def _present(self, found: Found) -> bool:
        depot = self.depots.get(self._first.place)
        if depot is None or depot.place not in found.places:
            return False
        stat = depot.stat(found.content)
        if stat is None or stat.bytes != found.bytes:
            return False
        return found.key is not None or self._opens(depot, found.content)

    def _opens(self, depot: Depot, content: str) -> bool:
        """Whether a part of which the key is not noted opens here; that is noted then."""
        try:
            stat, data = depot.head(content, HEAD)
            header = parse_header(data, stat.bytes)
        except (OSError, ChunkFault):
            return False
        self.catalog.learn(header)
        return header.key == self._key

    def put(
        self,
        made: Fingerprint,
        links: Sequence[Link],
        payload: Callable[[Link], Buffer],
        stored: Callable[[], None] = lambda: None,
    ) -> Stored:
        """Make chunks durable and catalogue them, root first.

        payload: the rows of a link, asked for one at a time.  stored: called when all that was
        asked for so far is durable, and its buffers are free.  Raises OSError when a depot fails
        and CatalogFault when the catalog does; what was finished before stays.
        """
        report, written = Stored(), set[bytes]()
        for attempt in range(TRIES):
            absent = self._absent(made, links)
            written.update(link.id for link in absent)
            report.known = len(links) - len(written)
            try:
                self._put(made, absent, payload, stored, report, {link.id for link in links})
                break
            except Orphaned:  # gc took what this goes on from: that is written once more, too
                if attempt == TRIES - 1:
                    raise
        return report

    def _put(
        self,
        made: Fingerprint,
        links: Sequence[Link],
        payload: Callable[[Link], Buffer],
        stored: Callable[[], None],
        report: Stored,
        chain: Collection[bytes],
    ) -> None:
        staged: list[tuple[Header, tuple[Buffer, ...]]] = []
        size = 0
        for link in links:
            staged.append(self.pack(made, link, payload(link)))
            size += staged[-1][0].file_bytes
            faults.reach("publish.captured")
            if size >= _STAGED:
                self._store(staged, report, chain)
                staged, size = [], 0
                stored()
        self._store(staged, report, chain)

    def pack(
        self, made: Fingerprint, link: Link, rows: Buffer, form: str | None = None
    ) -> tuple[Header, tuple[Buffer, ...]]:
        """Header and file parts of one chunk."""
        form = form or self.format
        stored = codecs.encode(form, rows, made.layout)
        tokens, key_id = link.tokens, bytes(8)
        if self.sealer is not None:
            key_id = self.sealer.key_id
            tokens = self.sealer.seal(tokens, b"tokens" + link.id)
            stored = self.sealer.seal(stored, b"payload" + link.id)
        header, raw = build(
            Header(
                fingerprint=made.digest,
                meta=made.text,
                parent=link.parent,
                chain=link.id,
                start=link.start,
                count=link.count,
                tokens=tokens,
                format=form,
                stored_bytes=len(stored),
                raw_bytes=len(rows),
                payload_hash=hash_parts([stored]),
                sealed=self.sealer is not None,
                key_id=key_id,
            )
        )
        return header, (raw, stored)

    def adopt(self, staged: list[tuple[Header, tuple[Buffer, ...]]]) -> None:
        """Make chunks durable and catalogue them that exist as file parts; verified by the caller.

        Raises OSError, CatalogFault.
        """
        self._store(staged)

    def _store(
        self,
        staged: list[tuple[Header, tuple[Buffer, ...]]],
        report: Stored | None = None,
        after: Collection[bytes] = (),
    ) -> None:
        if not staged:
            return
        depot = self._first
        room = self.rooms.get(depot.place)
        if room is not None:
            needed = sum(_blocks(header.file_bytes) for header, _ in staged)
            room(needed, {header.parent.hex() for header, _ in staged})
        for attempt in range(TRIES):
            try:
                stats = depot.put([(header.content, parts) for header, parts in staged])
                faults.reach("publish.stored")
                pairs = [(h, s.used) for (h, _), s in zip(staged, stats, strict=True)]
                lost = self.catalog.record(
                    *(depot.place, pairs, lambda key: depot.stat(key) is not None),
                    fresh=True,
                    after=after,
                )
                break
            except Orphaned:
                raise
            except FileNotFoundError:  # an orphan that gc took while we relied on it: write it anew
                if attempt == TRIES - 1:
                    raise
        faults.reach("publish.catalogued")
        if lost:
            self._first.delete(lost)
        self.stored()
        if report is not None:
            report.written += len(staged) - len(lost)
            report.diverged += len(lost)
            report.bytes += sum(header.file_bytes for header, _ in staged)

    def copy_one(self, content: str, source: str, target: str) -> int:
        """Copy a part from one place to another, verified, and note its receipt; returns its bytes.

        Raises ChunkFault when the source is damaged (it is quarantined then), FileNotFoundError
        when it has gone, OSError, StoreError (the target's budget), CatalogFault.
        """
        origin, depot = self.depots[source], self.depots[target]
        blob = origin.open(content)
        try:
            try:
                header = self._verify(blob, source, content)
            except ChunkFault as fault:
                self._refuse(origin, content, fault)
                raise
            size, room = len(blob.data), self.rooms.get(target)
            if room is not None:
                room(_blocks(size), [header.parent.hex()])
            stands = self.catalog.intend(content, target)  # gc takes no object that is written
            try:
                (stat,) = depot.put([(content, [blob.data])])
            except FileNotFoundError as error:  # the bucket or the directory: not the source
                raise OSError(f"{target} lacks what it was to be written to: {error}") from error
            faults.reach("copy.stored")
            lost = self.catalog.record(target, [(header, stat.used)], stands)
            if lost:  # meanwhile other bytes were stored for this chunk
                depot.delete(lost)
            faults.reach("copy.noted")
        finally:
            blob.close()
        return size

    # ---------------------------------------------------------------- reading

    def find(self, made: Fingerprint, links: Sequence[Link]) -> list[Found]:
        """The longest prefix of a chain that may be given to an engine of fingerprint `made`.

        An exact one gets exact rows alone.  A lossy one gets what there is for either, exact parts
        before others.  Parts that another key has sealed are not there.
        """
        if not made.lossy:
            return self.catalog.lookup(made, links, key=self._key)
        return self.catalog.lookup((exact_of(made), made), links, lossy=True, key=self._key)

    def load(self, found: Found, places: Sequence[str] | None = None) -> Loaded | None:
        """The verified rows of a chunk from the first place that has them sound; None if none has.

        places: only these.
        Damage is quarantined and struck from the catalog at once.  A chunk that is sound but not
        for us (other key, newer version) is a miss and stays.  A place that cannot be read now is
        skipped.
        """
        for place in sorted(found.places if places is None else places, key=self._rank):
            depot = self.depots.get(place)
            if depot is None:
                continue
            try:
                loaded = self._open(depot, found)
            except ChunkFault as fault:
                self._refuse(depot, found.content, fault)
            except FileNotFoundError:
                self._strike(depot, found.content)
            except OSError as error:
                self.catalog.event(
                    "read_failed", place=place, content=found.content, error=str(error)
                )
            else:
                return loaded
        return None

    def _rank(self, place: str) -> int:
        order = list(self.depots)
        return order.index(place) if place in order else len(order)

    def _open(self, depot: Depot, found: Found) -> Loaded:
        made = found.made
        blob = depot.open(found.content)
        try:
            header = self._verify(blob, depot.place, found.content)
            tokens = header.tokens
            if header.sealed:
                if self.sealer is None or self.sealer.key_id != header.key_id:
                    raise ChunkFault("key", "the chunk is sealed with another key")
                tokens = self.sealer.unseal(tokens, b"tokens" + header.chain)
            check_link(header, found.link, made.digest, tokens)
            stored: Buffer = blob.data[header.length :]
            if header.sealed and self.sealer is not None:
                stored = self.sealer.unseal(stored, b"payload" + header.chain)
            if header.layout != made.layout:
                raise ChunkFault("identity", "the chunk has another layout")
            payload = codecs.decode(header.format, stored, header.raw_bytes, made.layout)
        except BaseException:
            blob.close()
            raise
        return Loaded(found, payload, depot.place, blob)


def _blocks(size: int) -> int:
    """What a file of `size` bytes takes on a disk, at most (blocks of 4 KiB, and some slack)."""
    return (size + 4095) // 4096 * 4096 + 4096
