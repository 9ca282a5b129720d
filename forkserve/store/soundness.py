"""Whether stored bytes are what they should be, and what happens to those that are not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from forkserve.errors import StoreError
from forkserve.store.catalog import Catalog
from forkserve.store.chunks import ChunkFault, Header, check_payload, parse_header
from forkserve.store.depots.protocol import Blob, Depot

__all__ = ["Soundness"]

_log = logging.getLogger(__name__)


class Soundness:
    """The part of `Vault` that hashes chunks, and sets aside and strikes those that are damaged."""

    def __init__(self, catalog: Catalog, depots: Sequence[Depot]) -> None:
        self.catalog = catalog
        self.depots = {depot.place: depot for depot in depots}
        self.verified_bytes = 0  # hashed at first open in this process
        self._first = depots[0]
        self._sound: dict[tuple[str, str], tuple[int, ...]] = {}  # (place, content) -> stamp
        self._lock = threading.Lock()

    def _verify(self, blob: Blob, place: str, content: str) -> Header:
        """Header of an open chunk; every byte is hashed unless this very file was before."""
        data = blob.data
        header = parse_header(data, len(data))
        if header.content != content:
            raise ChunkFault("name", f"the file under {content[:16]} is {header.content[:16]}")
        if self._sound.get((place, content)) != blob.stat.stamp:
            check_payload(header, data[header.length :])
            with self._lock:
                self.verified_bytes += len(data)
                self._sound[place, content] = blob.stat.stamp
        return header

    def verify(self, place: str, content: str) -> ChunkFault | None:
        """Hash one stored part again, whatever was hashed before; a damaged one is quarantined.

        None, too, for one that another process has collected meanwhile, or writes just now.  Raises
        OSError when the place cannot be read.
        """
        depot = self.depots[place]
        self._sound.pop((place, content), None)
        try:
            blob = depot.open(content)
        except FileNotFoundError:
            if not self._strike(depot, content):
                return None
            return ChunkFault("missing", f"chunk {content[:16]} is gone")
        try:
            self._verify(blob, place, content)
        except ChunkFault as fault:
            blob.close()
            self._refuse(depot, content, fault)
            return fault
        blob.close()
        return None

    def _refuse(self, depot: Depot, content: str, fault: ChunkFault) -> None:
        if not fault.damaged:
            self.catalog.event("unusable", place=depot.place, content=content, why=fault.kind)
            return
        if self.catalog.role != "reader":  # which changes nothing
            try:
                depot.quarantine(content, fault.kind)
            except OSError as error:  # a read-only disk: the row goes, the file stays
                _log.warning("chunk %s could not be set aside: %s", content[:16], error)
        self._strike(depot, content, fault.kind, str(fault))

    def _strike(
        self, depot: Depot, content: str, kind: str = "missing", message: str = "the file is gone"
    ) -> bool:
        """Take a part out of the catalog.

        False for a missing one if its row is gone as well (it was collected), or if it was written
        anew meanwhile.
        """
        near, again = depot is self._first, kind == "missing"
        with self._lock:
            self._sound.pop((depot.place, content), None)

        def present(key: str) -> bool:
            return again and depot.stat(key) is not None

        named = "SELECT 1 FROM replica WHERE content = ? AND place = ?"
        try:
            if again and not self.catalog.read(named, (content, depot.place)):
                return False  # a reader, which can strike nothing, sees that as well
            # Near: asked under the lock in which others note what they have written.
            if not near and present(content):
                return False
            gone = self.catalog.forget(depot.place, [content], present if near else None)
            if again and not gone:
                return False
        except (StoreError, OSError) as error:
            # It is a miss every time, until the catalog can be written.
            _log.warning("the catalog still lists chunk %s: %s", content[:16], error)
        _log.warning("chunk %s in %s is unusable: %s", content[:16], depot.place, message)
        self.catalog.event("quarantine", place=depot.place, content=content, why=kind)
        self.catalog.count(f"unusable/{depot.place}/{kind}")
        return True
