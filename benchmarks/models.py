"""The same weights for both engines, and what the memory of this machine can do."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forkserve.config import ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.types import Batch, BatchResult

__all__ = ["Pass", "Watched", "bandwidth", "hugging_face", "text", "tiny_llama"]


@dataclass(frozen=True)
class Pass:
    """One forward pass: rows, works, whether it held speculation, ms, and live pages in it."""

    rows: int
    works: int
    speculative: bool
    ms: float
    live: int


class Watched(LocalBackend):
    """The local engine with a record of its passes.  on_start is told of each before it runs."""

    def __init__(self, config: ForkServeConfig, model: str | Path, **options: Any) -> None:
        self.passes: list[Pass] = []
        self.live: Callable[[], int] = lambda: 0
        self.on_start: Callable[[bool], None] = lambda speculative: None
        super().__init__(config, model, **options)

    def execute(self, batch: Batch) -> BatchResult:
        speculative = any(work.speculative for work in batch.works)
        self.on_start(speculative)
        result = super().execute(batch)
        rows = sum(len(work.tokens) for work in batch.works)
        ms = result.elapsed_ms
        self.passes.append(Pass(rows, len(batch.works), speculative, ms, self.live()))
        return result


def tiny_llama() -> Path:
    """A random checkpoint on disk, for runs that only try the code."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=257,
        bos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.12) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    folder = Path(tempfile.mkdtemp(prefix="forkserve-bench-"))
    model.save_pretrained(folder)
    _tiny_tokenizer(folder)
    return folder


def _tiny_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')


_PARTS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hugging_face(model: str | Path) -> Any:
    """transformers' Llama, float32, filled by our own reader: both engines run equal weights."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = open_checkpoint(model)
    spec = source.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.eps,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].theta},
    )
    config._attn_implementation = "sdpa"
    llama: Any
    with torch.device("meta"):  # no time for a random initialisation
        llama = transformers.LlamaForCausalLM(config)
    state = {}
    for name, parameter in llama.state_dict().items():
        if name == "lm_head.weight":
            continue
        out = state[name] = torch.empty(parameter.shape)
        source.read(_our_name(name.removesuffix(".weight").split(".")), out)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, strict=True, assign=True)
    llama.tie_weights()
    llama.model.rotary_emb = LlamaRotaryEmbedding(config)
    source.close()
    return llama.eval()


def _our_name(words: list[str]) -> str:
    """ "model.layers.3.self_attn.q_proj" -> "3.q"."""
    if words[1] == "layers":
        part = next(p for p, theirs in _PARTS.items() if theirs == ".".join(words[3:]))
        return f"{words[2]}.{part}"
    return {"embed_tokens": "embed", "norm": "final_norm"}[words[1]]


def text(count: int, vocab: int, seed: int) -> list[int]:
    """Random ids, none of them special."""
    draw, low = random.Random(seed), min(100, vocab // 4)
    return [draw.randrange(low, vocab - low) for _ in range(count)]


def bandwidth(megabytes: int = 256, rounds: int = 7) -> tuple[float, float]:
    """(read, copy) in GB/s with torch's threads, the best of some rounds: the ceiling is the best.

    copy counts the bytes read and the bytes written.
    """
    a = torch.ones(megabytes * 2**18)
    b = torch.empty_like(a)
    read = copy = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        a.sum()
        read = max(read, a.nbytes / (time.perf_counter() - begin) / 1e9)
        begin = time.perf_counter()
        b.copy_(a)
        copy = max(copy, 2 * a.nbytes / (time.perf_counter() - begin) / 1e9)
    return read, copy
