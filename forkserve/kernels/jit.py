"""What every Triton kernel here needs: the import, the interpreter's flag, and how it is compiled.

The modules import without Triton; a kernel is launched only where Triton is there.  An operator
takes the kernel's route for tensors on a GPU, and for any tensor under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "INTERPRETED",
    "TRITON",
    "Case",
    "ceil_div",
    "jit",
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


def jit(function: Any) -> Any:
    """triton.jit where Triton is there; else the bare function, which nothing calls."""
    return triton.jit(function) if TRITON else function


@dataclass(frozen=True, slots=True)
class Case:
    """One specialisation to compile ahead of time.

    types: Triton's name of each runtime argument ("*bf16", "i32"); constants: compile-time ones.
    aligned: arguments that are multiples of 16, besides the pointers.  main: a configuration that
    a model really runs with, which must not spill registers.  targets: names in
    `forkserve.kernels.compile.TARGETS` that it is for; all, if there are none.
    """

    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 2
    main: bool = True
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
