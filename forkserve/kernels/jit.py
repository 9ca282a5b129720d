"""What every Triton kernel here needs: the import, the interpreter's flag, and how it is compiled.

The modules import without Triton; a kernel is launched only where Triton is there.  An operator
takes the kernel's route for tensors on a GPU, and for any tensor under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = [
    "EXACT",
    "EXACT_DOT",
    "INTERPRETED",
    "TRITON",
    "Case",
    "ceil_div",
    "jit",
    "jit_for_any",
    "next_power",
    "runs_kernels",
    "tl",
    "triton",
]


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "triton":
        raise
    triton = tl = None

TRITON = triton is not None
# Read when the kernels are defined, as Triton itself does.
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Options of every launch: a compiler that may fuse a product and a sum may do so in one shape of a
# kernel and not in another, and then a row's bits would depend on the shape that its batch chose.
EXACT: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
# AMD's matrix instructions come in two sizes, which need not round alike: this one, always.
EXACT_DOT: dict[str, Any] = EXACT
if not INTERPRETED and torch.version.hip is not None:
    EXACT_DOT = {**EXACT, "matrix_instr_nonkdim": 16}


def jit(function: Any) -> Any:
    """triton.jit where Triton is there; else the bare function, which nothing calls."""
    return triton.jit(function) if TRITON else function


def jit_for_any(*arguments: str) -> Callable[[Any], Any]:
    """`jit`, with one kernel for all values of these arguments, 1 and multiples of 16 too."""
    if not TRITON:
        return jit
    return partial(triton.jit, do_not_specialize=list(arguments))


@dataclass(frozen=True, slots=True)
class Case:
    """One specialisation to compile ahead of time.

    types: Triton's name of each runtime argument ("*bf16", "i32"); constants: compile-time ones.
    aligned: arguments that are multiples of 16, besides the pointers.  targets: names in
    `forkserve.kernels.compile.TARGETS` that it is for; all, if there are none.
    """

    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 2
    targets: tuple[str, ...] = ()


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor run as Triton kernels."""
    return INTERPRETED or (TRITON and tensor.is_cuda)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
