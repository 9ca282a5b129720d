"""A key for `CachePolicy` that survives forking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from langgraph.types import CachePolicy
from pydantic import BaseModel

from forkserve.adapters.langgraph.state import PRIVATE

__all__ = ["cache_key"]

_default_key: Any = CachePolicy().key_func


def cache_key(*args: Any, **kwargs: Any) -> str | bytes:
    """LangGraph's own key of the node's input without the adapter's fields.

    With the default key a cached node that is forked never hits: every run has refs of its own.
    A hit replays the stored output without calling the node, its ref included; a join resolves
    such a ref, copies its text, or re-opens.
    """
    key: str | bytes = _default_key(*(_public(arg) for arg in args), **kwargs)
    return key


def _public(value: Any) -> Any:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    elif is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if not str(k).startswith(PRIVATE)}
    return value
