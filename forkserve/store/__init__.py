"""Durable continuations: trees in SQLite, KV in chunk files, named and verified."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkserve.store.publish import Publication
    from forkserve.store.store import Store

__all__ = ["Publication", "Store"]

_HOMES = {"Publication": "publish", "Store": "store"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
