"""Weights of linear layers, packed for the native products."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError

__all__ = ["KINDS", "PANEL", "Packed", "PackedLinear", "pack", "pointer"]

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "w8a16": 3}
PANEL = 48  # outputs packed together, as in gemm.h
Array = npt.NDArray[Any]


class Packed(ctypes.Structure):
    """`fs::Packed` of gemm.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("kind", ctypes.c_int),
    )


class PackedLinear:
    """`packed` names memory that `arrays` keep alive."""

    __slots__ = ("arrays", "packed")

    def __init__(self, packed: Packed, arrays: tuple[Array | None, ...]) -> None:
        self.packed = packed
        self.arrays = arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, scales and bias."""
        return sum(array.nbytes for array in self.arrays if array is not None)


def pack(
    library: ctypes.CDLL,
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None,
    kind: str,
    threads: int,
) -> PackedLinear:
    """weight [N, K] float32, bias [N] -> the weights in `kind`, one of `KINDS`.

    bfloat16 rounds to nearest even.  int8 keeps integers in -127..127 with a bfloat16 scale for
    every 32 weights of a row.  Raises `BackendError` where the system gives no threads.
    """
    n, k = weight.shape
    weight = np.ascontiguousarray(weight, np.float32)
    sizes = (KINDS[kind], ctypes.c_int64(n), ctypes.c_int64(k))
    library.fs_packed_bytes.restype = ctypes.c_int64
    data = _large(library.fs_packed_bytes(*sizes))
    shift = None
    if bias is not None:
        shift = np.zeros(-(-n // PANEL) * PANEL, np.float32)
        shift[:n] = bias
    if library.fs_pack(sizes[0], pointer(weight), *sizes[1:], pointer(data), threads):
        raise BackendError(f"cannot start {threads} threads to pack weights; give fewer threads")
    return PackedLinear(Packed(pointer(data), pointer(shift), n, k, sizes[0]), (data, shift))


def pointer(array: Array | None) -> ctypes.c_void_p | None:
    """Where an array stands, or null."""
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def _large(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros in large pages where the system has them: weights are read from end to end."""
    area = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)
