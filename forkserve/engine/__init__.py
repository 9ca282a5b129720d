"""Backends: what runs the model.  Torch loads only when `LocalBackend` is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkserve.engine.mock import MockBackend
from forkserve.engine.protocol import Backend, Portable, Tokenizer
from forkserve.errors import MissingExtra

if TYPE_CHECKING:
    from forkserve.engine.local import LocalBackend

__all__ = ["Backend", "LocalBackend", "MockBackend", "Portable", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "LocalBackend":
        try:
            from forkserve.engine.local import LocalBackend
        except ModuleNotFoundError as error:
            module = (error.name or "").split(".")[0]
            if module == "forkserve":
                raise
            raise MissingExtra("The bundled engine", "engine", module) from error
        return LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
