"""What is said where a GPU is asked for and is not there, or is not enough."""

from __future__ import annotations

import pytest
import torch

from forkserve.engine.local import LocalBackend
from forkserve.engine.local.gpu import device as module
from forkserve.engine.local.gpu.device import find_device, record
from forkserve.errors import ConfigError
from forkserve.kernels import jit

from .conftest import Checkpoints, tiny_config

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Fake:
    """torch.cuda with `count` GPUs of one capability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int]):
        for name, value in {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_capability": lambda _: capability,
            "get_device_name": lambda i: f"Fake {i}",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@no_gpu
def test_a_gpu_that_is_not_there(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")[1]
    with pytest.raises(ConfigError, match=r"needs a GPU, but torch \S+ "):
        LocalBackend(tiny_config(), folder, device="cuda")


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "CUDA", ""])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; give 'cpu', 'cuda'"):
        find_device(name)


def test_the_interpreter_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        find_device("interpreter")


def test_gpu_builds_that_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch, 0, (0, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"for CUDA 13.0 sees none \(CUDA_VISIBLE_DEVICES=''\)"):
        find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match="built without GPU support"):
        find_device("cuda")


def test_what_a_gpu_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch, 2, (9, 0))
    monkeypatch.setattr(jit, "TRITON", True)
    found = find_device("cuda:1")
    assert (found.torch, found.name, found.graphs) == (torch.device("cuda", 1), "Fake 1", True)
    with pytest.raises(ConfigError, match="2 GPUs were found, up to cuda:1"):
        find_device("cuda:2")
    monkeypatch.setattr(jit, "TRITON", False)
    with pytest.raises(ConfigError, match="needs Triton"):
        find_device("cuda")
    monkeypatch.setattr(jit, "TRITON", True)
    Fake(monkeypatch, 1, (7, 5))
    with pytest.raises(ConfigError, match=r"7\.5\) has no bfloat16.*float32"):
        find_device("cuda")
    assert find_device("cuda", "float32").name == "Fake 0"


def test_eight_bit_rows_need_a_gpu(checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="kv='int8' needs a GPU"):
        LocalBackend(tiny_config(), checkpoint("llama")[1], kv="int8")


def test_where_nothing_can_be_recorded_the_pass_runs_again() -> None:
    ran: list[int] = []
    device = module.Device(torch.device("cpu"), "interpreter", False)
    graph = record(device, lambda: ran.append(1))
    assert len(ran) == 1
    graph.replay()
    assert len(ran) == 2


def test_a_cpu_engine_imports_no_gpu_part() -> None:

    import subprocess
    import sys

    code = "import sys, forkserve.engine.local; print([m for m in sys.modules if '.gpu' in m])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
