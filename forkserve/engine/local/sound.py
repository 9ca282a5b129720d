"""What a model's files say must make sense before anything is made from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

from forkserve.engine.local.spec import ModelSpec
from forkserve.errors import ForkServeError, ModelError

__all__ = ["checked", "finite", "readable", "whole"]

_LARGEST = 1 << 24  # of a size; no model comes near
_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context")
_NUMBERS = ("eps", "attn_scale", "attn_softcap", "final_softcap", "embed_scale")


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Values of a kind that nobody expects in a file become a `ModelError` that names it."""
    try:
        yield
    except ForkServeError:
        raise
    except MemoryError as error:
        raise ModelError(f"{where}: not enough memory for what it describes") from error
    except Exception as error:
        raise ModelError(
            f"{where} holds a value that makes no sense: {type(error).__name__}: {error}"
        ) from error


def whole(value: Any, what: str, where: str) -> int:
    """A size as a file gives it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ModelError(
            f"{where}: {what} is {value!r}; a whole number from 1 to {_LARGEST} is expected"
        )
    return value


def checked(spec: ModelSpec, where: str) -> ModelSpec:
    """The spec, if a decoder of these numbers can be built."""
    for name in _SIZES:
        whole(getattr(spec, name), name, where)
    for name in _NUMBERS:
        value = getattr(spec, name)
        if isinstance(value, str) or not isfinite(value) or value < 0:
            raise ModelError(f"{where}: {name} is {value!r}; a finite number from 0 on is expected")
    if spec.heads % spec.kv_heads:
        raise ModelError(
            f"{where}: {spec.heads} heads do not share {spec.kv_heads} heads of keys and values"
        )
    if spec.head_dim % 2:
        raise ModelError(f"{where}: heads of {spec.head_dim} values cannot be rotated in pairs")
    for table in [rope.within(end) for rope in spec.ropes for end in (1, spec.context)]:
        turns = table.inv_freq(spec.head_dim, None)
        if not bool(turns.isfinite().all()) or not isfinite(table.magnitude):
            raise ModelError(f"{where}: rotary scaling '{table.kind}' gives no finite frequencies")
    return spec


def finite(tensor: torch.Tensor, name: str, where: str) -> None:
    """Refuse NaN and infinite weights: whatever they reach is noise."""
    if tensor.numel() and not all(bool(end.isfinite()) for end in tensor.aminmax()):
        raise ModelError(f"{where}: tensor '{name}' holds NaN or infinite values")
