"""Durable continuations: trees in SQLite, KV in chunk files, named and verified.

`Store`, and what it is given: policies and places.  What is done to a store is in modules of its
own: `admin`, `bundle`, `collect`, `rebuild`, `scrub`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkserve.store.depots.local import LocalDepot
    from forkserve.store.depots.protocol import Depot
    from forkserve.store.depots.s3 import S3Depot
    from forkserve.store.policies import Held, KeepSession, Lru, PersistPrefix, Policy
    from forkserve.store.publish import Publication
    from forkserve.store.store import Store

__all__ = [
    "Depot",
    "Held",
    "KeepSession",
    "LocalDepot",
    "Lru",
    "PersistPrefix",
    "Policy",
    "Publication",
    "S3Depot",
    "Store",
]

_HOMES = {
    "Depot": "depots.protocol",
    "LocalDepot": "depots.local",
    "Publication": "publish",
    "S3Depot": "depots.s3",
    "Store": "store",
    **dict.fromkeys(("Held", "KeepSession", "Lru", "PersistPrefix", "Policy"), "policies"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
