"""What distinguishes one decoder from another: sizes, and a row of a small table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forkserve.engine.local.rotary import Rope

__all__ = ["FAMILIES", "Family", "ModelSpec"]


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between families of the same decoder.

    qkv_bias: None takes a bias if the checkpoint has one.  qk_norm: queries and keys are normed
    per head.  gguf_pairs: its GGUF stores the rows of q and k in adjacent pairs, where we rotate
    halves.  norm_plus_one: its safetensors hold norm weights minus one (GGUF holds them whole, and
    so does everything past the checkpoint).  scaled_embed: embeddings are multiplied by
    sqrt(hidden).  capped: scores of attention are, by the file's cap; Gemma 3's are not, though its
    configuration has the name [transformers, modeling_gemma3].  act, post_norms: as in `ModelSpec`.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    gguf_pairs: bool = False
    act: str = "silu"
    post_norms: bool = False
    norm_plus_one: bool = False
    scaled_embed: bool = False
    capped: bool = False


_GEMMA = {"act": "gelu_tanh", "post_norms": True, "norm_plus_one": True, "scaled_embed": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf_pairs=True),  # Llama 2 and 3, SmolLM, Mistral's GGUF
    "mistral": Family(qkv_bias=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma2": Family(capped=True, **_GEMMA),  # type: ignore[arg-type]
    "gemma3": Family(qk_norm=True, **_GEMMA),  # type: ignore[arg-type]
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and constants of a decoder.

    ropes: tables of rotations; rope_of[i] is the one of layer i.  windows[i]: how many positions,
    its own among them, a row of layer i sees; 0 is all.  attn_scale: what scores are multiplied by.
    attn_softcap, final_softcap: scores, or logits, x become cap * tanh(x / cap); 0 leaves them.
    embed_scale: what embeddings are multiplied by.  act: "silu" or "gelu_tanh", on the MLP's gate.
    post_norms: attention and MLP are normed once more before they are added to the residual.
    """

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
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    windows: tuple[int, ...]
    attn_scale: float
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embed_scale: float = 1.0
    act: str = "silu"
    post_norms: bool = False

    def within(self, context: int) -> ModelSpec:
        """The same for an engine whose sequences have up to `context` positions."""
        return replace(self, ropes=tuple(rope.within(context) for rope in self.ropes))

    @property
    def window(self) -> int:
        """Positions that any layer sees at most, if every layer has a window; else 0."""
        return max(self.windows) if all(self.windows) else 0
