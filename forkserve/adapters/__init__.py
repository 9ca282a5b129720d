"""Agent loops and frameworks on a tree: each adapter is a module of its own.

A framework is loaded only by the adapter that is made for it, when that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ChatRenderer": "forkserve.adapters.templates",
    "ParsedToolCall": "forkserve.adapters.scanner",
    "ReactAgent": "forkserve.adapters.react",
    "ReactResult": "forkserve.adapters.react",
    "Scanner": "forkserve.adapters.scanner",
    "Tool": "forkserve.adapters.tools",
    "as_tool": "forkserve.adapters.tools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forkserve.adapters' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
