"""Native kernels touch what they are given and nothing else: fences, no rows, odd addresses, and
numbers beyond 32 bits."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forkserve.errors import BackendError
from forkserve.kernels.native.attention import copy_rows, gather, read_rows, write_rows
from forkserve.kernels.native.library import available, load, supported
from forkserve.kernels.native.linear import KINDS, Packed, pack, pointer
from forkserve.types import Span, Work
from tests.kernels.forest import Layout, Shape, fan, normal, run, same

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
EACH_ISA = pytest.mark.parametrize("isa", supported())
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
Array = npt.NDArray[Any]


class Fences:
    """Copies of arrays that end (or begin) where memory does: one byte further is a fault."""

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._areas: list[mmap.mmap] = []

    def copy(self, array: Array) -> Array:
        size, page = array.nbytes, mmap.PAGESIZE
        room = -(-size // page) * page
        area = mmap.mmap(-1, room + 2 * page)
        self._areas.append(area)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for fence in (base, base + page + room):
            assert protect(fence, page, 0) == 0  # PROT_NONE
        first = page + (room - size if self._at_end else 0)
        out = np.frombuffer(area, array.dtype, array.size, first).reshape(array.shape)
        out[...] = array
        return out


@pytest.fixture(params=[True, False], ids=["end", "begin"])
def fences(request: pytest.FixtureRequest) -> Iterator[Fences]:
    return Fences(request.param)


# --- products ---------------------------------------------------------------------------------


@EACH_ISA
@EACH_KIND
@pytest.mark.parametrize("size", [(50, 75), (48, 64), (1, 1), (97, 33)])
def test_products_stay_within_their_operands(
    fences: Fences, isa: str, kind: str, size: tuple[int, int]
) -> None:
    n, k = size
    rng = np.random.default_rng(n)
    linear = pack(load(isa), normal(rng, n, k), normal(rng, n), kind, 1)
    data, bias = (None if a is None else fences.copy(a) for a in linear.arrays)
    fenced = Packed(pointer(data), pointer(bias), n, k, KINDS[kind])
    for rows in (1, 2, 3, 5, 9, 17, 33):
        x = normal(rng, rows, k)
        got, want = fences.copy(np.empty((rows, n), np.float32)), np.empty((rows, n), np.float32)
        for packed, x_at, y in ((fenced, fences.copy(x), got), (linear.packed, x, want)):
            count = ctypes.c_int64(rows)
            load(isa).fs_linear(ctypes.byref(packed), pointer(x_at), count, pointer(y), 1)
        assert np.array_equal(got, want)


@EACH_ISA
@EACH_KIND
def test_a_product_of_no_rows(isa: str, kind: str) -> None:
    linear = pack(load(isa), np.ones((50, 75), np.float32), None, kind, 1)
    none = np.empty((0, 75), np.float32)
    args = (ctypes.byref(linear.packed), pointer(none), ctypes.c_int64(0), pointer(none), 2)
    assert load(isa).fs_linear(*args) == 0


@EACH_ISA
@EACH_KIND
def test_a_vocabulary_larger_than_any_model_has(isa: str, kind: str) -> None:
    """The last output of 300,001 is that of its own weights."""
    n, k = 300_001, 40
    rng = np.random.default_rng(0)
    w, x = np.zeros((n, k), np.float32), normal(rng, 5, k)
    w[-49:] = normal(rng, 49, k)
    y, few = np.empty((5, n), np.float32), np.empty((5, 49), np.float32)
    for weight, out in ((w, y), (w[-49:], few)):
        linear = pack(load(isa), weight, None, kind, 2)
        count = ctypes.c_int64(5)
        load(isa).fs_linear(ctypes.byref(linear.packed), pointer(x), count, pointer(out), 2)
    assert np.array_equal(y[:, -49:], few)
    assert not y[:, :-49].any()


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_rows_travel_to_and_from_any_address(bf16: bool) -> None:
    """A restored run begins wherever its file or message does."""
    layout = Layout(16, bf16=bf16)
    layout.place(fan(2, 40, Shape(1, 48)))
    before = layout.memory.copy()
    runs = [(5, 20), (40, 1)]
    width = 2 * 2 * 48 * (2 if bf16 else 4)
    plain = bytearray(width * 21)
    read_rows(load(), layout.pool, runs, plain)
    for shift in (1, 3):
        odd = memoryview(bytearray(width * 21 + shift))[shift:]
        read_rows(load(), layout.pool, runs, odd)
        assert odd == plain
        for first, count in runs:
            zeros = bytes(width * count)
            write_rows(load(), layout.pool, [(first, count)], zeros, 0)
        write_rows(load(), layout.pool, runs, odd, 0)
        assert layout.memory.tobytes() == before.tobytes()


def test_no_rows_travel() -> None:
    layout = Layout(16)
    layout.place(fan(2, 40, Shape()))
    before = layout.memory.tobytes()
    copy_rows(load(), layout.pool, [])
    read_rows(load(), layout.pool, [], bytearray())
    write_rows(load(), layout.pool, [], b"", 0)
    assert layout.memory.tobytes() == before


# --- attention --------------------------------------------------------------------------------


@EACH_ISA
@pytest.mark.parametrize("form", ["float32", "bfloat16", "paired"])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_stays_within_the_pool(fences: Fences, isa: str, form: str, window: int) -> None:
    for page, dim, group in ((16, 16, 1), (48, 80, 3), (2048, 48, 9)):
        jobs = fan(3, 600, Shape(group, dim), tail=7, n=5)
        layout = Layout(page, 1, bf16=form != "float32", paired=form == "paired")
        works = layout.place(jobs)
        q, k, v = (np.concatenate([getattr(job, name) for job in jobs]) for name in "qkv")
        plan = layout.plan(2, isa=isa, window=window)
        plan.build(gather(works, page))
        want = plan.attend(layout.pool, q, (k, v), softcap=5.0)
        memory = fences.copy(layout.memory)
        layout.pool.base = memory.ctypes.data
        operands = (fences.copy(q), (fences.copy(k), fences.copy(v)))
        got = plan.attend(layout.pool, *operands, softcap=5.0)
        assert np.array_equal(got, want)
        assert memory.tobytes() == layout.memory.tobytes()


@EACH_ISA
def test_an_empty_batch(isa: str) -> None:
    layout = Layout(16)
    layout.place(fan(1, 40, Shape()))
    plan = layout.plan(2, isa=isa)
    plan.build(gather([], 16))
    assert plan.attend(layout.pool, np.empty((0, 6, 64), np.float32)).shape == (0, 6, 64)


@EACH_ISA
def test_one_page_larger_than_all_that_is_in_it(isa: str) -> None:
    jobs = fan(3, 600, Shape(), tail=1)
    assert same(run(jobs, Layout(2048, 1), isa=isa), run(jobs, Layout(16, 1), isa=isa))


def test_a_context_longer_than_its_numbers_is_refused() -> None:
    """Offset and length, whose sum is no integer of 32 bits, do not pass for a few rows."""
    layout = Layout(16)
    layout.place(fan(1, 40, Shape()))
    most = 2**31 - 1
    long = Span(0, [0, 1, 2], 0, most, offset=5)
    with pytest.raises(BackendError, match="context of work 0 does not tile"):
        layout.plan().build(gather([Work("s", most, [0], most, (long,), None)], 16))
    short = Work("s", 0, [0], 40, (Span(0, [0, 1, 2], 0, 40),), Span(1, [3], 40, 1))
    far = replace(short, write=Span(1, [3], 40, 1, offset=most))
    with pytest.raises(BackendError, match="write span of work 0"):
        layout.plan().build(gather([far], 16))
