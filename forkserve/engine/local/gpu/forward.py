"""The forward pass of `forkserve.engine.local.decoder` on Triton kernels.

Kernels: products, (residual + norm), (norm + rope + KV write), (norm + rope of queries), attention,
(activation * up).  Adding to the residual in the product's kernel instead would move as many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from forkserve.engine.local.decoder import Decoder, Layer
from forkserve.engine.local.linear import Linear
from forkserve.kernels.activation import gated
from forkserve.kernels.linear import Weight, code_weight, linear
from forkserve.kernels.norm import add_rms_norm
from forkserve.kernels.quant import KVRows
from forkserve.kernels.rope import norm_rope
from forkserve.kernels.tile_attention import Partials, attend_tiles
from forkserve.kernels.tile_plans import DevicePlan
from forkserve.kernels.write_kv import Guard, rotate_write_kv

__all__ = ["DeviceDecoder", "Numbers"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is computed in, and whether weights of products are integers (of `code_weight`)."""

    dtype: torch.dtype
    coded: bool = False


@dataclass(frozen=True, slots=True)
class _Product:
    """y = x @ weight.T + bias, on the device."""

    weight: Weight
    bias: torch.Tensor | None

    @classmethod
    def of(cls, given: Linear, device: torch.device, numbers: Numbers) -> _Product:
        bias = None if given.bias is None else given.bias.to(device, numbers.dtype)
        if numbers.coded:
            return cls(code_weight(given.weight.to(device)), bias)
        return cls(Weight(given.weight.to(device, numbers.dtype)), bias)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, dtype)


@dataclass(frozen=True, slots=True)
class _DeviceLayer:
    """A `Layer` on the device."""

    attn_norm: torch.Tensor
    qkv: _Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: _Product
    post_attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: _Product
    down: _Product
    post_ffn_norm: torch.Tensor | None

    @classmethod
    def of(cls, layer: Layer, device: torch.device, numbers: Numbers) -> _DeviceLayer:
        def product(given: Linear) -> _Product:
            return _Product.of(given, device, numbers)

        def vector(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else weight.to(device)

        return cls(
            layer.attn_norm.to(device),
            product(layer.qkv),
            vector(layer.q_norm),
            vector(layer.k_norm),
            product(layer.out),
            vector(layer.post_attn_norm),
            layer.ffn_norm.to(device),
            product(layer.gate_up),
            product(layer.down),
            vector(layer.post_ffn_norm),
        )


class DeviceDecoder:
    """Weights on a device and the forward pass.  No state besides them."""

    def __init__(self, decoder: Decoder, device: torch.device, numbers: Numbers) -> None:
        """Copies the weights of `decoder` to the device."""
        self.spec, self.dtype = decoder.spec, numbers.dtype
        self._embed = decoder.embed.to(device, numbers.dtype)
        tied = decoder.head.weight is decoder.embed
        # Rows of the embedding are read one by one: integers would save nothing there.
        head = Linear(self._embed) if tied and not numbers.coded else decoder.head
        self._head = _Product.of(head, device, numbers)
        self._final_norm = decoder.final_norm.to(device)
        for rope in decoder.ropes:
            rope.reach(len(rope.cos))  # recorded graphs read tables at fixed addresses
        self._ropes = [(rope.cos.to(device), rope.sin.to(device)) for rope in decoder.ropes]
        self._layers = [_DeviceLayer.of(layer, device, numbers) for layer in decoder.layers]

    def forward(
        self,
        ids: torch.Tensor,
        plans: Mapping[int, DevicePlan],
        kv: Sequence[KVRows],
        partials: Partials,
        guard: Guard | None = None,
    ) -> torch.Tensor:
        """ids [n], a plan for each window -> hidden [n, E], normed; writes kv."""
        spec = self.spec
        heads, kv_heads = spec.heads, spec.kv_heads
        fresh = next(iter(plans.values()))
        x = self._embed[ids].float()
        if spec.embed_scale != 1.0:
            x *= spec.embed_scale
        delta: torch.Tensor | None = None
        post: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            window = spec.windows[i]
            cos, sin = self._ropes[spec.rope_of[i]]
            h = add_rms_norm(x, layer.attn_norm, spec.eps, self.dtype, delta, post)
            y = layer.qkv(h).view(x.shape[0], heads + 2 * kv_heads, spec.head_dim)
            k, v = y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
            at = (fresh.positions, cos, sin)
            rotate_write_kv(kv[i], fresh.slots, k, v, *at, layer.k_norm, spec.eps, guard)
            q = norm_rope(y[:, :heads], *at, layer.q_norm, spec.eps)
            o = attend_tiles(
                q,
                kv[i],
                plans[window],
                partials,
                scale=spec.attn_scale,
                softcap=spec.attn_softcap,
                window=window,
            )
            delta, post = layer.out(o.flatten(1)), layer.post_attn_norm
            h = add_rms_norm(x, layer.ffn_norm, spec.eps, self.dtype, delta, post)
            delta, post = layer.down(gated(layer.gate_up(h), spec.act)), layer.post_ffn_norm
        return add_rms_norm(x, self._final_norm, spec.eps, self.dtype, delta, post)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, E], normed -> logits [m, V] in float32."""
        out = self._head(hidden, torch.float32)
        if self.spec.final_softcap:
            out = out.div_(self.spec.final_softcap).tanh_().mul_(self.spec.final_softcap)
        return out
