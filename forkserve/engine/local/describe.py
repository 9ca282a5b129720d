"""The spec that a config.json or a GGUF's metadata describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkserve.engine.local.rotary import Rope, checked_rope
from forkserve.engine.local.sound import whole
from forkserve.engine.local.spec import FAMILIES, ModelSpec
from forkserve.errors import ModelError

__all__ = ["from_gguf", "from_hugging_face", "text_config", "tied_head"]

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its text part
}
# What a config.json may leave out, since the library that wrote it has these defaults.
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
_ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_OLD = "original_max_position_embeddings"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model: all of it, or what stands beside a vision part."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def tied_head(config: Mapping[str, Any]) -> bool:
    """Whether the embedding is the output's matrix too: by the file, or as the family has it."""
    for part in (config, text_config(config)):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    family = _HF_ARCHITECTURES[config["architectures"][0]]
    return FAMILIES[family].post_norms  # Gemma's


def from_hugging_face(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec a config.json describes (names of transformers 4 and 5)."""
    names = config.get("architectures") or [None]
    family = _HF_ARCHITECTURES.get(names[0])
    if family is None:
        raise ModelError(
            f"{where}: architecture '{names[0]}' is not supported; "
            f"{', '.join(_HF_ARCHITECTURES)} are"
        )
    text = text_config(config)
    if quantised := config.get("quantization_config") or text.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        raise ModelError(
            f"{where}: weights quantised by '{method}' are not supported; float32, float16 and "
            "bfloat16 are, or a GGUF file"
        )
    traits = FAMILIES[family]
    config = {**_DEFAULTS.get(family, {}), **text}

    def get(key: str) -> Any:
        if config.get(key) is None:
            raise ModelError(f"{where}: config.json lacks '{key}'")
        return config[key]

    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if _ACTS.get(act) != traits.act:
        wanted = next(name for name, ours in _ACTS.items() if ours == traits.act)
        raise ModelError(f"{where}: activation '{act}' is not supported; {wanted} is")
    if config.get("use_bidirectional_attention"):
        raise ModelError(f"{where}: bidirectional attention is not supported; causal is")
    heads, hidden, layers = (
        whole(get(key), key, where)
        for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = config.get("head_dim") or hidden // heads
    kinds = _layer_kinds(config, family, layers, where)
    ropes, rope_of = _hf_ropes(config, kinds, where)
    context = _context(int(get("max_position_embeddings")), ropes)
    window = int(config.get("sliding_window") or 0)
    return ModelSpec(
        family=family,
        layers=layers,
        hidden=hidden,
        ffn=get("intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=get("vocab_size"),
        context=context,
        eps=get("rms_norm_eps"),
        ropes=ropes,
        rope_of=rope_of,
        windows=_windows([window if kind == _LOCAL else 0 for kind in kinds], context),
        attn_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attn_softcap=float(config.get("attn_logit_softcapping") or 0.0) if traits.capped else 0.0,
        final_softcap=float(config.get("final_logit_softcapping") or 0.0),
        embed_scale=math.sqrt(hidden) if traits.scaled_embed else 1.0,
        act=traits.act,
        post_norms=traits.post_norms,
    )


def _layer_kinds(config: Mapping[str, Any], family: str, layers: int, where: str) -> list[str]:
    """Which layers have a sliding window: listed, or by one of the older conventions."""
    if family == "llama" or not config.get("sliding_window"):
        return [_GLOBAL] * layers  # a Llama has none, whatever else its file holds
    listed = config.get("layer_types")
    if listed:
        if len(listed) != layers or not set(listed) <= {_LOCAL, _GLOBAL}:
            raise ModelError(
                f"{where}: layer_types lists {len(listed)} layers of kinds "
                f"{', '.join(sorted(set(map(str, listed))))}; {layers} of {_LOCAL} or {_GLOBAL} "
                "are supported"
            )
        return [str(kind) for kind in listed]
    if config.get("sliding_window_pattern"):
        period = int(config["sliding_window_pattern"])
        return [_LOCAL if (i + 1) % period else _GLOBAL for i in range(layers)]
    if "use_sliding_window" in config:  # Qwen: from a layer on
        first = config.get("max_window_layers", 28) if config["use_sliding_window"] else layers
        return [_LOCAL if i >= first else _GLOBAL for i in range(layers)]
    return [_LOCAL] * layers


def _hf_ropes(
    config: Mapping[str, Any], kinds: Sequence[str], where: str
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The tables, and which of them each layer uses."""
    given = dict(config.get("rope_parameters") or {})
    theta = float(config.get("rope_theta") or 10000.0)

    def table(given: Mapping[str, Any], theta: float) -> Rope:
        trained, old = config.get("max_position_embeddings"), config.get(_OLD) or given.get(_OLD)
        filled = {"partial_rotary_factor": config.get("partial_rotary_factor"), **given}
        filled[_OLD] = old or trained
        kind = given.get("rope_type", given.get("type"))
        if kind in ("yarn", "longrope") and given.get("factor") is None and trained and old:
            filled["factor"] = trained / old
        return checked_rope(float(given.get("rope_theta") or theta), filled, where)

    local = config.get("rope_local_base_freq")
    if any(kind in given for kind in (_LOCAL, _GLOBAL)):  # one for each kind of layer
        tables = {
            _GLOBAL: table(given.get(_GLOBAL) or {}, theta),
            _LOCAL: table(given.get(_LOCAL) or {}, float(local or theta)),
        }
    else:
        tables = dict.fromkeys((_GLOBAL, _LOCAL), table(given or _scaling(config), theta))
        if local:
            tables[_LOCAL] = table({}, float(local))
    distinct = tuple(dict.fromkeys(tables[kind] for kind in kinds))
    return distinct, tuple(distinct.index(tables[kind]) for kind in kinds)


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or {}


def _context(trained: int, ropes: Sequence[Rope]) -> int:
    """Longest context.  YaRN's configurations often give the length before it is stretched."""
    for rope in ropes:
        if rope.kind == "yarn":
            params = dict(rope.params)
            stretched = params["factor"] * params[_OLD]
            trained = max(trained, int(stretched))
    return trained


def _windows(windows: Sequence[int], context: int) -> tuple[int, ...]:
    """Windows that can hide something; the others are full attention."""
    return tuple(w if 0 < w < context else 0 for w in windows)


# -- GGUF ------------------------------------------------------------------------------------

# llama.cpp's own constants for what its files leave out.
_GGUF_PERIOD = {"gemma2": 2, "gemma3": 6}
_GGUF_SCALING = ("none", "linear", "yarn")
_GGUF_EVERYWHERE = ("llama",)  # a window is one of all layers: Mistral
_GGUF_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, which scale otherwise


def from_gguf(meta: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec a GGUF's metadata describes, read as llama.cpp reads it."""
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

    traits = FAMILIES[arch]
    heads, hidden, layers = (
        whole(get(key), f"{arch}.{key}", where)
        for key in ("attention.head_count", "embedding_length", "block_count")
    )
    head_dim = get("attention.key_length", hidden // heads)
    if get("expert_count", 0):
        raise ModelError(f"{where}: {get('expert_count')} experts: mixtures are not supported")
    if get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{where}: keys and values of different sizes are not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{where}: {get('rope.dimension_count')} of {head_dim} values rotated: not supported"
        )
    window = int(get("attention.sliding_window", 4096 if arch == "gemma2" else 0))
    local = _gguf_local(get("attention.sliding_window_pattern", 0), arch, layers, window)
    ropes, rope_of = _gguf_ropes(get, arch, local, where)
    context = _context(int(get("context_length")), ropes)
    gemma2 = arch == "gemma2"
    vocab = meta.get(f"{arch}.vocab_size") or len(meta.get("tokenizer.ggml.tokens", ()))
    if not vocab:
        raise ModelError(f"{where} has no tokenizer, and no size of a vocabulary")
    return ModelSpec(
        family=arch,
        layers=layers,
        hidden=hidden,
        ffn=get("feed_forward_length"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=vocab,
        context=context,
        eps=get("attention.layer_norm_rms_epsilon"),
        ropes=ropes,
        rope_of=rope_of,
        windows=_windows([window if is_local else 0 for is_local in local], context),
        attn_scale=_gguf_scale(get, arch, layers, hidden // heads, head_dim),
        attn_softcap=float(get("attn_logit_softcapping", 50.0)) if traits.capped else 0.0,
        final_softcap=float(get("final_logit_softcapping", 30.0 if gemma2 else 0.0)),
        embed_scale=math.sqrt(hidden) if traits.scaled_embed else 1.0,
        act=traits.act,
        post_norms=traits.post_norms,
    )


def _gguf_local(pattern: Any, arch: str, layers: int, window: int) -> list[bool]:
    """Which layers have the window: a list, a period, or the architecture's own period."""
    if not window:
        return [False] * layers
    if isinstance(pattern, list):
        return [bool(pattern[i]) if i < len(pattern) else False for i in range(layers)]
    period = int(pattern) or _GGUF_PERIOD.get(arch, 0)
    if not period:
        return [arch in _GGUF_EVERYWHERE] * layers
    return [bool((i + 1) % period) for i in range(layers)]


def _gguf_scale(
    get: Callable[..., Any], arch: str, layers: int, per_head: int, head_dim: int
) -> float:
    given = float(get("attention.scale", 0.0))
    size = per_head if layers == _GGUF_LARGEST.get(arch) else head_dim
    return given or 1.0 / math.sqrt(size)


def _gguf_ropes(
    get: Callable[..., Any], arch: str, local: Sequence[bool], where: str
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The tables, and which of them each layer uses: Gemma 3's local layers have their own."""
    factor = get("rope.scaling.factor", 0.0) or get("rope.scale_linear", 0.0)
    kind = get("rope.scaling.type", "linear" if factor else "none")
    if kind not in _GGUF_SCALING:
        raise ModelError(
            f"{where}: rotary scaling '{kind}' is not supported from GGUF; "
            f"{', '.join(_GGUF_SCALING)} are"
        )
    plain = kind == "none" or (kind == "linear" and not factor)
    given: dict[str, Any] = {"rope_type": "default" if plain else kind}
    if factor:
        given["factor"] = factor
    if kind == "yarn":
        given[_OLD] = get("rope.scaling.original_context_length", get("context_length"))
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            given[ours] = get(f"rope.scaling.{theirs}", 0.0)
        magnitude = get("rope.scaling.yarn_attn_factor", get("rope.scaling.attn_factor", 0.0))
        if magnitude and factor:  # on top of the usual one
            given["attention_factor"] = magnitude * (1 + 0.1 * math.log(factor))
    theta = float(get("rope.freq_base", 10000.0))
    whole = checked_rope(theta, given, where)
    inner = whole
    if arch == "gemma3":
        inner = Rope(float(get("rope.freq_base_swa", 10000.0)))
    tables = [inner if is_local else whole for is_local in local]
    distinct = tuple(dict.fromkeys(tables))
    return distinct, tuple(distinct.index(table) for table in tables)
