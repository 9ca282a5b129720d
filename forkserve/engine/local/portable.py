"""What the bundled engine says about its KV, so that stored rows meet only an equal engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forkserve.engine.local.runner import Runner
from forkserve.engine.local.spec import ModelSpec
from forkserve.types import ModelInfo

__all__ = ["identity"]

_KERNELS = "segment_attention/v1"  # torch: raise it when an operator changes what it computes


def identity(
    spec: ModelSpec,
    info: ModelInfo,
    runner: Runner,
    files: Sequence[Path],
    weights: Callable[[Sequence[Path]], str],
) -> Mapping[str, Any]:
    """Fields of a fingerprint; see `forkserve.engine.protocol.Portable`."""
    config = dataclasses.asdict(spec)
    tables = [
        {"theta": table.theta, "rope_type": table.kind, **dict(table.params)}
        for table in spec.ropes
    ]
    del config["ropes"]
    rope = {"tables": tables, "of": list(config.pop("rope_of"))}
    config.pop("context")  # a limit, not a number of the model
    kv_dtype = str(runner.kv.dtype).removeprefix("torch.")
    return {
        "weights": weights(files),
        "architecture": config.pop("family"),
        "config": config,
        "layout": {
            "dtype": kv_dtype,
            "order": "layer,kv,head,token,dim",
            "shape": [spec.layers, 2, spec.kv_heads, spec.head_dim],
            "vector": spec.head_dim,
            "row_bytes": runner.kv.bytes_per_token,
        },
        "kv_dtype": kv_dtype,
        "kv_quantization": str(info.extra.get("kv", "none")),
        "rope": rope,
        "adapter": "none",
        # The instruction set is not named: every one gives the same bits.
        "variant": {
            "engine": runner.kernels,
            "version": runner.version,
            "kernels": _kernels(runner, info.dtype),
            "device": info.device,
            "determinism": "exact" if runner.exact else "numeric",
        },
    }


def _kernels(runner: Runner, dtype: str) -> str:
    """What a row depends on besides the numbers that it is kept in."""
    if runner.kernels != "torch":
        return f"{dtype} weights"
    # Of other variants `kv_dtype` says it, and stores have their fingerprints.
    return f"{_KERNELS}, int8 weights" if dtype == "int8" else _KERNELS
