"""Norm, rope, activation and drawing, against torch and against the engine's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from forkserve.engine.sampling import logprobs, sample, uniform
from forkserve.kernels import sample as sampler
from forkserve.kernels.activation import gated
from forkserve.kernels.norm import add_rms_norm
from forkserve.kernels.rope import apply_rope, norm_rope, rope_table
from forkserve.types import SampleSpec, SamplingParams

from .rig import DEVICE

DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_rope(dtype: torch.dtype, dim: int, normed: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 7, dim).to(dtype)
    cos, sin = rope_table(1 / 10000 ** (torch.arange(0, dim, 2) / dim), 0, 64, 1.3)
    at = torch.tensor([3, 0, 63, 7, 8])
    weight = torch.rand(dim) + 0.5 if normed else None
    x = qkv[:, :3].double()
    if weight is not None:
        x = F.rms_norm(x, (dim,), weight.double(), 1e-5)
    want = apply_rope(x, cos[at].double(), sin[at].double())
    given = (qkv.to(DEVICE)[:, :3], at.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE))
    got = norm_rope(*given, None if weight is None else weight.to(DEVICE), 1e-5)
    close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 40])
@pytest.mark.parametrize("kind", ["alone", "added", "normed"])
def test_norm(dtype: torch.dtype, width: int, kind: str) -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(3, width), torch.randn(3, width).to(dtype)
    weight, second = torch.rand(width) + 0.5, torch.rand(width) + 0.5
    total = x.double()
    if kind != "alone":
        more = delta.double()
        total = total + (
            F.rms_norm(more, (width,), second.double(), 1e-5) if kind == "normed" else more
        )
    want = F.rms_norm(total, (width,), weight.double(), 1e-5)
    stream = x.to(DEVICE)
    got = add_rms_norm(
        stream,
        weight.to(DEVICE),
        1e-5,
        dtype,
        None if kind == "alone" else delta.to(DEVICE),
        second.to(DEVICE) if kind == "normed" else None,
    )
    close(got, want, dtype)
    close(stream, total, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activation(dtype: torch.dtype, act: str) -> None:
    gate_up = (torch.linspace(-12, 12, 2 * 2 * 1100).view(2, 2200)).to(dtype)
    gate, up = gate_up.double().split(1100, 1)
    gate = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
    close(gated(gate_up.to(DEVICE), act), gate * up, dtype)


def draw(logits: torch.Tensor, temperatures: list[float], points: list[float]) -> list[list[float]]:
    tokens, log_p = sampler.draw(
        logits.to(DEVICE),
        torch.tensor(temperatures, device=DEVICE),
        torch.tensor(points, dtype=torch.float64, device=DEVICE),
    )
    return [tokens.tolist(), log_p.tolist()]


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_BLOCK", 64)


@pytest.mark.usefixtures("_small_blocks")
def test_draws_are_those_of_the_engine() -> None:
    torch.manual_seed(3)
    logits = torch.randn(8, 200) * 3
    logits[0, 5] = logits[0, 130] = 50.0  # equals: the lowest id
    logits[3, 8:] = float("-inf")
    temperatures = [0.0, 0.7, 1.0, 1.0, 2.0, 0.01, 1.0, 0.0]
    points = [uniform(5, i) for i in range(8)]
    points[6] = 1 - 2**-53
    tokens, log_p = draw(logits, temperatures, points)
    for i in range(8):
        if i == 6:
            assert tokens[i] == 199, "the end of the distribution"
            continue
        spec = SampleSpec(SamplingParams(temperature=temperatures[i]), 5, i, 0, 0)
        token = sample(logits[i].numpy(), spec)
        assert tokens[i] == token
        wanted, _ = logprobs(logits[i].numpy(), token)
        assert log_p[i] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, under the interpreter
def test_no_finite_logit_gives_no_token() -> None:
    logits = torch.zeros(3, 150)
    logits[0] = float("-inf")
    logits[1, 140] = float("nan")
    logits[2, 3] = float("inf")
    assert draw(logits, [0.0] * 3, [0.5] * 3)[0] == [-1, -1, -1]


@pytest.mark.usefixtures("_small_blocks")
def test_frequencies() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(64, 1)
    points = [(i + 0.5) / 64 for i in range(64)]
    tokens = draw(logits, [1.0] * 64, points)[0]
    counts = np.bincount(np.array(tokens, dtype=int), minlength=4) / 64
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.3, 0.4], atol=1 / 64)
