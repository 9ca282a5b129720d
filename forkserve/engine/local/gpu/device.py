"""Which device the engine runs on, and graphs of what runs there."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from forkserve.errors import ConfigError
from forkserve.kernels import jit

__all__ = ["Device", "Graph", "Recorder", "find_device", "on"]

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class Device:
    """torch: where tensors live.  graphs: whether a pass can be recorded and replayed."""

    torch: torch.device
    name: str
    graphs: bool


def find_device(wanted: str, dtype: str = "bfloat16") -> Device:
    """ "cuda" or "cuda:1"; "interpreter" runs the same kernels on the CPU, for tests only.

    Raises `ConfigError`, saying what was found, if there is no such device.
    """
    if wanted == INTERPRETER:
        if not jit.INTERPRETED:
            raise ConfigError(
                "device='interpreter' runs GPU kernels in Triton's interpreter, for tests; it "
                "needs Triton and TRITON_INTERPRET=1 set before forkserve is imported"
            )
        return Device(torch.device("cpu"), INTERPRETER, False)
    found = re.fullmatch(r"cuda(?::(\d+))?", wanted)
    if found is None:
        raise ConfigError(f"device='{wanted}' is unknown; give 'cpu', 'cuda' or 'cuda:0'")
    if not torch.cuda.is_available():
        raise ConfigError(f"device='{wanted}' needs a GPU, but {_why_none()}")
    count, index = torch.cuda.device_count(), int(found[1] or 0)
    if index >= count:
        raise ConfigError(f"device='{wanted}': {count} GPUs were found, up to cuda:{count - 1}")
    if not jit.TRITON:
        raise ConfigError(
            f"device='{wanted}' needs Triton, which is not installed; GPU builds of torch for "
            "Linux bring the one they were tested with"
        )
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if torch.version.hip is None and major < 8 and dtype != "float32":
        raise ConfigError(
            f"device='{wanted}': {name} (compute capability {major}.{minor}) has no bfloat16; "
            "8.0 or later does. Use dtype='float32'"
        )
    return Device(torch.device("cuda", index), name, True)


def _why_none() -> str:
    """What torch has instead of a GPU."""
    version = torch.__version__
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {version} is built without GPU support; install a CUDA or ROCm build"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    more = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
    return f"torch {version} for {built} sees none{more}; is the driver loaded?"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Graph(Protocol):
    """A pass over fixed tensors that can be run again."""

    def replay(self) -> None:
        """Run it; results go to the tensors that it was recorded with."""
        ...


class _Again:
    """Where nothing can be recorded: calls the pass itself."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Recorder:
    """Records passes of one device.  Their scratch memory is one and the same, so run them in turn.

    Results must go to tensors that were there before: scratch is overwritten by the next graph.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        self._pool: Any = None  # of memory, shared by all graphs; gone with the last of them
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def record(self, run: Callable[[], None]) -> Graph:
        """Record `run`, which must only use fixed tensors and write its results to them.

        It also runs, once.  Other threads may use the device meanwhile.
        """
        if not self._device.graphs:
            run()
            return _Again(run)
        device = self._device.torch
        if self._side is None:
            # A stream of this device: torch's own for capturing is of the first device that asked.
            self._side = torch.cuda.Stream(device)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        # Kernels compile in a first run, and libraries set themselves up: a graph can't record it.
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream(device).wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            run()
        self._graphs.add(graph)
        return graph
