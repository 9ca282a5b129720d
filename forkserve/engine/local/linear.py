"""Matrix products with weights in float32, bfloat16 or 8-bit integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Linear"]

# torch's bf16 matrix-vector product runs at memory speed, its matrix-matrix product at a quarter
# of float32's.  So few rows go one by one, more through weights widened to float32.
_VECTOR_ROWS = 6
# MKL takes longer for 2 to 5 rows (48 to 65 ms over SmolLM2's products) than for 6 or 8 (37, 40).
_PADDED_ROWS = 8
_WIDEN_ROWS = 8192  # output features widened at a time: bounds the scratch for large heads
_BLOCK = 32  # weights of an output that share a scale, as in the native kernels


class Linear:
    """y = x @ w.T + b for x [n, K], w [N, K].

    float32: x and y are float32.  bfloat16: x is rounded to bfloat16 first and y is bfloat16, so
    that both routes agree but for the order of float32 sums.  int8: a weight is integer * scale;
    x and y are float32.

    scales: of int8 weights, bfloat16 [N, K / 32, rounded up].
    """

    __slots__ = ("bias", "scales", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.scales = scales

    @classmethod
    def coded(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight [N, K] float32 in integers of -127..127, the very ones of the native kernels."""
        n, k = weight.shape
        parts = F.pad(weight, (0, -k % _BLOCK)).view(n, -1, _BLOCK)
        scales = (parts.abs().amax(2) / 127).bfloat16()
        step = scales.float()
        inverse = torch.where(step >= torch.finfo(torch.float32).tiny, 1 / step, 0)[..., None]
        codes = (parts * inverse).round().clamp(-127, 127).to(torch.int8)
        return cls(codes.view(n, -1)[:, :k].contiguous(), bias, scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scales is not None:
            return self._widened(x.float(), self.scales)
        if self.weight.dtype == torch.float32:
            n = x.shape[0]
            if 1 < n < _PADDED_ROWS:
                x = F.pad(x, (0, 0, 0, _PADDED_ROWS - n))
            return F.linear(x, self.weight, self.bias)[:n]
        x = x.to(self.weight.dtype)
        n, out = x.shape[0], self.weight.shape[0]
        if n == 1:
            return F.linear(x, self.weight, self.bias)
        y = x.new_empty(n, out)
        if n <= _VECTOR_ROWS:
            for i in range(n):
                y[i : i + 1] = F.linear(x[i : i + 1], self.weight, self.bias)
            return y
        wide = x.float()
        for low in range(0, out, _WIDEN_ROWS):
            bias = None if self.bias is None else self.bias[low : low + _WIDEN_ROWS].float()
            y[:, low : low + _WIDEN_ROWS] = F.linear(
                wide, self.weight[low : low + _WIDEN_ROWS].float(), bias
            )
        return y

    def _widened(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The product with int8 weights, some outputs at a time."""
        n, k = self.weight.shape
        y = x.new_empty(x.shape[0], n)
        for low in range(0, n, _WIDEN_ROWS):
            high = min(low + _WIDEN_ROWS, n)
            step = scales[low:high].float().repeat_interleave(_BLOCK, 1)[:, :k]
            bias = None if self.bias is None else self.bias[low:high]
            y[:, low:high] = F.linear(x, self.weight[low:high].float().mul_(step), bias)
        return y
