"""The engine on a GPU that is not there: launches compile as they would there, and nothing runs.

``python -m tests.kernels.absent_gpu TARGET`` makes passes of tiny models and prints, as JSON, which
kernels were compiled for TARGET, and what of them spills registers.  Triton chooses the types and
specialisations here; `forkserve.kernels.compile` is told them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from forkserve.engine.local import LocalBackend
from forkserve.engine.local import backend as backends
from forkserve.engine.local.gpu import device as devices
from forkserve.kernels import activation as act
from forkserve.kernels import compile as compiler
from forkserve.kernels import copy_rows, jit, linear, norm, rope, sample, write_kv
from forkserve.types import Batch, RowCopy, Span, Work
from tests.engine.conftest import tiny_config, tiny_model, tiny_tokenizer

MODELS = (
    ("llama", "bfloat16", "none", {}),
    ("qwen3", "int8", "fp8", {}),
    ("gemma2", "float32", "int8", {"sliding_window": 20}),
)


class Absent:
    """What of a driver Triton uses to compile and to launch."""

    def __init__(self, target: str) -> None:
        self.at = compiler.TARGETS[target]
        self.compiled: list[str] = []
        self.spilled: list[str] = []
        self.utils = self
        self.launcher_cls = lambda *_: lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.at.backend, self.at.arch, self.at.warp)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self.at.shared, "multiprocessor_count": 108, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, ...]:
        self.compiled.append(name)
        if self.at.backend == "cuda" and compiler._number(r"STACK:(\d+)", compiler._usage(binary)):
            self.spilled.append(name)
        return 1, 1, 0, 0, 1024


def passes(folder: Path, variant: str, kv: str) -> None:
    """A prompt, branches that decode over it, a copied tail, a chunk, rows that travel."""
    backend = LocalBackend(tiny_config(), folder, device="cuda", dtype=variant, kv=kv)
    trunk = Span("t", [4, 9, 2, 7], 0, 60)
    backend.execute(Batch([Work("s", 0, [1] * 60, 0, (), trunk)]))
    works = [
        Work("s", i, [i], 60, (trunk,), Span(i, [20 + i], 60, 1), logits=True) for i in range(20)
    ]
    backend.execute(Batch(works, [RowCopy(4, 0, 50, 0, 7)]))
    chunk = Work("s", 90, [1] * 40, 60, (trunk,), Span("c", [51, 52, 53], 60, 40), logits=True)
    backend.execute(Batch([*works[:2], chunk]))
    backend.write_rows(trunk, backend.read_rows([trunk]), 0)
    backend.close()


def main(target: str) -> None:
    absent = Absent(target)
    driver.set_active(absent)
    for module in (act, copy_rows, linear, norm, rope, sample, write_kv):
        module.runs_kernels = lambda _: True  # type: ignore[attr-defined]
    devices.find_device = lambda *_: devices.Device(torch.device("cpu"), target, False)
    backends._WARM_UP_SAMPLES = 1
    assert not jit.INTERPRETED
    for family, variant, kv, changes in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(family, **{"num_hidden_layers": 1, **changes}).save_pretrained(folder)
            tiny_tokenizer(Path(folder))
            passes(Path(folder), variant, kv)
    print(json.dumps({"compiled": absent.compiled, "spilled": absent.spilled}))


if __name__ == "__main__":
    main(sys.argv[1])
