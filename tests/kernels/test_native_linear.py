"""Packed products: right to float64's standard, and the same bits whatever runs beside a row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from forkserve.errors import BackendError, ConfigError
from forkserve.kernels.native import library
from forkserve.kernels.native.linear import KINDS, PackedLinear, pack, pointer

pytestmark = pytest.mark.skipif(
    bool(library.available()), reason=library.available() or "native kernels"
)
_TINY = np.finfo(np.float32).tiny  # a smaller scale has no inverse: its weights are zeros
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


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def stored(w: np.ndarray, kind: str) -> np.ndarray:
    """What the weights stand for after packing, by numpy."""
    if kind == "float32":
        return w
    if kind == "bfloat16":
        return bf16(w)
    whole, scale = eight_bits(w)
    return (whole * scale[..., None]).reshape(len(w), -1)[:, : w.shape[1]]


def eight_bits(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights as integers [n, blocks, 32] and scales [n, blocks]."""
    n, k = w.shape
    blocks = np.pad(w, ((0, 0), (0, -k % 32))).reshape(n, -1, 32)
    scale = bf16(np.abs(blocks).max(2) / np.float32(127))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale >= _TINY)
    return np.rint(blocks * inverse[..., None]).clip(-127, 127), scale


def sixteen_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of w8a16 likewise."""
    rows, k = x.shape
    blocks = np.pad(x, ((0, 0), (0, -k % 32))).reshape(rows, -1, 32)
    top, most = np.abs(blocks).max(2), np.float32(127 * 257)
    some = top > np.float32(1e-30)
    inverse = np.divide(most, top, out=np.zeros_like(top), where=some)
    return np.rint(blocks * inverse[..., None]), np.where(some, top / most, np.float32(0))


def taken(x: np.ndarray, kind: str) -> np.ndarray:
    """What products take x for."""
    if kind == "w8a16":
        whole, scale = sixteen_bits(x)
        return (whole * scale[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    return bf16(x) if kind == "bfloat16" else x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64(kind: str, size: tuple[int, int], with_bias: bool) -> None:
    n, k = size
    w, x = random(n, k), random(33, k, seed=1)
    bias = random(n, seed=2) if with_bias else None
    linear = pack(library.load(), w, bias, kind, 2)
    want = taken(x, kind).astype(np.float64) @ stored(w, kind).astype(np.float64).T
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
        for rows in (1, 2, 3, 4, 7, 8, 9, 16, 33, 512):
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


@pytest.mark.parametrize("kind", ["int8", "w8a16"])
def test_blocks_of_zeros_and_of_extremes(kind: str) -> None:
    w, x = np.zeros((48, 70), np.float32), np.ones((1, 70), np.float32)
    w[3, 33:] = -1e-3  # a block of zeros, then blocks of which each has its own scale
    w[4, :32] = 127.0
    w[4, 32:] = 1.0
    w[5, 69] = np.float32(1e-42)  # too small for a scale
    y = product(pack(library.load(), w, None, kind, 1), x)[0]
    assert y[3] == pytest.approx(-37e-3, rel=5e-3)
    assert y[4] == pytest.approx(127 * 32 + 38, rel=5e-3)
    assert np.isfinite(y).all()
    assert (np.delete(y, [3, 4, 5]) == 0).all()


@pytest.mark.parametrize("kind", ["int8", "w8a16"])
@pytest.mark.parametrize("peak", [1e-45, 3e-39, 4e-37])
def test_blocks_too_small_to_scale_are_zeros(kind: str, peak: float) -> None:
    w = np.zeros((48, 64), np.float32)
    w[:, ::2] = peak
    w[:, 32:] = 1
    x = random(3, 64)
    y = product(pack(library.load(), w, None, kind, 1), x)
    assert y == pytest.approx(np.repeat(x[:, 32:].sum(1)[:, None], 48, 1), rel=1e-2)


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


def test_tiles_that_are_not_granted_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A processor may have AMX where a sandbox refuses its state."""
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    for isa in ("amx", "avx512"):
        (tmp_path / f"libforkserve-{isa}.so").touch()
    monkeypatch.setattr(library, "_cpu_flags", lambda: frozenset(library._NEEDS["amx"]))
    monkeypatch.setattr(library, "_tiles_granted", lambda: True)
    assert library.supported() == ["amx", "avx512"]
    monkeypatch.setattr(library, "_tiles_granted", lambda: False)
    assert library.supported() == ["avx512"]
    with pytest.raises(ConfigError, match="'amx' that this processor can run; usable here: avx512"):
        library.load("amx")


def test_every_arm_processor_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An emulator shows the /proc/cpuinfo of its host, macOS has none."""
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    (tmp_path / "libforkserve-neon.so").touch()
    monkeypatch.setattr(library, "_cpu_flags", library._cpu_flags.__wrapped__)
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(library.platform, "machine", lambda name=machine: name)
        assert library.supported() == ["neon"]


def test_a_missing_or_stale_library_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert "were not built" in (library.available() or "")
    (tmp_path / "not_built.txt").write_text("there was no compiler\n")
    assert "installed (there was no compiler); reinstall" in (library.available() or "")
    isa = next(iter(library._NEEDS))
    monkeypatch.setattr(library, "_cpu_flags", frozenset)
    (tmp_path / f"libforkserve-{isa}.so").write_bytes(b"not a library")
    assert f"built for: {isa}" in (library.available() or "")
    monkeypatch.setattr(library, "_cpu_flags", lambda: library._NEEDS[isa])
    with pytest.raises(BackendError, match="cannot load"):
        library._open.__wrapped__(isa)
    monkeypatch.undo()
    monkeypatch.setattr(library, "ABI", 10**6)
    with pytest.raises(BackendError, match="build it again"):
        library._open.__wrapped__(library.supported()[0])


# --- bfloat16 has the order and the rules of a matrix unit --------------------------------------


def flushed(x: np.ndarray) -> np.ndarray:
    """x with denormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once: bfloat16 products are exact in float64, and where their sum with c is
    not, its last bit is made odd so that a second rounding is right (Boldo and Melquiond)."""
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    lost = (product - (total - part)) + (wide - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where((lost != 0) & even, toward, 0)).view(np.float64)
    return flushed(odd.astype(np.float32))


def by_hand(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x w^T as TDPBF16PS sums it: blocks of 32, even and odd places apart."""
    w, x = (flushed(np.pad(bf16(flushed(a)), ((0, 0), (0, -a.shape[1] % 32)))) for a in (w, x))
    total = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, w.shape[1], 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(32):
            at = first + i
            sums[i % 2] = fused(x[:, at, None], w[None, :, at], sums[i % 2])
        total = flushed(total + flushed(sums[0] + sums[1]))
    return total


def wild(rng: np.random.Generator, *shape: int, low: int, high: int) -> np.ndarray:
    """Values of any exponent between two, zeros of both signs, denormal numbers."""
    x = (rng.normal(0, 1, shape) * 2.0 ** rng.integers(low, high, shape)).astype(np.float32)
    for some in (0.0, -0.0, 1e-40, -1e-39, 2.0**-126, np.float32(1.1754942e-38)):
        x[rng.random(shape) < 0.04] = some
    return x


@pytest.mark.parametrize("exponents", [(-3, 3), (-75, -55), (-60, 40), (-126, -80)])
def test_bfloat16_sums_in_the_order_of_a_matrix_unit(exponents: tuple[int, int]) -> None:
    """Rows on tiles and rows on vectors, against numpy, with results that are denormal."""
    rng = np.random.default_rng(exponents[1] + 126)
    low, high = exponents
    w, x = wild(rng, 50, 75, low=low, high=high), wild(rng, 37, 75, low=low, high=high)
    want = by_hand(w, x).view(np.uint32)
    linear = pack(library.load(), w, None, "bfloat16", 1)
    for isa in library.supported():
        got = product(linear, x, isa)
        assert np.array_equal(got.view(np.uint32), want), isa
        alone = np.concatenate([product(linear, x[i : i + 1], isa) for i in range(len(x))])
        assert np.array_equal(alone.view(np.uint32), want), isa


def test_bfloat16_infinities_and_nans_stay_in_their_rows() -> None:
    w, x = random(50, 70), random(20, 70, seed=1)
    x[3, 5], x[4, 69], x[6] = np.inf, np.nan, 3e38
    linear = pack(library.load(), w, None, "bfloat16", 1)
    calm = [i for i in range(20) if i not in (3, 4, 6)]
    first = product(linear, x)
    assert np.isinf(first[3]).all()
    assert np.isnan(first[4]).all()
    assert np.isfinite(first[calm]).all()
    for isa in library.supported():
        got = product(linear, x, isa)
        assert np.array_equal(got, first, equal_nan=True)
        assert np.array_equal(product(linear, x[3:5], isa), first[3:5], equal_nan=True)


def test_bfloat16_leaves_the_rules_for_denormal_numbers_as_they_were() -> None:
    linear = pack(library.load(), random(50, 64), None, "bfloat16", 1)
    for isa in library.supported():
        product(linear, random(5, 64), isa)
        assert np.float32(2.0**-126) * np.float32(0.5) > 0


# --- w8a16: integers within a block, then one order ---------------------------------------------


def in_blocks(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x w^T as w8a16 sums it: exact within blocks of 32, which join the total one by one."""
    (weights, scales), (inputs, x_scales) = eight_bits(w), sixteen_bits(x)
    total = np.zeros((len(x), len(w)), np.float32)
    for b in range(scales.shape[1]):
        sums = inputs[:, b].astype(np.int64) @ weights[:, b].astype(np.int64).T
        total = fused(sums.astype(np.float32) * x_scales[:, b, None], scales[None, :, b], total)
    return total


def test_w8a16_sums_blocks_in_ascending_order() -> None:
    """Rows on vectors, on one tile and on several, against numpy bit for bit."""
    w, x = random(50, 75), random(37, 75, seed=1)
    x[3] *= 1e5
    x[4, :32], x[5, 32:64] = 0, 1e-31  # without a scale
    x[6, 7], w[9] = -3e4, -w[9]  # both ends of the range
    want = in_blocks(w, x)
    linear = pack(library.load(), w, None, "w8a16", 1)
    for isa in library.supported():
        for rows in (1, 3, 4, 8, 9, 16, 37):
            parts = [product(linear, x[i : i + rows], isa) for i in range(0, len(x), rows)]
            assert np.array_equal(np.concatenate(parts), want), (isa, rows)


def test_w8a16_inputs_keep_more_than_bfloat16_does() -> None:
    w, x = np.eye(64, dtype=np.float32), random(20, 64)
    y = product(pack(library.load(), w, None, "w8a16", 1), x)
    top = np.repeat(np.abs(x.reshape(20, 2, 32)).max(2), 32, axis=1)
    assert (np.abs(y / stored(w, "w8a16")[0, 0] - x) < top / 6e4).all()


def test_w8a16_infinities_and_nans_stay_in_their_rows() -> None:
    w, x = random(50, 70), random(20, 70, seed=1)
    x[3, 5], x[4, 69] = np.inf, np.nan
    linear = pack(library.load(), w, None, "w8a16", 1)
    for isa in library.supported():
        for rows in (20, 5):
            got = product(linear, x[:rows], isa)
            assert np.isnan(got[[3, 4]]).all()
            assert np.isfinite(np.delete(got, [3, 4], axis=0)).all()
