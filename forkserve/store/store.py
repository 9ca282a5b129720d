"""A store: one directory with its catalog, its chunks, and the threads that move them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, get_args

from forkserve.errors import ConfigError, StoreError
from forkserve.store import codecs
from forkserve.store.behind import WriteBehind
from forkserve.store.budget import Budget
from forkserve.store.catalog import Catalog, Role
from forkserve.store.chunks import LOSSY
from forkserve.store.depots import Depot, LocalDepot, SharedDepot, depot_at
from forkserve.store.depots.shared import Foldered, local_part
from forkserve.store.host import HostMemory
from forkserve.store.identity import Fingerprint, fingerprint, lossy_of, weights_id
from forkserve.store.journal import TreeJournal
from forkserve.store.metrics import Meter
from forkserve.store.pace import Pace
from forkserve.store.policies import Lru, Policy
from forkserve.store.publish import Publisher
from forkserve.store.restore import Restorer
from forkserve.store.scrub import Scrubber
from forkserve.store.seal import Sealer, load_key
from forkserve.store.vault import Vault
from forkserve.values import positive, require_names

__all__ = ["Store"]


class Store:
    """Durable states in `folder`, which is made if it is missing.

    role: "owner" keeps sessions and is alone in that; "shared" publishes, looks up and collects
    beside others; "reader" changes nothing.
    format: of new chunks: raw, zstd, or int8 (lossy).  lossy: the engine may be given rows of lossy
    chunks; what it publishes then, in whatever format, is found by engines alone that may, too.
    verify_weights: hash the weights when an engine begins, whatever size and time their files have.
    encrypt: where the key of 64 hex digits is, a file or "env:NAME"; token ids and rows are then
    sealed on disk.
    full_sync: sync the catalog at every transaction, so that a power cut loses nothing either.
    far: more places to read from and to copy to, nearest first: an `S3Depot`, or a URL for
    `forkserve.store.depots.depot_at`.  Each needs a name (`place`) of its own.  Stores may share
    one: each has a folder there (`SharedDepot`); a `Depot` of your own belongs to one store.
    restore: "auto" brings rows back when that is predicted to be faster than computing them.
    queue: publishes that may wait.  force: take the store from an owner that cannot be checked.
    policy: what is stored without being asked and what goes first (`forkserve.store.policies`);
    default `Lru`, which stores only what `Engine.publish` is told to.

    Budgets in bytes, None for no limit.  budget_bytes: chunks on the disk; what is worth least
    goes, or moves to the first of `far`.  far_bytes: chunks in that place.  memory_bytes: rows in
    host memory, None for no such tier.  device_bytes: rows in the engine's pages; above it idle
    ones move to memory, while what runs may use the whole pool.
    write_behind: bring every chunk to the first of `far`, some time after it was stored here.
    scrub_bytes_s: hash what is on the disk again and again, at that rate.

    Raises StoreError (foreign, broken, newer, owned), ConfigError, MissingExtra.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        role: Role = "owner",
        *,
        format: str = "raw",
        lossy: bool = False,
        verify_weights: bool = False,
        encrypt: str | None = None,
        full_sync: bool = False,
        far: Sequence[Depot | str] = (),
        disk: Depot | None = None,
        restore: Literal["auto", "always", "never"] = "auto",
        queue: int = 2,
        budget_bytes: int | None = None,
        far_bytes: int | None = None,
        memory_bytes: int | None = None,
        device_bytes: int | None = None,
        write_behind: bool = False,
        scrub_bytes_s: float | None = None,
        policy: Policy | None = None,
        force: bool = False,
        **unknown: Never,
    ) -> None:
        known = ("folder", "role", *(Store.__init__.__kwdefaults__ or ()))
        require_names(unknown, known, "option '{}' of a store")
        _known("restore", restore, ("auto", "always", "never"))
        _known("role", role, get_args(Role))
        if format in LOSSY and not lossy:
            raise ConfigError(
                f"format={format!r} is lossy: what it stores is given to engines with lossy=True "
                "alone; say that as well, or take raw or zstd"
            )
        codecs.require(format)
        if isinstance(far, str) or not isinstance(far, Sequence):
            raise ConfigError(f"far={far!r} must be a list of places: far=['s3://bucket/prefix']")
        if (write_behind or far_bytes is not None) and not far:
            raise ConfigError("write_behind and far_bytes need a place in far=[...]")
        sizes = {"budget": budget_bytes, "far": far_bytes, "memory": memory_bytes}
        for name, value in {**sizes, "device": device_bytes}.items():
            if value is not None:
                positive(f"{name}_bytes", value, int)
        if device_bytes is not None and memory_bytes is None:
            raise ConfigError(f"device_bytes={device_bytes} needs memory_bytes=: how much may move")
        positive("queue", queue, int)
        if scrub_bytes_s is not None:
            positive("scrub_bytes_s", scrub_bytes_s, float)
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigError(f"policy={policy!r} has no publish(moment, seen) and value(held)")
        try:
            if not os.fspath(folder) or "\0" in os.fsdecode(folder):
                raise ValueError("a path is neither empty nor does it hold a zero byte")
            # The process may change its directory.
            self.folder = Path(os.path.abspath(os.fsdecode(folder)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{folder!r} is no directory for a store: {error}") from None
        self.device_bytes = device_bytes
        self._lossy = lossy
        self._verify_weights = verify_weights
        self.meter = Meter()
        self.moving: Callable[[], int] = lambda: 0  # moves between tiers that wait in an engine
        self.restore = restore
        self.sealer = Sealer(load_key(encrypt)) if encrypt is not None else None
        self.policy: Policy = policy if policy is not None else Lru()
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        try:
            places = [depot_at(one) if isinstance(one, str) else one for one in far]
            near = disk or LocalDepot(self.folder / "chunks", create=False)
            _distinct([near, *places])
            # Last of all: a wrong argument leaves nothing behind.
            if role != "reader":
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot use {self.folder} as a store: {error}") from error
        self.catalog = Catalog(self.folder, role, full_sync=full_sync, force=force)
        self.pace = Pace()
        try:
            places = [self._divided(place) for place in places]
            if role != "reader":
                _prepare([near, *places], disk is None)
            self.vault = Vault(
                self.catalog,
                [near, *places],
                format=format,
                sealer=self.sealer,
                pace=self.pace,
            )
            self.budgets = {
                place: Budget(self.vault, place, limit, self.policy)
                for place, limit in zip(self.vault.depots, (budget_bytes, far_bytes), strict=False)
                if limit is not None
            }
            self.vault.rooms.update({p: b.make_room for p, b in self.budgets.items()})
            self.publisher = Publisher(self.vault, queue, self.failed, self.meter, self.pace)
            self.memory = HostMemory(memory_bytes, self.policy) if memory_bytes else None
            self.restorer = Restorer(self.vault)
            may_write = role != "reader"
            self.behind: WriteBehind | None = None
            if write_behind and may_write:
                self.behind = WriteBehind(
                    self.vault, places[0].place, on_failure=self.failed, pace=self.pace
                )
            self.scrubber: Scrubber | None = None
            if scrub_bytes_s is not None and may_write:
                self.scrubber = Scrubber(
                    self.vault, scrub_bytes_s, on_failure=self.failed, pace=self.pace
                )
            if self.behind is not None:  # last: a scrubber that gets no thread leaves none
                self.behind.start()
        except BaseException:
            self.catalog.close()
            raise
        self._closed = False

    @property
    def near(self) -> str:
        """The place that chunks are written to first."""
        return next(iter(self.vault.depots))

    def _divided(self, place: Depot) -> Depot:
        """A further place as this store sees it, where the place can be divided between stores."""
        store = self.catalog.setting("store")
        return SharedDepot(place, store) if store and isinstance(place, Foldered) else place

    def identify(
        self, identity: Callable[[Callable[[Sequence[Path]], str]], Mapping[str, Any]]
    ) -> Fingerprint:
        """The fingerprint of what an engine over a backend keeps (its `Portable.identity`).

        Weights are hashed once a file, or each time with `verify_weights`.  Raises StoreError when
        the backend leaves anything open.
        """
        made = fingerprint(
            identity(lambda files: weights_id(files, self.catalog, self._verify_weights))
        )
        return lossy_of(made) if self._lossy else made

    def journal(
        self,
        made: Fingerprint,
        lock: AbstractContextManager[Any],
        meters: Callable[[str], Mapping[str, float]],
    ) -> TreeJournal:
        """Where an engine notes its sessions.  lock: the engine's.  meters: bills of a tenant."""
        return TreeJournal(self.catalog, made, lock, self.sealer, self.failed, meters)

    def failed(self, error: BaseException) -> None:
        """Count a failure that nobody waits for, and write it down if that is possible."""
        kind = type(error).__name__
        self.failures[kind] += 1
        self.meter.add("failures", error=kind)
        self.last_failure = str(error)
        self.catalog.event("failed", error=kind, message=str(error))

    def health(self) -> dict[str, Any]:
        """What went wrong so far, and how the queues stand.  Empty failures: all is durable."""
        return {
            "failures": dict(self.failures),
            "last_failure": self.last_failure,
            "published": self.publisher.finished,
            "dropped": self.publisher.dropped,
            "rested_s": self.pace.rested_s,
            "chunks_read": self.restorer.reads,
            "bytes_verified": self.vault.verified_bytes,
            "restore_bytes_per_ms": self.restorer.cost.rate,
        }

    def metrics(self) -> dict[str, Any]:
        """Numbers for a dashboard; `forkserve.store.metrics.prometheus` makes text of them.

        tiers: bytes, limit and parts of each place.  queued: what waits.  process: sums since this
        store was opened.  totals: since it was made.  Raises CatalogFault.
        """
        tiers: dict[str, dict[str, float | None]] = {}
        usage = self.catalog.usage()
        for place in self.vault.depots:
            used, parts = usage.get(place, (0, 0))
            budget = self.budgets.get(place)
            tiers[place] = {
                "bytes": used,
                "parts": parts,
                "limit": budget.limit if budget else None,
            }
        if self.memory is not None:
            memory = self.memory
            tiers["memory"] = {"bytes": memory.used, "parts": len(memory), "limit": memory.limit}
        waiting = self.catalog.read("SELECT place, count(*) FROM outbox GROUP BY place")
        queued = {"publish": self.publisher.queued, "move": self.moving()}
        queued |= {f"to_{place}": count for place, count in waiting}
        process = [
            {"name": name, "labels": dict(labels), "value": value}
            for name, labels, value in self.meter.samples()
        ]
        totals = self.catalog.counters()
        return {"tiers": tiers, "queued": queued, "process": process, "totals": totals}

    def close(self) -> None:
        """Finish what is queued, give ownership back, close files.  Idempotent.

        In a forked child it does nothing: threads, ownership and files are the parent's.
        """
        if self._closed or self.catalog.inherited:
            return
        self._closed = True
        self.publisher.close()
        if self.scrubber is not None:
            self.scrubber.close()
        if self.behind is not None:
            self.behind.close()
        self.restorer.close()
        if self.catalog.role != "reader":
            with suppress(StoreError):
                self.restorer.cost.save()
                self.restorer.memory_cost.save()
        self.catalog.close()
        for depot in self.vault.depots.values():
            depot.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _known(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known; {', '.join(choices)} are")


def _prepare(places: Sequence[Depot], ours: bool) -> None:
    """Make the folder of the first place, if it is `ours`, and clear up after writers that died.

    Called when the directory is known to hold our catalog, so that a refused one is not touched.
    """
    for number, place in enumerate(places):
        local = local_part(place)
        if local is None:
            continue
        try:
            if ours and number == 0:
                local.folder.mkdir(mode=0o700, exist_ok=True)
            local.tidy()
        except OSError as error:
            if number == 0:
                raise StoreError(f"cannot write to {local.folder}: {error}") from error
            # A further place that is away now is asked again when it is needed.


def _distinct(places: Sequence[Depot]) -> None:
    """Raise ConfigError when two places share a name or a directory: one would hide the other."""
    names: set[str] = set()
    folders: set[Path] = set()
    for depot in places:
        if not isinstance(depot, Depot):
            raise ConfigError(f"{depot!r} is no place for chunks: give a URL or a Depot")
        if not depot.place or "," in depot.place:
            raise ConfigError(
                f"a place called '{depot.place}' cannot be listed; give it a name without a comma"
            )
        if depot.place in names:
            raise ConfigError(
                f"two places are called '{depot.place}'; give each a name of its own: "
                "LocalDepot(folder, place='archive')"
            )
        names.add(depot.place)
        if isinstance(depot, LocalDepot):
            if depot.folder.resolve() in folders:
                raise ConfigError(f"{depot.folder} is given as two places")
            folders.add(depot.folder.resolve())
