"""Transformers models as GGUF files, laid out as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .conftest import VOCAB

Pack = Callable[[np.ndarray], np.ndarray]

PLAIN = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
GEMMA_PARTS = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def rename(name: str, gemma: bool = False) -> str:
    """A transformers name as GGUF has it."""
    if name in PLAIN:
        return PLAIN[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{(GEMMA_PARTS if gemma else PARTS)[rest[-2]]}.{rest[-1]}"


def write_gguf(
    path: Path,
    model: Any,
    arch: str = "llama",
    *,
    skip: str = "",
    kind: Any = None,
    pack: Pack | None = None,
    **meta: Any,
) -> Path:
    """A model as GGUF.  kind, pack: the type of its matrices, and how they become blocks of it."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    gemma = arch.startswith("gemma")
    _sizes(writer, config, gemma)
    _rotary(writer, config, meta)
    if "split" in meta:
        writer.add_uint16("split.count", meta["split"])
    _windows(writer, config, arch)
    if meta.get("tokenizer", True):
        _tokenizer(writer, meta)
    if "rope_factors" in meta:
        writer.add_tensor("rope_freqs.weight", meta["rope_factors"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        ours = rename(name, gemma)
        if ours == skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.float().numpy().copy()
        count = heads.get(ours.split(".")[-2])
        if arch == "llama" and count:  # pairs lie side by side
            halves = array.reshape(count, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if gemma and name.endswith("norm.weight"):
            array += 1.0
        if kind is not None and array.ndim == 2:
            blocks = pack(array) if pack else gguf.quants.quantize(array, kind)
            writer.add_tensor(ours, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(ours, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: Any, config: Any, gemma: bool) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if gemma:
        if cap := config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(cap)
        if cap := config.final_logit_softcapping:
            writer.add_final_logit_softcapping(cap)


def _rotary(writer: Any, config: Any, meta: dict[str, Any]) -> None:
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = meta.get("scaling")
    if kind is None and rope.get("rope_type") in ("linear", "yarn"):
        kind = gguf.RopeScalingType(rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == gguf.RopeScalingType.YARN:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind is not None:
        writer.add_rope_scaling_type(kind)


def _windows(writer: Any, config: Any, arch: str) -> None:
    """The pattern of local layers is an architecture's own, and not written for Gemma."""
    window = getattr(config, "sliding_window", None)
    if window:
        writer.add_sliding_window(window)
        if arch.startswith("qwen"):
            kinds = config.layer_types
            writer.add_array(
                f"{arch}.attention.sliding_window_pattern",
                [kind == "sliding_attention" for kind in kinds],
            )


def _tokenizer(writer: Any, meta: dict[str, Any]) -> None:
    words = [*sorted(alphabet()), "<|im_start|>", "<|im_end|>"]
    words += [f"<unused{i}>" for i in range(VOCAB - len(words))]
    writer.add_tokenizer_model(meta.get("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(meta.get("pre", "default"))
    writer.add_token_list(words)
    writer.add_token_types([1] * 256 + [3] * (VOCAB - 256))
    writer.add_token_merges(["a b"] if meta.get("bad_merge") else [])
    writer.add_eos_token_id(257)
