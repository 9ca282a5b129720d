"""The native forward pass: what forward.h declares, as Python objects that own its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError
from forkserve.kernels.native.attention import AttentionPlan, Pool
from forkserve.kernels.native.linear import Packed, PackedLinear, pointer

__all__ = ["ACTS", "PHASES", "Forward", "LayerWeights", "Shape"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
ACTS = {"silu": 0, "gelu_tanh": 1}
PHASES = ("linear", "elementwise", "write", "attention", "head", "wait")
_MEMORY, _FAULTS = 1, {2: "cannot start its threads; give fewer threads"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and constants of a decoder.  A soft cap of 0 is none."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    attn_scale: float
    act: str = "silu"
    embed_scale: float = 1.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block.  cos, sin [context, head_dim / 2]; the norms that are None are not there.

    post_attn_norm and post_ffn_norm apply to what attention and MLP add to the residual.
    """

    attn_norm: Floats
    qkv: PackedLinear
    out: PackedLinear
    ffn_norm: Floats
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    cos: Floats
    sin: Floats
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    post_attn_norm: Floats | None = None
    post_ffn_norm: Floats | None = None


_NORMS = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")
_TABLES = ("cos", "sin")
_LINEARS = ("qkv", "out", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_NORMS, *_TABLES)),
        *((name, Packed) for name in _LINEARS),
    )


_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "dim", "vocab", "act")
_CONSTANTS = ("eps", "embed_scale", "attn_scale", "attn_softcap", "final_softcap")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in _CONSTANTS),
        ("tied", ctypes.c_int32),
        ("layer", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("embed", ctypes.c_void_p),
        ("embed_bf16", ctypes.c_int64),
        ("head", Packed),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ids", "plans", "pool")),
        ("wanted", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "logits", "top", "seconds")),
    )


class Forward:
    """Weights bound to the library, its threads and buffers.  One call at a time.

    embed [vocab, hidden] float32, or uint16 that holds bfloat16, or None: the rows of `head`.
    `seconds`: None, or an array [threads, phases] that is added to: what each thread spent its time
    on, by `PHASES` (meter.h).  A row adds up to the time of the calls.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Shape,
        layers: Sequence[LayerWeights],
        *,
        final_norm: Floats,
        head: PackedLinear,
        embed: npt.NDArray[Any] | None,
        threads: int,
    ) -> None:
        self._kept = (list(layers), final_norm, head, embed)
        table = (_Layer * len(layers))(*(_bound(layer) for layer in layers))
        sizes = (shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab)
        model = _Model(
            *(len(layers), *sizes, ACTS[shape.act]),
            *(getattr(shape, name) for name in _CONSTANTS),
            *(embed is None, ctypes.addressof(table), pointer(final_norm), pointer(embed)),
            *(embed is not None and embed.dtype == np.uint16, head.packed),
        )
        self._table = table
        self.vocab = shape.vocab
        self.seconds: npt.NDArray[np.float64] | None = None
        self._library = library
        library.fs_forward_new.restype = ctypes.c_void_p
        library.fs_forward_free.argtypes = [ctypes.c_void_p]
        library.fs_forward_run.argtypes = [ctypes.c_void_p] * 2
        self._handle = library.fs_forward_new(ctypes.byref(model), threads)

    def run(
        self,
        ids: Ints,
        plans: Sequence[AttentionPlan],
        pool: Pool,
        rows: Ints,
        logits: Floats,
    ) -> Ints:
        """One batch: ids [n]; plans: one a layer, built for it; logits [m, vocab] of `rows` [m].

        Returns the id of each row's largest logit, the lowest among equals.  Raises `MemoryError`
        where a smaller batch may still fit, `BackendError` where no threads can be had.
        """
        top = np.empty(len(rows), np.int32)
        handles = (ctypes.c_void_p * len(plans))(*[plan.handle for plan in plans])
        call = _Call(
            *(len(ids), pointer(ids), ctypes.addressof(handles), ctypes.addressof(pool)),
            *(len(rows), pointer(rows), pointer(logits), pointer(top), pointer(self.seconds)),
        )
        fault = self._library.fs_forward_run(self._handle, ctypes.byref(call))
        if fault == _MEMORY:
            raise MemoryError(f"no memory for a native forward pass over {len(ids)} rows")
        if fault:
            raise BackendError(f"the native forward pass over {len(ids)} rows: {_FAULTS[fault]}")
        return top

    def close(self) -> None:
        """Stop the threads and drop the weights.  Idempotent."""
        self._free()
        self._kept = ([], np.empty(0, np.float32), None, None)  # type: ignore[assignment]

    def __del__(self) -> None:
        self._free()  # names of modules may be gone by now: nothing else

    def _free(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            self._library.fs_forward_free(handle)


def _bound(layer: LayerWeights) -> _Layer:
    return _Layer(
        *(pointer(getattr(layer, name)) for name in (*_NORMS, *_TABLES)),
        *(getattr(layer, name).packed for name in _LINEARS),
    )
