"""Tables of rotations grow with the longest sequence, and never change a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkserve import Engine
from forkserve.engine.local import LocalBackend, rotary
from forkserve.engine.local.rotary import Turns
from forkserve.errors import ContextOverflow
from forkserve.types import SamplingParams

from .conftest import VOCAB, Checkpoints, tiny_config

CONTEXT = 4096


def tables(backend: LocalBackend) -> list[Turns]:
    runner = backend._runner
    found = getattr(runner, "_turns", None) or runner._decoder.ropes  # type: ignore[union-attr]
    return list(found)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tables_are_filled_as_far_as_they_are_used(
    checkpoint: Checkpoints, kernels: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = checkpoint(family, max_position_embeddings=CONTEXT)
    prompt, said, rows = [i * 7 % VOCAB for i in range(90)], [], []
    for block in (16, CONTEXT):
        monkeypatch.setattr(rotary, "BLOCK", block)
        backend = LocalBackend(tiny_config(), folder, kernels=kernels)
        assert all(len(t.cos) == len(t.sin) == CONTEXT for t in tables(backend))
        eng = Engine(backend)
        eng.open(prompt, session="a")
        said.append(eng.generate("a", 30, params=SamplingParams(ignore_eos=True)))
        assert {t.filled for t in tables(backend)} == {128 if block == 16 else CONTEXT}
        pairs = [(t.cos[:128], t.sin[:128]) for t in tables(backend)]
        rows.append([[torch.as_tensor(x).numpy().copy() for x in pair] for pair in pairs])
        eng.shutdown()
    assert said[0] == said[1]
    for few, all_at_once in zip(*rows, strict=True):
        for a, b in zip(few, all_at_once, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_end_of_the_context_is_reached() -> None:
    turns = Turns(np.empty(5), np.empty(5), lambda a, b: (np.arange(a, b), -np.arange(a, b)))
    turns.reach(9)
    assert turns.filled == 5
    np.testing.assert_array_equal(turns.cos, np.arange(5))
    np.testing.assert_array_equal(turns.sin, -np.arange(5))


def test_dynamic_scaling_is_none_up_to_the_trained_length() -> None:
    """Hugging Face has another table beyond it; here no sequence is longer."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    table = ROPE_INIT_FUNCTIONS["dynamic"]
    ours = rotary.checked_rope(10000.0, {"rope_type": "dynamic"}, "here").inv_freq(16)
    for length, same in ((1, True), (512, True), (513, False)):
        theirs, scale = table(config, torch.device("cpu"), seq_len=length)
        assert scale == 1.0
        assert torch.allclose(theirs, ours.to(theirs.dtype), rtol=1e-6, atol=0) is same


def test_a_sequence_past_the_trained_length_of_dynamic_scaling(
    checkpoint: Checkpoints, kernels: str
) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    _, folder = checkpoint("llama", rope_parameters=dynamic, max_position_embeddings=64)
    with Engine(LocalBackend(tiny_config(), folder, kernels=kernels)) as eng:
        eng.open([1] * 64, session="a", prefill=False)
        with pytest.raises(ContextOverflow, match="64"):
            eng.open([1] * 65)
