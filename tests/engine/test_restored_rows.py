"""Publishing, freeing, restoring at random beside generations: rows and tokens of a cold engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.engine.local import kv
from forkserve.kernels.native import library
from forkserve.store import Store
from forkserve.types import SamplingParams

from .conftest import Checkpoints
from .resident import resident_rows

FREE = SamplingParams(ignore_eos=True)
pytestmark = pytest.mark.skipif(library.available() is not None, reason=str(library.available()))


def config(**options: Any) -> ForkServeConfig:
    return ForkServeConfig(page_size=16, capacity_pages=400, prefix_index=False, **options)


class Cold:
    """What an engine without a store says and holds."""

    def __init__(self, model: Path) -> None:
        self.engine = Engine(LocalBackend(config(), model, kernels="native"))
        self.known: dict[tuple[tuple[int, ...], int], tuple[list[int], bytes]] = {}

    def __call__(self, text: list[int], count: int) -> tuple[list[int], bytes]:
        key = (tuple(text), count)
        if key not in self.known:
            h = self.engine.open(text)
            out = self.engine.generate(h.id, count, params=FREE)
            self.known[key] = out, resident_rows(self.engine, h.id)[1]
            self.engine.close(h.id)
        return self.known[key]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_comes_back_is_what_a_cold_engine_computes(
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    background: bool,
) -> None:
    model, rng = checkpoint("llama", max_position_embeddings=2048)[1], random.Random(seed)
    monkeypatch.setattr(kv, "_RELEASE_PAGES", 4)  # memory goes often
    texts = [[rng.randrange(200) for _ in range(rng.choice([300, 520, 800]))] for _ in range(4)]
    cold = Cold(model)
    with Store(
        tmp_path,
        restore="always",
        memory_bytes=rng.choice([50_000, 10_000_000]),
        device_bytes=rng.choice([10_000_000, 60_000]),
    ) as store:
        store.pace.watch(lambda: True)  # passes run all the time
        eng = Engine(
            LocalBackend(config(background=background), model, kernels="native"), store=store
        )
        backend: Any = eng.backend
        backend._kv._spare.limit = rng.choice([0, 30, 200])
        for turn in range(25):
            text = rng.choice(texts)
            h = eng.open(text)
            if rng.random() < 0.5:
                eng.publish(h.id, wait=False)
            if rng.random() < 0.3:
                eng.mark_idle(h.id, h.tip, 60.0)
                eng.promote(h.id, h.tip)
            count = rng.choice([1, 3, 5])
            tokens, held = cold(text, count)
            assert eng.generate(h.id, count, params=FREE) == tokens, turn
            eng.warm(h.id)
            _, mine = resident_rows(eng, h.id)
            if len(mine) == len(held):
                assert mine == held, turn
            eng.check()
            eng.close(h.id)
            if rng.random() < 0.4:
                assert store.publisher.drain()
        assert eng.settle_tiers()
        restored = [s for s in store.metrics()["process"] if s["name"] == "restored_tokens"]
        assert sum(s["value"] for s in restored) > 256
        eng.shutdown()
    cold.engine.shutdown()
