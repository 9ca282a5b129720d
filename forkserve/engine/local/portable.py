"""What the bundled engine says about its KV, so that stored rows meet only an equal engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forkserve.engine.local.kv import PagedKV
from forkserve.engine.local.spec import ModelSpec
from forkserve.types import ModelInfo

__all__ = ["identity"]

_KERNELS = "segment_attention/v1"  # raise it when an operator changes what it computes


def identity(
    spec: ModelSpec,
    info: ModelInfo,
    kv: PagedKV,
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
    return {
        "weights": weights(files),
        "architecture": config.pop("family"),
        "config": config,
        "layout": {
            "dtype": info.dtype,
            "order": "layer,kv,head,token,dim",
            "shape": [spec.layers, 2, spec.kv_heads, spec.head_dim],
            "vector": spec.head_dim,
            "row_bytes": kv.bytes_per_token,
        },
        "kv_dtype": info.dtype,
        "kv_quantization": "none",
        "rope": rope,
        "adapter": "none",
        "variant": {
            "engine": "torch",
            "version": torch.__version__,
            "kernels": str(info.extra.get("kernels", _KERNELS)),
            "device": info.device,
            "determinism": "numeric",
        },
    }
