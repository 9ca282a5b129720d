"""Where chunk bytes lie: a local directory, memory, an S3-compatible object store."""

from forkserve.store.depots.faulty import FaultyDepot
from forkserve.store.depots.local import LocalDepot
from forkserve.store.depots.memory import MemoryDepot
from forkserve.store.depots.protocol import Blob, Depot, Stat
from forkserve.store.depots.shared import SharedDepot
from forkserve.store.depots.url import depot_at

__all__ = [
    "Blob",
    "Depot",
    "FaultyDepot",
    "LocalDepot",
    "MemoryDepot",
    "SharedDepot",
    "Stat",
    "depot_at",
]
