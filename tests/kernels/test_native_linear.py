"""Packed products: right to float64's standard, and the same bits whatever runs beside a row."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from forkserve.errors import ConfigError
from forkserve.kernels.native import library
from forkserve.kernels.native.linear import KINDS, PackedLinear, pack, pointer

pytestmark = pytest.mark.skipif(
    bool(library.available()), reason=library.available() or "native kernels"
)
SIZES = [(96, 64), (50, 40), (7, 5), (320, 577), (144, 16)]  # outputs, inputs


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def product(linear: PackedLinear, x: np.ndarray, isa: str | None = None, threads: int = 1):
    y = np.full((x.shape[0], linear.packed.n), np.nan, np.float32)
    x = np.ascontiguousarray(x)
    library.load(isa).fs_linear(
        ctypes.byref(linear.packed), pointer(x), ctypes.c_int64(x.shape[0]), pointer(y), threads
    )
    return y


def stored(w: np.ndarray, kind: str) -> np.ndarray:
    """What the weights stand for after packing, by numpy."""
    if kind == "float32":
        return w
    if kind == "bfloat16":
        bits = w.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return bits.astype(np.uint32).view(np.float32)
    n, k = w.shape
    blocks = np.pad(w, ((0, 0), (0, -k % 32))).reshape(n, -1, 32)
    scale = stored(np.abs(blocks).max(2) / np.float32(127), "bfloat16")[..., None]
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    whole = np.rint(blocks * inverse).clip(-127, 127)
    return (whole * scale).reshape(n, -1)[:, :k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64(kind: str, size: tuple[int, int], with_bias: bool) -> None:
    n, k = size
    w, x = random(n, k), random(33, k, seed=1)
    bias = random(n, seed=2) if with_bias else None
    linear = pack(library.load(), w, bias, kind, 2)
    want = x.astype(np.float64) @ stored(w, kind).astype(np.float64).T
    if bias is not None:
        want += bias
    for isa in library.supported():
        got = product(linear, x, isa)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_company(kind: str) -> None:
    """Rows alone, in blocks of any size, in another order; every instruction set and team."""
    n, k = 320, 577
    w, x = random(n, k), random(512, k, seed=1)
    x[5] *= 1e4  # one loud row must not change its mates
    linear = pack(library.load(), w, random(n, seed=2), kind, 2)
    whole = product(linear, x)
    order = np.random.default_rng(3).permutation(512)
    for isa in library.supported():
        for rows in (1, 2, 3, 7, 8, 9, 33, 512):
            assert np.array_equal(product(linear, x[:rows], isa), whole[:rows]), (isa, rows)
        assert np.array_equal(product(linear, x[order], isa), whole[order])
    for threads in (2, 3):
        assert np.array_equal(product(linear, x, threads=threads), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_does_not_depend_on_instruction_set_or_team(kind: str) -> None:
    w = random(100, 37)
    packed = [
        pack(library.load(isa), w, None, kind, threads).arrays
        for isa in library.supported()
        for threads in (1, 3)
    ]
    for arrays in packed[1:]:
        for a, b in zip(arrays, packed[0], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)


def test_int8_blocks_of_zeros_and_of_extremes() -> None:
    w, x = np.zeros((48, 70), np.float32), np.ones((1, 70), np.float32)
    w[3, 33:] = -1e-3  # a block of zeros, then blocks of which each has its own scale
    w[4, :32] = 127.0
    w[4, 32:] = 1.0
    w[5, 69] = np.float32(1e-42)  # too small for a scale
    y = product(pack(library.load(), w, None, "int8", 1), x)[0]
    assert y[3] == pytest.approx(-37e-3, rel=5e-3)
    assert y[4] == pytest.approx(127 * 32 + 38, rel=5e-3)
    assert np.isfinite(y).all()
    assert (np.delete(y, [3, 4, 5]) == 0).all()


def test_instruction_set_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in library.supported():
        monkeypatch.setenv("FORKSERVE_ISA", isa)
        assert library.load().isa == isa
    monkeypatch.setenv("FORKSERVE_ISA", "sse2")
    with pytest.raises(ConfigError, match="'sse2' is unknown"):
        library.load()
    assert "unknown" in (library.available() or "")
    monkeypatch.setenv("FORKSERVE_ISA", "neon")
    if "neon" not in library.supported():
        with pytest.raises(ConfigError, match="usable here"):
            library.load()
