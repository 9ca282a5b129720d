"""8-bit weights on torch: those of the native kernels, and rows of KV that are nobody else's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkserve.engine import LocalBackend
from forkserve.engine.local.linear import Linear
from tests.engine.conftest import Checkpoints, tiny_config
from tests.kernels.test_native_linear import SIZES, stored


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_the_native_kernels(size: tuple[int, int]) -> None:
    weight = np.random.default_rng(1).normal(0, 1, size).astype(np.float32)
    weight[0] = 0  # a scale that has no inverse
    linear = Linear.coded(torch.from_numpy(weight))
    got = linear(torch.eye(size[1])).T.numpy()
    assert (got == stored(weight, "int8")).all()


def test_products() -> None:
    """More outputs than are widened at a time, inputs that are no whole blocks, a bias."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(9000, 50, generator=made)
    bias, x = torch.randn(9000, generator=made), torch.randn(5, 50, generator=made)
    linear = Linear.coded(weight, bias)
    assert (linear.weight.dtype, linear.scales.dtype) == (torch.int8, torch.bfloat16)
    want = x.double() @ torch.from_numpy(stored(weight.numpy(), "int8")).double().T + bias
    got = linear(x)
    assert got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < 1e-6


def test_rows_of_int8_are_not_those_of_bfloat16(checkpoint: Checkpoints) -> None:
    """Both keep KV in bfloat16, and a store must not give one the other's."""
    seen = set()
    for variant in ("bfloat16", "int8"):
        backend = LocalBackend(
            tiny_config(), checkpoint("llama")[1], dtype=variant, kernels="torch"
        )
        seen.add(backend.identity(lambda files: "weights")["variant"]["kernels"])
        backend.close()
    assert len(seen) == 2
