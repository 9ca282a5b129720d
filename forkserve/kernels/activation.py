"""The gated activation of the MLP: act(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forkserve.kernels.jit import EXACT, Case, ceil_div, jit, runs_kernels, tl

__all__ = ["gated"]

_BLOCK = 1024


def gated(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """gate_up [n, 2F], the gate first -> [n, F].  act: "silu" or "gelu_tanh"; in float32 inside."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not runs_kernels(gate_up):
        gate: torch.Tensor
        up: torch.Tensor
        gate, up = gate_up.float().split(width, 1)
        gate = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
        return (gate * up).to(gate_up.dtype)
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(n, ceil_div(width, _BLOCK))](
        out, gate_up, width, BLOCK=_BLOCK, SILU=act == "silu", **EXACT
    )
    return out


@jit
def gated_kernel(
    out: tl.tensor, gate_up: tl.tensor, width: int, BLOCK: tl.constexpr, SILU: tl.constexpr
) -> None:
    """BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        inner = gate
    else:  # gelu(x) by tanh(y) is x * sigmoid(2y)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    fade = tl.exp(-tl.abs(inner))
    value = gate * tl.where(inner < 0, fade, 1.0) / (1.0 + fade) * up
    tl.store(out + row * width + i, value.to(out.dtype.element_ty), mask=mask)


CASES = {
    "gated_kernel": [
        Case(
            f"{act} {kind}",
            {"out": f"*{kind}", "gate_up": f"*{kind}", "width": "i32"},
            {"BLOCK": _BLOCK, "SILU": act == "silu"},
            aligned=("width",),
        )
        for act, kind in (("silu", "bf16"), ("gelu_tanh", "bf16"), ("silu", "fp32"))
    ]
}
