"""A row's bits are its own: alone or beside others, in any chunks, forked, stored or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for _needed in ("pydantic", "tokenizers", "transformers", "safetensors", "llguidance", "gguf"):
    pytest.importorskip(_needed)

from forkserve.engine.local import LocalBackend  # noqa: E402
from forkserve.engine.local.gpu import runner as runners  # noqa: E402
from forkserve.kernels.pieces import Tiling  # noqa: E402
from forkserve.types import Batch, Work  # noqa: E402
from tests.engine.conftest import tiny_config  # noqa: E402
from tests.engine.test_exact import Forest  # noqa: E402
from tests.engine.test_exact import Path as Branch  # noqa: E402

from .rig import LEAST  # noqa: E402
from .test_engine import DEVICE, _short_warm_up, folder  # noqa: E402, F401


@pytest.fixture(autouse=True)
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells and blocks so small that short prompts fill many, and every state is worth leaving."""

    def tiling(page: int, group: int, window: int, **_: int) -> Tiling:
        return Tiling(page, group, window, split=32, block=LEAST, level_cost=0, wave=0)

    monkeypatch.setattr(runners, "Tiling", tiling)


def routes(backend: LocalBackend, seed: int, steps: int) -> Forest:
    """Prompts in chunks, branches over frozen and packed tails, rows lost, stored and restored."""
    forest = Forest(backend, seed, chunk=13)
    forest.root(35)
    for verb in (forest.frozen, forest.packed, forest.stored, forest.lost):
        verb()
    for _ in range(steps):
        works = [(path, forest.words(forest.random.choice([1, 1, 3]))) for path in forest.paths]
        forest.run(works)
    return forest


@pytest.mark.parametrize(
    ("family", "changes", "variant", "kv"),
    [
        ("llama", {"num_hidden_layers": 1}, "float32", "none"),
        ("qwen2", {"num_hidden_layers": 1}, "bfloat16", "none"),
        ("llama", {"num_hidden_layers": 1}, "int8", "fp8"),
        ("gemma3", {"num_hidden_layers": 1, "sliding_window": 20}, "float32", "none"),
    ],
)
def test_every_route_gives_the_same_bits(
    folder: Callable[..., Path],  # noqa: F811
    family: str,
    changes: dict[str, Any],
    variant: str,
    kv: str,
) -> None:
    path = folder(family, **changes)
    backend = LocalBackend(tiny_config(), path, device=DEVICE, dtype=variant, kv=kv)
    assert backend.info.extra["exact"]
    forest = routes(backend, seed=len(family), steps=2)
    cold = LocalBackend(tiny_config(), path, device=DEVICE, dtype=variant, kv=kv)
    assert forest.check(cold) > 40


def test_decoding_side_by_side_is_decoding_alone(folder: Callable[..., Path]) -> None:  # noqa: F811
    """Recorded passes over plans that grow, in tables with room to spare, against cold passes."""
    path = folder("llama", num_hidden_layers=1)
    backend = LocalBackend(tiny_config(), path, device=DEVICE)
    forest = Forest(backend, 3, chunk=40)
    forest.root(37)
    trunk = forest.paths[0]
    draw = random.Random(1)
    branches = [
        Branch(forest.rig.fork(trunk.node, at), trunk.tokens[:at]) for at in (37, 37, 30, 33)
    ]
    for _ in range(4):
        forest.run([(branch, [draw.randrange(300)]) for branch in branches])
    runner = backend._runner
    assert isinstance(runner, runners.GpuRunner)
    assert runner._planner.grown >= 3
    assert forest.check(LocalBackend(tiny_config(), path, device=DEVICE)) >= 4 * 4


def test_a_row_does_not_see_its_batch(folder: Callable[..., Path]) -> None:  # noqa: F811
    """One prompt, alone and as the 21st of a batch whose rows fill tiles of other shapes."""
    path = folder("llama", num_hidden_layers=1)
    backend = LocalBackend(tiny_config(), path, device=DEVICE)
    tokens = [random.Random(2).randrange(300) for _ in range(6)]
    alone = Work("s", 0, tokens, 0, (), None, all_logits=True)
    want = backend.execute(Batch([alone])).results[0].logits
    mates = [Work("s", 1 + i, [i + 7], 0, (), None) for i in range(20)]
    got = backend.execute(Batch([*mates, alone])).results[20].logits
    np.testing.assert_array_equal(got, want)


def test_bits_would_show_another_order(
    folder: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of twice as many keys give other bits, so equal bits above are no accident."""
    path = folder("llama", num_hidden_layers=1)
    tokens = [random.Random(2).randrange(300) for _ in range(24)]
    found = []
    for block in (LEAST, 2 * LEAST):

        def tiling(page: int, group: int, window: int, block: int = block, **_: int) -> Tiling:
            return Tiling(page, group, window, split=32, block=block)

        monkeypatch.setattr(runners, "Tiling", tiling)
        backend = LocalBackend(tiny_config(), path, device=DEVICE)
        work = Work("s", 0, tokens, 0, (), None, all_logits=True)
        found.append(backend.execute(Batch([work])).results[0].logits)
    assert not np.array_equal(*found)
