"""Every error a user can meet.

::

    ForkServeError
    ├── ConfigError           a setting is unknown, out of range or contradictory
    │   └── MissingExtra      a part needs an optional dependency that is not installed
    ├── SessionError          session unknown, duplicate, closed or busy in another thread
    ├── NodeError             node unknown, dead, of a stale generation, or in the wrong mode
    ├── OutOfPages            the page pool is full and nothing could be evicted
    ├── AdmissionRefused      the planner or a queue refused the work, with its reason
    ├── ContextOverflow       the sequence would be longer than the model's context
    ├── BackendError          the engine loop or its backend failed
    ├── ModelError            weights or tokenizer missing, corrupt or unsupported
    ├── StoreError            a durable store is corrupt, incompatible, newer or locked
    └── AdapterError          a framework adapter was used against its contract

Catch `ForkServeError` to catch them all.  A message says what was wrong, with the numbers, and
what to do about it.
"""

from __future__ import annotations

from forkserve.installing import install_extra

__all__ = [
    "AdapterError",
    "AdmissionRefused",
    "BackendError",
    "ConfigError",
    "ContextOverflow",
    "ForkServeError",
    "MissingExtra",
    "ModelError",
    "NodeError",
    "OutOfPages",
    "SessionError",
    "StoreError",
]


class ForkServeError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(ForkServeError, ValueError):
    """A setting or argument is unknown, out of range, or contradicts another one."""


class MissingExtra(ConfigError, ImportError):
    """A part of ForkServe needs an optional dependency that is not installed."""

    def __init__(self, part: str, extra: str, module: str) -> None:
        super().__init__(
            f"{part} needs the module '{module}', which is not installed; "
            f"install it with: {install_extra(extra)}"
        )
        self.extra = extra


class SessionError(ForkServeError, LookupError):
    """A session is unknown, already open, closed, or in use by another thread."""


class NodeError(ForkServeError, LookupError):
    """A node is unknown, dead, of a stale generation, or in a mode that forbids the call."""


class OutOfPages(ForkServeError, MemoryError):
    """The page pool cannot hold what was asked, after everything evictable was evicted."""

    def __init__(self, needed: int, free: int, capacity: int, hint: str = "") -> None:
        super().__init__(
            f"{needed} more KV pages are needed but only {free} of {capacity} can be had; "
            + (hint or "close sessions, abort branches, or raise capacity_pages")
        )
        self.needed = needed
        self.free = free
        self.capacity = capacity


class AdmissionRefused(ForkServeError):
    """Work was refused before it cost anything; `reason` is a stable word, the message explains."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{message} [{reason}]")
        self.reason = reason


class ContextOverflow(ForkServeError, ValueError):
    """A sequence would be longer than the model's context."""

    def __init__(self, wanted: int, limit: int, what: str = "sequence") -> None:
        super().__init__(
            f"{what} of {wanted} tokens is longer than the model's context of {limit}; "
            "shorten the prompt or lower max_tokens"
        )
        self.wanted = wanted
        self.limit = limit


class BackendError(ForkServeError, RuntimeError):
    """The backend or the engine loop failed; the first cause is chained as ``__cause__``."""


class ModelError(ForkServeError):
    """Weights or tokenizer are missing, corrupt, or of an unsupported kind."""


class StoreError(ForkServeError):
    """A durable store is corrupt, incompatible, of a newer version, or locked."""


class AdapterError(ForkServeError):
    """A framework adapter was used against its contract."""
