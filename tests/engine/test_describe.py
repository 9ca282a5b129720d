"""Configurations as they are published: what a spec makes of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forkserve.engine.local.describe import from_gguf, from_hugging_face, tied_head
from forkserve.engine.local.rotary import Rope
from forkserve.engine.local.spec import ModelSpec
from forkserve.errors import ModelError

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}


def hf(architecture: str, **config: Any) -> ModelSpec:
    return from_hugging_face({**SIZES, "architectures": [architecture], **config}, "here")


def test_llama_with_scaling_of_transformers_4() -> None:
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    spec = hf("LlamaForCausalLM", rope_theta=5e5, rope_scaling=scaling, sliding_window=8)
    (rope,) = spec.ropes
    assert (rope.theta, rope.kind, dict(rope.params)["factor"]) == (5e5, "llama3", 8.0)
    assert spec.windows == (0,) * 12  # a Llama has none
    assert spec.attn_scale == 0.25
    old = hf("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0})
    assert old.ropes == (Rope(10000.0, "linear", (("factor", 2.0),)),)


def test_mistral_has_its_window_on_all_layers() -> None:
    spec = hf("MistralForCausalLM", sliding_window=4096, head_dim=32)
    assert spec.windows == (4096,) * 12
    assert spec.context == 32768
    assert spec.head_dim == 32
    assert hf("MistralForCausalLM", sliding_window=None).windows == (0,) * 12
    assert hf("MistralForCausalLM", sliding_window=32768).windows == (0,) * 12  # hides nothing


def test_what_a_mistral_or_a_qwen_leaves_out() -> None:
    """Defaults of their configurations in transformers."""
    bare = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    many = {**bare, "num_attention_heads": 64, "hidden_size": 4096}
    specs = {
        name: from_hugging_face({**many, "architectures": [f"{name}ForCausalLM"]}, "here")
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    }
    assert {name: spec.kv_heads for name, spec in specs.items()} == {
        "Llama": 64,
        "Mistral": 8,
        "Qwen2": 32,
        "Qwen3": 32,
    }
    assert {name: spec.windows[0] for name, spec in specs.items()} == {
        "Llama": 0,
        "Mistral": 4096,
        "Qwen2": 0,
        "Qwen3": 0,
    }
    assert {name: spec.head_dim for name, spec in specs.items()} == {
        "Llama": 64,
        "Mistral": 64,
        "Qwen2": 64,
        "Qwen3": 128,
    }


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, True),
        ({"architectures": ["Gemma3ForCausalLM"]}, True),
        ({"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": False}, False),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}, True),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]}
            | {"text_config": {"tie_word_embeddings": False}},
            False,
        ),
    ],
)
def test_tied_heads(config: dict[str, Any], tied: bool) -> None:
    assert tied_head(config) is tied


def test_factors_that_a_length_implies() -> None:
    """Files of LongRoPE give the original length beside the rest, and no factor."""
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"type": "longrope", **lists}
    spec = hf("LlamaForCausalLM", rope_scaling=rope, original_max_position_embeddings=4096)
    assert spec.context == 32768
    assert spec.ropes[0].magnitude == pytest.approx(math.sqrt(1 + math.log(8) / math.log(4096)))
    (short,), (long,) = spec.within(4096).ropes, spec.within(4097).ropes
    assert "long_factor" not in dict(short.params)
    assert "short_factor" not in dict(long.params)
    assert (short.inv_freq(16) == 2 * long.inv_freq(16)).all()
    given = {**rope, "attention_factor": 1.25, "factor": 8.0}
    assert hf("LlamaForCausalLM", rope_scaling=given).ropes[0].magnitude == 1.25
    yarn = {"type": "yarn", "original_max_position_embeddings": 8192}
    assert dict(hf("Qwen2ForCausalLM", rope_scaling=yarn).ropes[0].params)["factor"] == 4.0


def test_qwen_says_from_which_layer_on_and_whether() -> None:
    window = {"sliding_window": 100, "max_window_layers": 9}
    assert hf("Qwen2ForCausalLM", use_sliding_window=False, **window).windows == (0,) * 12
    assert hf("Qwen2ForCausalLM", **window).windows == (0,) * 12
    spec = hf("Qwen3ForCausalLM", use_sliding_window=True, **window)
    assert spec.windows == (0,) * 9 + (100,) * 3


def test_qwen_stretched_by_yarn() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = hf("Qwen2ForCausalLM", rope_scaling=yarn, rope_theta=1e6)
    assert spec.context == 131072
    assert spec.ropes[0].magnitude == pytest.approx(1 + 0.1 * math.log(4))
    both = {**yarn, "mscale": 0.7, "mscale_all_dim": 1.0}
    magnitude = hf("Qwen2ForCausalLM", rope_scaling=both).ropes[0].magnitude
    assert magnitude == pytest.approx((1 + 0.07 * math.log(4)) / (1 + 0.1 * math.log(4)))


def test_gemma_3_as_its_makers_published_it() -> None:
    """The small ones have a pattern; the large ones leave out all that is at its default."""
    small = hf(
        "Gemma3ForCausalLM",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=16,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_theta=1000000,
        rope_scaling=None,
        sliding_window=512,
        sliding_window_pattern=6,
    )
    assert small.windows == (512, 512, 512, 512, 512, 0) * 2
    assert small.ropes == (Rope(1e4), Rope(1e6))
    assert small.rope_of == (0, 0, 0, 0, 0, 1) * 2
    assert (small.attn_scale, small.embed_scale) == (1 / 16, 8.0)
    assert (small.act, small.post_norms, small.final_softcap) == ("gelu_tanh", True, 0.0)
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    large = from_hugging_face(config, "here")
    assert (large.heads, large.kv_heads, large.head_dim, large.vocab) == (8, 4, 256, 262_208)
    assert large.ropes == (Rope(1e4), Rope(1e6, "linear", (("factor", 8.0),)))
    assert large.windows.count(0) == 5
    assert large.context == 131072


def gguf(arch: str, **meta: Any) -> ModelSpec:
    sizes = {
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "embedding_length": 64,
        "block_count": 12,
        "feed_forward_length": 96,
        "context_length": 32768,
        "vocab_size": 320,
    }
    values = {**sizes, **{key.replace("__", "."): value for key, value in meta.items()}}
    keys = {f"{arch}.{key}": value for key, value in values.items()}
    return from_gguf({"general.architecture": arch, **keys}, "here")


def test_gemma_in_gguf() -> None:
    spec = gguf(
        "gemma3",
        attention__sliding_window=512,
        attention__key_length=32,
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    assert spec.windows == (512, 512, 512, 512, 512, 0) * 2
    assert spec.ropes == (Rope(1e4), Rope(1e6, "linear", (("factor", 8.0),)))
    assert spec.attn_scale == pytest.approx(32**-0.5)
    # The largest scales by the size per head of the hidden state, not by the head's own.
    largest = gguf("gemma3", block_count=62, attention__key_length=32)
    assert largest.attn_scale == pytest.approx(16**-0.5)
    old = gguf("gemma2")
    assert (old.attn_softcap, old.final_softcap) == (50.0, 30.0)
    assert old.windows == (4096, 0) * 6


def test_windows_in_gguf() -> None:
    """Of all layers in a Mistral, of none in a Qwen that does not list them."""
    window = {"attention__sliding_window": 100}
    assert gguf("llama", **window).windows == (100,) * 12
    assert gguf("qwen2", **window).windows == (0,) * 12
    pattern = {"attention__sliding_window_pattern": [False] * 11 + [True]}
    assert gguf("qwen2", **window, **pattern).windows == (0,) * 11 + (100,)
    period = {"attention__sliding_window_pattern": 4}
    assert gguf("gemma3", **window, **period).windows == (100, 100, 100, 0) * 3


def test_yarn_in_gguf() -> None:
    spec = gguf(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32768,
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__yarn_attn_factor=0.5,
    )
    assert dict(spec.ropes[0].params)["beta_fast"] == 16.0
    assert spec.ropes[0].magnitude == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert spec.context == 131072


def test_a_scaling_factor_alone_is_linear_in_gguf() -> None:
    """As llama.cpp reads it; old files call it scale_linear, and "none" has none."""
    linear = Rope(10000.0, "linear", (("factor", 4.0),))
    assert gguf("llama", rope__scaling__factor=4.0).ropes == (linear,)
    assert gguf("llama", rope__scale_linear=4.0).ropes == (linear,)
    for keys in ({"type": "none", "factor": 4.0}, {"type": "linear"}):
        named = {f"rope__scaling__{key}": value for key, value in keys.items()}
        assert gguf("llama", **named).ropes == (Rope(10000.0),)


def test_what_a_gguf_may_not_ask_for() -> None:
    for meta, match in (
        ({"expert_count": 8}, "8 experts"),
        ({"attention__value_length": 8}, "different sizes"),
        ({"rope__dimension_count": 8}, "8 of 16 values rotated"),
    ):
        with pytest.raises(ModelError, match=match):
            gguf("llama", **meta)
