"""Logits of the local engine against Hugging Face, on tiny random checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkserve.engine.local import LocalBackend

from .conftest import LLAMA3, VOCAB, Checkpoints, reference, tiny_config, tiny_model, tiny_tokenizer
from .rig import Rig

TOLERANCE = 1e-4
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}
GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
SHARP = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}  # caps that bite

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "shard": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"head_dim": 80, "num_key_value_heads": 1}),
    ("llama", {"head_dim": 18}),
    ("qwen2", {"shard": True}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", QWEN_WINDOW),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "shard": True}),
    ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 8.0, "attention_factor": 1.3}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 20}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 61, "shard": True}),
    ("mistral", {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True}),
    ("gemma2", {"sliding_window": 20, **SHARP}),
    ("gemma2", {"sliding_window": 4096, "tie_word_embeddings": True}),
    ("gemma3", {"sliding_window": 20, **SHARP}),  # of which only the logits' is used
    ("gemma3", {"sliding_window": 20, "tie_word_embeddings": True, "query_pre_attn_scalar": 40}),
    (
        "gemma3",
        {"sliding_window": 33, "rope_parameters": GLOBAL, "shard": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
]


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_cold_shared_forked_restored(
    checkpoint: Checkpoints, kernels: str, family: str, changes: dict[str, Any]
) -> None:
    if changes.get("head_dim", 16) % 16:
        kernels = "torch"  # the native ones are for multiples of 16
    model, folder = checkpoint(family, **changes)
    backend = LocalBackend(tiny_config(), folder, kernels=kernels)
    rig = Rig(backend, seed=len(repr(changes)))
    text = ids(100, 1)  # longer than most of the windows
    want = reference(model, text)

    one_shot = rig.root()
    close(rig.logits(rig.work(one_shot, text))[0], want)

    chunked = rig.root()
    for low, high in ((0, 1), (1, 8), (8, 47), (47, 90)):
        close(rig.logits(rig.work(chunked, text[low:high]))[0], want[low:high])
    for i in range(90, 100):  # decode, one token a pass
        close(rig.logits(rig.work(chunked, text[i : i + 1]))[0], want[i : i + 1])

    # Two children over one trunk, one of them forked in mid-segment, in one pass.
    left, right = rig.fork(one_shot), rig.fork(one_shot, 61)
    a, b = ids(9, 2), ids(5, 3)
    got = rig.logits(rig.work(left, a), rig.work(right, b))
    close(got[0], reference(model, text + a)[100:])
    close(got[1], reference(model, text[:61] + b)[61:])

    # A grandchild beside its parent, decoding together; the trunk is shared by all three.
    grandchild = rig.fork(left)
    got = rig.logits(rig.work(left, [5]), rig.work(right, [6]), rig.work(grandchild, [7]))
    close(got[0], reference(model, [*text, *a, 5])[-1:])
    close(got[1], reference(model, [*text[:61], *b, 6])[-1:])
    close(got[2], reference(model, [*text, *a, 7])[-1:])

    # Rows that went to a store and come back to other pages.
    stored = backend.read_rows(one_shot.spans())
    rig = Rig(backend, seed=2)  # everything in the pool is gone
    restored = rig.root()
    rig.work(restored, text)
    backend.write_rows(restored.own(), stored, 0)
    early = rig.fork(restored, 70)
    got = rig.logits(rig.work(restored, a), rig.work(early, b))
    close(got[0], reference(model, text + a)[100:])
    close(got[1], reference(model, text[:70] + b)[70:])
    backend.close()


@pytest.mark.parametrize(("limit", "length"), [(64, 64), (None, 100)])
def test_factors_for_long_sequences(
    checkpoint: Checkpoints, kernels: str, limit: int | None, length: int
) -> None:
    """One engine has one table: that of its longest sequence.  Rows of the other aren't read."""
    model, folder = checkpoint("llama", rope_parameters=LONG)
    backend = LocalBackend(tiny_config(max_context=limit), folder, kernels=kernels)
    rig, text = Rig(backend), ids(length, 1)
    close(rig.logits(rig.work(rig.root(), text))[0], reference(model, text))
    own = backend.identity(lambda files: "weights")["rope"]
    other = LocalBackend(tiny_config(max_context=65 if limit else 64), folder, kernels=kernels)
    assert other.identity(lambda files: "weights")["rope"] != own
    backend.close()
    other.close()


def test_the_language_model_beside_a_vision_part(tmp_path: Path) -> None:
    """Gemma 3 from 4B on: a configuration within one, and names with another beginning."""
    import transformers

    sizes = {"num_hidden_layers": 2, "sliding_window": 20, "tie_word_embeddings": True}
    text_model = tiny_model("gemma3", **sizes)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text_model.config.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text_model.model.state_dict())
    whole.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    backend = LocalBackend(tiny_config(), tmp_path)
    rig, text = Rig(backend), ids(50, 1)
    close(rig.logits(rig.work(rig.root(), text))[0], reference(text_model, text))
    backend.close()


def test_long_shared_trunk_is_read_once(checkpoint: Checkpoints) -> None:
    """Eight children decode over one trunk: the plan reads its rows once, not eight times."""
    from forkserve.kernels.plan import plan_attention

    model, folder = checkpoint("llama")
    backend = LocalBackend(tiny_config(), folder, kernels="torch")
    rig = Rig(backend)
    trunk = rig.root()
    text = ids(400, 4)
    rig.run(rig.work(trunk, text))
    children = [rig.fork(trunk) for _ in range(8)]
    works = [rig.work(child, [i]) for i, child in enumerate(children)]
    plan = plan_attention(works, rig.page, backend._kv.capacity_rows)
    assert plan.keys_read == 400 + 8
    for i, got in enumerate(rig.logits(*works)):
        close(got, reference(model, [*text, i])[-1:])
