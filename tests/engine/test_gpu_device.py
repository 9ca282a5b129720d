"""What is said where a GPU is asked for and is not there, or is not enough."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from forkserve.engine.local import LocalBackend
from forkserve.engine.local.gpu import device as module
from forkserve.engine.local.gpu.device import Recorder, find_device
from forkserve.errors import ConfigError
from forkserve.kernels import jit
from forkserve.kernels.pieces import Tiling
from forkserve.kernels.tile_plans import Capacity, DevicePlan
from forkserve.kernels.tiles import plan_tiles
from forkserve.types import Span, Work

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
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match=r"7\.5\) has no bfloat16.*float32"):
            find_device("cuda", dtype)
    assert find_device("cuda", "float32").name == "Fake 0"


def test_eight_bit_rows_need_a_gpu(checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="kv='int8' needs a GPU"):
        LocalBackend(tiny_config(), checkpoint("llama")[1], kv="int8")


def test_where_nothing_can_be_recorded_the_pass_runs_again() -> None:
    ran: list[int] = []
    device = module.Device(torch.device("cpu"), "interpreter", False)
    graph = Recorder(device).record(lambda: ran.append(1))
    assert len(ran) == 1
    graph.replay()
    assert len(ran) == 2


class Stream:
    """A stream of a fake GPU, which says what it is made to wait for."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    """A recorded graph; pools count their graphs as torch's allocator does."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.pool = cuda, 0

    def __del__(self) -> None:
        if self.pool:
            self.cuda.pools[self.pool] -= 1


class Cuda:
    """What of torch.cuda recording uses, on a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: dict[int, int] = {}  # graphs alive in each
        self.default = self.current = Stream(self, "default")
        streams = 0

        def new_stream(device: torch.device) -> Stream:
            nonlocal streams
            streams += 1
            return Stream(self, f"side of {device.index}" + (f" {streams}" if streams > 1 else ""))

        def handle() -> int:
            self.pools[len(self.pools) + 1] = 0
            return len(self.pools)

        for name, value in {
            "Stream": new_stream,
            "current_stream": lambda _: self.current,
            "stream": self.on,
            "graph_pool_handle": handle,
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.default

    @contextlib.contextmanager
    def capture(
        self, graph: Graph, *, pool: int, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        # torch fails on a pool that its last graph has left.
        assert self.pools[pool] > 0 or graph.cuda.log.count(f"pool {pool}") == 0
        self.log.append(f"pool {pool}")
        graph.pool = pool
        self.pools[pool] += 1
        self.log.append(f"capture on {stream.name}, {capture_error_mode}")
        with self.on(stream):
            yield
        self.log.append("captured")


def test_a_pass_runs_once_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of the right device that waits for what came before, and is waited for."""
    cuda = Cuda(monkeypatch)
    recorder = Recorder(module.Device(torch.device("cuda", 1), "Fake", True))
    recorder.record(lambda: cuda.log.append(f"run on {cuda.current.name}"))
    assert cuda.log == [
        "side of 1 waits for default",
        "run on side of 1",
        "default waits for side of 1",
        "pool 1",
        "capture on side of 1, thread_local",
        "run on side of 1",
        "captured",
    ]


def test_graphs_share_their_scratch_memory_while_one_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    recorder = Recorder(module.Device(torch.device("cuda", 0), "Fake", True))
    first, second = (recorder.record(lambda: None) for _ in range(2))
    assert cuda.pools == {1: 2}
    del first
    third = recorder.record(lambda: None)
    assert cuda.pools == {1: 2}
    del second, third
    fourth = recorder.record(lambda: None)
    assert fourth is not None
    assert cuda.pools == {1: 0, 2: 1}, "the old pool went with its last graph"


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    recorder = Recorder(module.Device(torch.device("cuda", 0), "Fake", True))

    def run() -> None:
        if cuda.current is not cuda.default and "pool 1" in cuda.log and len(cuda.pools) == 1:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        recorder.record(run)
    cuda.current = cuda.default
    gc.collect()
    kept = recorder.record(run)
    assert kept is not None
    assert cuda.pools == {1: 0, 2: 1}


def test_tables_on_their_way_to_the_device_are_not_overwritten() -> None:
    """Two buffers of the host, in turn: one is filled again when its own copy has ended."""
    works = [Work("s", 0, [1], 20, (Span("t", [3, 5], 0, 20),), Span("own", [7], 20, 1))]
    plan = plan_tiles(works, Tiling(16, 1), 160)
    tables = DevicePlan(Capacity.rounded(plan, 2), "cpu", dump=200)
    log: list[str] = []

    class Sent:
        """The end of a copy that was begun; what the buffer holds may change only after it."""

        def __init__(self, number: int) -> None:
            self.number, self.held = number, tables._staging[number].clone()

        def synchronize(self) -> None:
            assert torch.equal(tables._staging[self.number], self.held)
            log.append(f"waits for {self.number}")

    for turn in range(4):
        tables._sent = [Sent(0), Sent(1)]  # type: ignore[list-item]
        plan.slots[:] = 100 + turn
        tables.load(plan)
        assert tables.slots.tolist() == [100 + turn, 200]
    assert log == [f"waits for {number}" for number in (1, 0, 1, 0)]


def test_a_cpu_engine_imports_no_gpu_part() -> None:
    import subprocess
    import sys

    code = "import sys, forkserve.engine.local; print([m for m in sys.modules if '.gpu' in m])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
