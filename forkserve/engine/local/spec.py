"""What distinguishes one decoder from another: sizes, rotary scaling, a row of a small table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forkserve.errors import ModelError

__all__ = ["FAMILIES", "Family", "ModelSpec", "from_gguf", "from_hugging_face"]


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between families of the same decoder.

    qkv_bias: None takes a bias if the checkpoint has one.  gguf_pairs: its GGUF stores the rows of
    q and k in adjacent pairs, where we rotate halves.
    """

    qkv_bias: bool | None
    qk_norm: bool = False
    gguf_pairs: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, gguf_pairs=True),  # Llama 2 and 3, SmolLM, Mistral's GGUF
    "mistral": Family(qkv_bias=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias=None, qk_norm=True),
}

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder.  rope: scaling parameters by Hugging Face's names, "rope_type" first."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    rope_theta: float
    rope: tuple[tuple[str, Any], ...] = ()

    def inv_freq(self, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Rotary frequencies [head_dim / 2].  factors: per-frequency divisors from the file."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        freq = 1.0 / self.rope_theta**exponent
        if factors is not None:
            return freq / factors
        rope = dict(self.rope)
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            return freq / float(rope["factor"])
        if kind == "llama3":
            return _llama3(freq, rope)
        return freq


def _llama3(freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wave = 2 * math.pi / freq
    blend = ((old / wave - low) / (high - low)).clamp(0.0, 1.0)
    return freq * (blend + (1 - blend) / factor)


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}


def _checked_rope(rope: Mapping[str, Any], where: str) -> tuple[tuple[str, Any], ...]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ModelError(
            f"{where}: rotary scaling '{kind}' is not supported; {', '.join(_ROPE_KEYS)} are"
        )
    missing = [key for key in _ROPE_KEYS[kind] if key not in rope]
    if missing:
        raise ModelError(f"{where}: rotary scaling '{kind}' lacks {', '.join(missing)}")
    return (("rope_type", kind), *((key, rope[key]) for key in _ROPE_KEYS[kind]))


def from_gguf(meta: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec a GGUF's metadata describes."""
    arch = meta.get("general.architecture")
    if arch not in FAMILIES:
        raise ModelError(
            f"{where}: architecture '{arch}' is not supported; {', '.join(FAMILIES)} are"
        )

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{where}: metadata lacks '{arch}.{key}'")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    kind = meta.get(f"{arch}.rope.scaling.type", "default")
    rope = {"rope_type": "default" if kind == "none" else kind}
    if kind == "linear":
        rope["factor"] = get("rope.scaling.factor")
    return ModelSpec(
        family=arch,
        layers=get("block_count"),
        hidden=hidden,
        ffn=get("feed_forward_length"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        vocab=meta.get(f"{arch}.vocab_size") or len(meta.get("tokenizer.ggml.tokens", ())),
        context=get("context_length"),
        eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope=_checked_rope(rope, where),
    )


def from_hugging_face(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec a config.json describes (names of transformers 4 and 5)."""
    names = config.get("architectures") or [None]
    family = _HF_ARCHITECTURES.get(names[0])
    if family is None:
        raise ModelError(
            f"{where}: architecture '{names[0]}' is not supported; "
            f"{', '.join(_HF_ARCHITECTURES)} are"
        )

    def get(key: str) -> Any:
        if config.get(key) is None:
            raise ModelError(f"{where}: config.json lacks '{key}'")
        return config[key]

    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: activation '{config['hidden_act']}' is not supported; silu is")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    heads, hidden, context = get("num_attention_heads"), get("hidden_size"), _context(config, get)
    return ModelSpec(
        family=family,
        layers=get("num_hidden_layers"),
        hidden=hidden,
        ffn=get("intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=get("vocab_size"),
        context=context,
        eps=get("rms_norm_eps"),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope=_checked_rope(rope, where),
    )


def _context(config: Mapping[str, Any], get: Any) -> int:
    """Context length; with a sliding window, up to it, where window and full attention agree."""
    context = int(get("max_position_embeddings"))
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        context = min(context, int(window))
    return context
