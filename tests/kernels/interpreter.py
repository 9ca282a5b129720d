"""Triton's interpreter without work that it does over and over, or for nothing.

No value that a kernel computes, and no check of one, is another for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["patch_once"]


def patch_once() -> None:
    """From now on a launch takes about half as long."""
    from triton.runtime import interpreter

    if interpreter._patch_lang.__name__ == "_patch_lang":
        _patch_the_language_once()
        _share_types()
        _check_no_sum_in_vain()


def _patch_the_language_once() -> None:
    """In a launch, not at every call of one kernel function by another, `tl.sum` included."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
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


def _share_types() -> None:
    """A block's type is made once for its element and shape, and so is what a tensor says of it.

    Every operation makes several, all of them lists of constants that are wrapped one by one.
    """
    from triton.language import core

    begin_block, begin_tensor = core.block_type.__init__, core.tensor.__init__
    to_ir = core.block_type.to_ir

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        known = element_ty.__dict__.setdefault("known_blocks", {})
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in known:
            begin_block(self, element_ty, shape)
            known[sizes] = self.__dict__
        self.__dict__ = known[sizes]

    def ir(self: Any, builder: Any) -> Any:
        made = self.__dict__.setdefault("known_ir", {})
        if builder not in made:
            made[builder] = to_ir(self, builder)
        return made[builder]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        said = type.__dict__.get("known_tensor")
        if said is None:
            begin_tensor(self, handle, type)
            type.known_tensor = {k: v for k, v in self.__dict__.items() if k != "handle"}
        else:
            self.__dict__.update(said)
            self.handle = handle

    core.block_type.__init__ = block
    core.block_type.to_ir = ir
    core.tensor.__init__ = tensor


def _check_no_sum_in_vain() -> None:
    """Without `debug`, sums and products are computed in 64 bits too, and then not compared."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def lean(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = lean
