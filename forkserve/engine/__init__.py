"""Backends: what runs the model.  Torch loads only when `LocalBackend` is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forkserve.engine.mock import MockBackend
from forkserve.engine.protocol import Backend, Portable, Tokenizer
from forkserve.errors import MissingExtra

if TYPE_CHECKING:
    from forkserve.engine.local import LocalBackend

__all__ = ["Backend", "LocalBackend", "MockBackend", "Portable", "Tokenizer"]


@contextmanager
def needs_engine_extra() -> Iterator[None]:
    """For imports of `engine.local`: a library that is not there becomes `MissingExtra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module == "forkserve":
            raise
        raise MissingExtra("The bundled engine", "engine", module) from error


def __getattr__(name: str) -> Any:
    if name == "LocalBackend":
        with needs_engine_extra():
            from forkserve.engine.local import LocalBackend
        return LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
