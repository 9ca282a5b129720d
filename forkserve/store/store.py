"""A store: one directory with its catalog, its chunks, and the threads that move them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from forkserve.errors import ConfigError, StoreError
from forkserve.store.budget import Budget
from forkserve.store.catalog import Catalog, Role
from forkserve.store.depots import Depot, LocalDepot
from forkserve.store.identity import Fingerprint, fingerprint, weights_id
from forkserve.store.journal import TreeJournal
from forkserve.store.policies import Lru, Policy
from forkserve.store.publish import Publisher
from forkserve.store.restore import Restorer
from forkserve.store.seal import Sealer, load_key
from forkserve.store.vault import Vault

__all__ = ["Store"]


class Store:
    """Durable states in `folder`, which is made if it is missing.

    role: "owner" keeps sessions and is alone in that; "shared" publishes, looks up and collects
    beside others; "reader" changes nothing.
    format: of new chunks: raw, zstd, or int8 (lossy).  lossy: may lossy chunks be served.
    encrypt: where the key of 64 hex digits is, a file or "env:NAME"; token ids and rows are then
    sealed on disk.
    full_sync: sync the catalog at every transaction, so that a power cut loses nothing either.
    far: more places to read from and to copy to, such as an `S3Depot`, nearest first.
    restore: "auto" brings rows back when that is predicted to be faster than computing them.
    budget_bytes: most that chunks may take on the disk; what is worth least goes, or moves to the
    first of `far`.  policy: what is stored without being asked and what goes first
    (`forkserve.store.policies`); default `Lru`, which stores only what `Engine.publish` is told to.
    queue: publishes that may wait.  force: take the store from an owner that cannot be checked.

    Raises StoreError (foreign, broken, newer, owned), ConfigError, MissingExtra.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        role: Role = "owner",
        *,
        format: str = "raw",
        lossy: bool = False,
        encrypt: str | None = None,
        full_sync: bool = False,
        far: Sequence[Depot] = (),
        disk: Depot | None = None,
        restore: Literal["auto", "always", "never"] = "auto",
        queue: int = 2,
        budget_bytes: int | None = None,
        policy: Policy | None = None,
        force: bool = False,
    ) -> None:
        if restore not in ("auto", "always", "never"):
            raise ConfigError(f"restore='{restore}' is not known; auto, always and never are")
        self.folder = Path(folder)
        self.restore = restore
        self.sealer = Sealer(load_key(encrypt)) if encrypt is not None else None
        self.policy: Policy = policy if policy is not None else Lru()
        self.budget: Budget | None = None
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        try:
            if role != "reader":
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            near = disk or LocalDepot(self.folder / "chunks", create=role != "reader")
        except OSError as error:
            raise StoreError(f"cannot use {self.folder} as a store: {error}") from error
        self.catalog = Catalog(self.folder, role, full_sync=full_sync, force=force)
        try:
            self.vault = Vault(
                self.catalog, [near, *far], format=format, lossy=lossy, sealer=self.sealer
            )
            if budget_bytes is not None:
                self.budget = Budget(self.vault, near.place, budget_bytes, self.policy)
                self.vault.make_room = self.budget.make_room
            self.publisher = Publisher(self.vault, queue, self.failed)
            self.restorer = Restorer(self.vault)
        except BaseException:
            self.catalog.close()
            raise
        self._closed = False

    def identify(
        self, identity: Callable[[Callable[[Sequence[Path]], str]], Mapping[str, Any]]
    ) -> Fingerprint:
        """The fingerprint of a backend (its `Portable.identity`); weights are hashed once a file.

        Raises StoreError when the backend leaves anything open.
        """
        return fingerprint(identity(lambda files: weights_id(files, self.catalog)))

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
        self.last_failure = str(error)
        self.catalog.event("failed", error=kind, message=str(error))

    def health(self) -> dict[str, Any]:
        """What went wrong so far, and how the queues stand.  Empty failures: all is durable."""
        return {
            "failures": dict(self.failures),
            "last_failure": self.last_failure,
            "published": self.publisher.finished,
            "dropped": self.publisher.dropped,
            "chunks_read": self.restorer.reads,
            "bytes_verified": self.vault.verified_bytes,
            "restore_bytes_per_ms": self.restorer.cost.rate,
        }

    def close(self) -> None:
        """Finish what is queued, give ownership back, close files.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.publisher.close()
        self.restorer.close()
        if self.catalog.role != "reader":
            with suppress(StoreError):
                self.restorer.cost.save()
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
