"""Chunks and pages of other sizes: a page is in no id, a chunk in all, and neither in a logit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.kernels.native import library
from forkserve.store import Store, host, identity, shadow
from forkserve.types import Batch, BatchResult, SamplingParams

from .conftest import Checkpoints

TEXT = [t * 37 % 200 for t in range(530)]
pytestmark = pytest.mark.skipif(library.available() is not None, reason=str(library.available()))


class Recording(LocalBackend):
    """Keeps the logits that every token was taken from."""

    def __init__(self, model: Path, page_size: int) -> None:
        config = ForkServeConfig(page_size=page_size, capacity_pages=150, prefix_index=False)
        super().__init__(config, model, kernels="native")
        self.rows: list[np.ndarray[Any, Any]] = []

    def execute(self, batch: Batch) -> BatchResult:
        works = [replace(work, logits=work.sample is not None) for work in batch.works]
        done = super().execute(replace(batch, works=works))
        self.rows += [np.array(r.logits) for r in done.results if r.logits is not None]
        return done


def logits(eng: Engine, session: str) -> bytes:
    eng.generate(session, 6, params=SamplingParams(ignore_eos=True))
    backend: Any = eng.backend
    return np.array(backend.rows).tobytes()


def chunks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a ForkServe would be whose chunks have that size."""
    for module in (identity, host, shadow):
        monkeypatch.setattr(module, "CHUNK_TOKENS", size)
    monkeypatch.setattr(identity.plan_chain, "__defaults__", (size,))


def test_ids_follow_the_chunk_size_alone_and_logits_neither(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama", max_position_embeddings=2048)[1]
    cold = Engine(Recording(model, 16))
    cold.open(TEXT, session="a")
    wanted, ids = logits(cold, "a"), {}
    cold.shutdown()
    assert len(wanted) > 6 * 200 * 4
    for size in (256, 128, 100):
        chunks_of(size, monkeypatch)
        for page in (16, 32):
            folder = tmp_path / f"{size}-{page}"
            eng = Engine(Recording(model, page), store=folder)
            eng.open(TEXT, session="a")
            assert eng.publish("a").wait().written == len(TEXT) // size
            eng.shutdown()
            with Store(folder, restore="always") as store:
                eng = Engine(Recording(model, 48 - page), store=store)
                assert eng.resume("a").cached_tokens == len(TEXT) // size * size
                assert logits(eng, "a") == wanted, (size, page)
                rows = store.catalog.read("SELECT chain FROM chunk ORDER BY start")
                ids[size, page] = [row[0] for row in rows]
                eng.check()
                eng.shutdown()
        assert ids[size, 16] == ids[size, 32]
    assert not {*ids[256, 16]} & {*ids[128, 16]}
    assert not {*ids[256, 16]} & {*ids[100, 16]}
