"""What a CUDA graph would record, looked at without a GPU.

The decode pass runs on tensors without data, its kernels noted instead of launched.  Anything that
waits for the device, or moves data between it and the host, would fail there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

for _needed in ("pydantic", "tokenizers", "transformers", "safetensors", "llguidance", "gguf"):
    pytest.importorskip(_needed)

from forkserve.engine.local.checkpoint import open_checkpoint  # noqa: E402
from forkserve.engine.local.gpu import runner as runners  # noqa: E402
from forkserve.engine.local.gpu.device import Device  # noqa: E402
from forkserve.engine.local.runner import Setup  # noqa: E402
from forkserve.kernels.compile import kernels  # noqa: E402
from forkserve.kernels.jit import INTERPRETED  # noqa: E402
from forkserve.kernels.tile_plans import Capacity  # noqa: E402
from forkserve.types import Span, Work  # noqa: E402

from .test_engine import folder  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="looks at the pass without a GPU")
META = torch.device("meta")


class Inside(TorchDispatchMode):
    """Refuses what a graph cannot hold: data of the host, and waiting for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func), "item() waits for the device"
        assert "nonzero" not in str(func), "a size that the host has to wait for"
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                assert leaf.device.type == "meta", f"{func} touches a tensor of the host"
        return result


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches as (kernel, grid, arguments); none runs."""
    found: list[tuple[Any, ...]] = []
    for kernel in kernels():
        kind = type(kernel.function)

    def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        found.append((self.fn.__name__, grid, args, named))

    monkeypatch.setattr(kind, "run", note)
    return found


def make(path: Path, kv: str = "none") -> runners.GpuRunner:
    source = open_checkpoint(path)
    setup = Setup("bfloat16", 256, 16, 64, 64, 1, "cuda", kv)
    runner = runners.GpuRunner(source, setup, Device(META, "meta", False))
    source.close()
    return runner


def branches(count: int, at: int) -> list[Work]:
    """`count` branches that have decoded `at` rows over a trunk of 40."""
    trunk = Span("t", [9, 8, 7], 0, 40)
    works = []
    for i in range(count):
        pages = [10 + 4 * i, 11 + 4 * i]
        own = (Span(i, pages, 40, at),) if at else ()
        works.append(Work("s", i, [3], 40 + at, (trunk, *own), Span(i, pages, 40 + at, 1, at)))
    return works


def shown(launch: tuple[Any, ...], known: dict[int, str]) -> tuple[Any, ...]:
    """A launch with its tensors as where they lie: at a fixed place, or in scratch memory."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = known.get(value.untyped_storage()._cdata, "scratch")
        return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype

    name, grid, args, named = launch
    return (
        name,
        grid,
        tuple(place(arg) for arg in args),
        tuple(sorted((key, place(value)) for key, value in named.items())),
    )


def fixed(*owners: Any) -> dict[int, str]:
    """Storages that the owners hold, at any depth."""
    found: dict[int, str] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.setdefault(value.untyped_storage()._cdata, path)
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}[{key}]")
        elif isinstance(value, list | tuple):
            for i, inner in enumerate(value):
                walk(inner, f"{path}[{i}]")
        elif type(value).__module__.startswith("forkserve"):
            slots = {
                name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
            }
            for name in {*getattr(value, "__dict__", {}), *slots}:
                walk(getattr(value, name), f"{path}.{name}")

    for i, owner in enumerate(owners):
        walk(owner, str(i))
    return found


@pytest.mark.parametrize(
    ("family", "kv", "changes"),
    [
        ("llama", "none", {}),
        ("qwen3", "int8", {}),
        ("gemma3", "none", {"sliding_window": 20, "num_hidden_layers": 2}),
    ],
)
def test_a_recorded_pass_touches_fixed_places_and_no_data_of_the_host(
    folder: Callable[..., Path],  # noqa: F811
    launched: list[tuple[Any, ...]],
    family: str,
    kv: str,
    changes: dict[str, Any],
) -> None:
    runner = make(folder(family, **changes), kv)
    decoder = runner._decoder
    assert decoder is not None
    ids = np.array([3, 3, 3], np.int32)
    with torch.inference_mode():
        plans = runner._planner.plan(branches(3, 0))
        step = runners._Step(runner, decoder, plans, 4)
        step.load(plans, ids)
        known = fixed(step, runner)
        passes = []
        for at in (1, 2):
            launched.clear()
            with Inside():
                step._run()
            passes.append([shown(launch, known) for launch in launched])
            plans = runner._planner.plan(branches(3, at))
            assert step.holds(plans)
            step.load(plans, ids)
    assert passes[0] == passes[1]
    names = [launch[0] for launch in passes[0]]
    layers = decoder.spec.layers
    assert names.count("linear_kernel") == 4 * layers + 1
    assert names.count("merge_kernel") == layers
    for name, _, args, _ in passes[0]:
        places = [arg[0] for arg in args if isinstance(arg, tuple)]
        assert "scratch" not in places or name != "attend_kernel" or places.count("scratch") == 1, (
            "attention reads tables and rows at fixed places; only its queries are scratch"
        )


def test_batches_that_alternate_are_recorded_once_each(
    folder: Callable[..., Path],  # noqa: F811
    launched: list[tuple[Any, ...]],
) -> None:
    """Branches of one trunk, and as many that share nothing: neither's tables hold the other's.

    Tables that replace others hold what those held.
    """
    runner = make(folder("llama"))
    decoder = runner._decoder
    assert decoder is not None

    def decode(i: int, key: Any) -> Work:
        trunk = Span(key, range(75), 0, 1200)
        return Work("s", i, [3], 1200, (trunk,), Span(i, [80 + i], 1200, 1))

    batches = [[decode(i, "t") for i in range(20)], [decode(i, ("t", i)) for i in range(20)]]
    rooms = [Capacity.rounded(runner._planner.plan(works)[0], 32) for works in batches]
    assert not rooms[0].holds(rooms[1])
    assert not rooms[1].holds(rooms[0])
    for _ in range(4):
        for works in batches:
            with torch.inference_mode():
                runner._replay(decoder, runner._planner.plan(works), np.full(20, 3, np.int32))
    assert runner.replayed == 2 * 3


def test_larger_tables_replace_smaller_ones_and_failures_leave_the_old(
    folder: Callable[..., Path],  # noqa: F811
    launched: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recording that fails (no memory) raises, and the next pass records anew."""
    runner = make(folder("llama"))
    decoder = runner._decoder
    assert decoder is not None
    ids = np.array([3, 3, 3], np.int32)

    def replay() -> None:
        with torch.inference_mode():
            runner._replay(decoder, runner._planner.plan(branches(3, 0)), ids)

    real = runner.recorder.record

    def fails(_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(runner.recorder, "record", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        replay()
    assert runner._steps == {}
    monkeypatch.setattr(runner.recorder, "record", real)
    replay()
    replay()
    assert runner.replayed == 1
    old = runner._steps[4]
    monkeypatch.setattr(type(old), "holds", lambda *_: False)
    monkeypatch.setattr(runner.recorder, "record", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        replay()
    assert runner._steps[4] is old
