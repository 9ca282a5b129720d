"""The decoder: one forward pass for every family in `spec.FAMILIES`.

Shapes: n rows of the batch, E hidden, H query heads, Hk kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from forkserve.engine.local.checkpoint import Checkpoint
from forkserve.engine.local.linear import Linear
from forkserve.engine.local.rotary import Turns
from forkserve.engine.local.spec import FAMILIES
from forkserve.kernels.plan import Plan
from forkserve.kernels.rope import apply_rope, rope_table
from forkserve.kernels.segment_attention import segment_attention
from forkserve.kernels.write_kv import write_kv

__all__ = ["Decoder"]

# Rows of one pass through the MLP: its buffers stay in cache and are reused by the allocator
# instead of being mapped afresh, which dominates element-wise work from about 2,048 rows on.
_MLP_ROWS = 512
_ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block.  qkv [(H + 2*Hk) * D, E], gate_up [2*F, E]."""

    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_ffn_norm: torch.Tensor | None


class Decoder:
    """Weights and the forward pass.  No state besides them."""

    def __init__(
        self, source: Checkpoint, dtype: torch.dtype, max_context: int, *, coded: bool = False
    ) -> None:
        """dtype: of KV and of weights; coded: weights of products are 8-bit integers instead."""
        self.spec = spec = source.spec
        self.dtype = dtype
        self.embed = _load(source, "embed", (spec.vocab, spec.hidden), dtype)
        self.final_norm = _load(source, "final_norm", (spec.hidden,))
        self.layers = [_load_layer(source, i, dtype, coded) for i in range(spec.layers)]
        name, shape = "head" if source.has("head") else "embed", (spec.vocab, spec.hidden)
        if coded:
            self.head = Linear.coded(_load(source, name, shape))
        else:
            self.head = Linear(self.embed if name == "embed" else _load(source, name, shape, dtype))
        factors = None
        if source.has("rope_factors"):
            factors = _load(source, "rope_factors", (spec.head_dim // 2,))
        table = (max_context, 1, spec.head_dim)
        self.ropes = [  # of each of the spec's tables: cos and sin [max_context, 1, D]
            Turns(
                torch.empty(table),
                torch.empty(table),
                partial(_rope_rows, rope.inv_freq(spec.head_dim, factors), rope.magnitude),
            )
            for rope in spec.ropes
        ]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: Plan, kv: list[torch.Tensor]
    ) -> torch.Tensor:
        """ids [n], positions [n] -> hidden [n, E] before the last norm; writes kv."""
        spec = self.spec
        heads, kv_heads = spec.heads, spec.kv_heads
        for rope in self.ropes:
            rope.reach(int(positions.max()) + 1)
        turns = [(rope.cos[positions], rope.sin[positions]) for rope in self.ropes]
        x = self.embed[ids].float()
        if spec.embed_scale != 1.0:
            x *= spec.embed_scale
        for i, (layer, rows) in enumerate(zip(self.layers, kv, strict=True)):
            h = F.rms_norm(x, (spec.hidden,), layer.attn_norm, spec.eps)
            y = layer.qkv(h).view(x.shape[0], heads + 2 * kv_heads, spec.head_dim)
            qk, v = y[:, : heads + kv_heads], y[:, heads + kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(qk[:, :heads].float(), (spec.head_dim,), layer.q_norm, spec.eps)
                k = F.rms_norm(qk[:, heads:].float(), (spec.head_dim,), layer.k_norm, spec.eps)
                qk = torch.cat([q, k], 1)
            qk = apply_rope(qk, *turns[spec.rope_of[i]])
            write_kv(rows[:kv_heads], plan.slots, qk[:, heads:])
            write_kv(rows[kv_heads:], plan.slots, v)
            q = qk[:, :heads].to(self.dtype)
            o = segment_attention(
                q, rows, plan, spec.windows[i], scale=spec.attn_scale, softcap=spec.attn_softcap
            )
            x += self._normed(layer.out(o), layer.post_attn_norm)
            self._mlp(layer, x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, E] -> logits [m, V] in float32."""
        spec = self.spec
        out = self.head(F.rms_norm(hidden, (spec.hidden,), self.final_norm, spec.eps)).float()
        if spec.final_softcap:
            out.div_(spec.final_softcap).tanh_().mul_(spec.final_softcap)
        return out

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x [n, E], normed in float32 where the model does so before it adds to the residual."""
        if weight is None:
            return x
        return F.rms_norm(x.float(), (self.spec.hidden,), weight, self.spec.eps)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> None:
        """x [n, E] += MLP(norm(x)), in place."""
        spec = self.spec
        for part in x.split(_MLP_ROWS):
            h = F.rms_norm(part, (spec.hidden,), layer.ffn_norm, spec.eps)
            gate_up = layer.gate_up(h)
            act = _ACTS[spec.act](gate_up[:, : spec.ffn]).mul_(gate_up[:, spec.ffn :])
            part += self._normed(layer.down(act), layer.post_ffn_norm)


def _rope_rows(
    inv_freq: torch.Tensor, magnitude: float, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(inv_freq, begin, end, magnitude)


def _load(
    source: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    source.read(name, tensor)
    return tensor


def _load_layer(source: Checkpoint, i: int, dtype: torch.dtype, coded: bool) -> Layer:
    spec, family = source.spec, FAMILIES[source.spec.family]
    q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    e, f = spec.hidden, spec.ffn

    def vector(name: str, size: int) -> torch.Tensor:
        return _load(source, f"{i}.{name}", (size,))

    def linear(sizes: dict[str, int], inputs: int, bias: bool | None = None) -> Linear:
        """The named products as one, with their biases (None: if the checkpoint has them)."""
        if bias is None:
            bias = source.has(f"{i}.{next(iter(sizes))}.bias")
        read = torch.float32 if coded else dtype  # integers are made from what the file has
        weight = torch.empty(sum(sizes.values()), inputs, dtype=read)
        shift = torch.empty(sum(sizes.values()), dtype=read) if bias else None
        low = 0
        for name, size in sizes.items():
            source.read(f"{i}.{name}", weight[low : low + size])
            if shift is not None:
                source.read(f"{i}.{name}.bias", shift[low : low + size])
            low += size
        return Linear.coded(weight, shift) if coded else Linear(weight, shift)

    return Layer(
        attn_norm=vector("attn_norm", e),
        qkv=linear({"q": q, "k": k, "v": k}, e, family.qkv_bias),
        q_norm=vector("q_norm", spec.head_dim) if family.qk_norm else None,
        k_norm=vector("k_norm", spec.head_dim) if family.qk_norm else None,
        out=linear({"o": e}, q),
        post_attn_norm=vector("post_attn_norm", e) if spec.post_norms else None,
        ffn_norm=vector("ffn_norm", e),
        gate_up=linear({"gate": f, "up": f}, e),
        down=linear({"down": e}, f),
        post_ffn_norm=vector("post_ffn_norm", e) if spec.post_norms else None,
    )
