"""Backends: what runs the model.

Names load on first use: torch with `LocalBackend`; tests and benchmarks of the GPU kernels get by
with torch, Triton and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forkserve.errors import MissingExtra

if TYPE_CHECKING:
    from forkserve.engine.local import LocalBackend
    from forkserve.engine.mock import MockBackend
    from forkserve.engine.protocol import Backend, Portable, Tokenizer

_HOMES = {
    "Backend": "protocol",
    "LocalBackend": "local",
    "MockBackend": "mock",
    "Portable": "protocol",
    "Tokenizer": "protocol",
}

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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOMES[name]}"
    if name != "LocalBackend":
        return getattr(import_module(home), name)
    with needs_engine_extra():
        return import_module(home).LocalBackend
