"""The bundled engine: PyTorch over paged KV.  Importing this imports torch."""

from __future__ import annotations

from forkserve.engine.local.backend import LocalBackend

__all__ = ["LocalBackend"]
