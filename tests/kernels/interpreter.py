"""Triton's interpreter without work that it does over and over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["patch_once"]


def patch_once() -> None:
    """From now on the language is made interpretable once in a launch.

    Triton's interpreter goes through the whole language at every call of one kernel function by
    another, `tl.sum` included, and exchanges what it has exchanged already: half of the time of a
    small launch.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if patch.__name__ != "_patch_lang":
        return
    seen: dict[Callable[..., Any], frozenset[str]] = {}
    patched: set[str] = set()  # in this launch

    def lean_patch(function: Callable[..., Any]) -> Any:
        if function not in seen:
            found = filter(inspect.ismodule, function.__globals__.values())
            seen[function] = frozenset(m.__name__ for m in found if m in (tl, tl.core))
        if seen[function] <= patched:
            return None
        patched.update(seen[function])
        return patch(function)

    def lean_launch(self: Any, *args: Any, **named: Any) -> Any:
        patched.clear()  # a launch takes its changes back at its end
        return launch(self, *args, **named)

    interpreter._patch_lang = lean_patch
    interpreter.GridExecutor.__call__ = lean_launch
