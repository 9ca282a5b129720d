"""Rows of a native pool: fresh ones, copies from page to page, runs for the store."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from forkserve.errors import BackendError
from forkserve.kernels.native import attention
from forkserve.kernels.native.attention import Pool, copy_rows, gather, write_rows
from forkserve.kernels.native.library import available, load
from forkserve.types import RowCopy
from tests.kernels.forest import Layout, Shape, grow, normal, to_bf16

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
LAYERS, HEADS, PAGES = 3, 2, 6
BOTH = pytest.mark.parametrize("bf16", [False, True])
EACH_PAGE = pytest.mark.parametrize("page", [16, 32, 48])


class Memory:
    """A pool and its rows in canonical order, [layers, 2*Hk, rows, dim]; all values differ."""

    def __init__(self, page: int, bf16: bool, dim: int = 32) -> None:
        word = np.uint16 if bf16 else np.uint32
        self.shape = (LAYERS, 2 * HEADS, PAGES * page, dim)
        rows = np.random.default_rng(0).permutation(np.prod(self.shape)).reshape(self.shape)
        self.rows = rows.astype(word)  # any bits, NaNs among them, must travel unchanged
        self.page = page
        self.flat = np.empty((LAYERS, 2 * HEADS, PAGES * page * dim), word)
        self.flat[:] = self.packed()
        at = self.flat.ctypes.data
        self.pool = Pool(at, LAYERS, HEADS, dim, page, PAGES * page, int(bf16))

    def packed(self) -> npt.NDArray[np.unsignedinteger]:
        layers, heads, rows, dim = self.shape
        paged = self.rows.reshape(layers, heads, rows // self.page, self.page, dim)
        out = self.rows.reshape(layers, heads, -1).copy()
        keys = paged[:, :HEADS].swapaxes(-1, -2)
        out[:, :HEADS] = keys.reshape(layers, HEADS, -1)
        return out

    def unchanged_else(self) -> bool:
        """Whether the pool holds what `rows` says, everywhere."""
        return bool((self.flat == self.packed()).all())


def read_rows(pool: Pool, runs: Sequence[tuple[int, int]]) -> bytearray:
    """The rows in a buffer that held something else."""
    width = pool.layers * 2 * pool.kv_heads * pool.dim * (2 if pool.bf16 else 4)
    out = bytearray(b"\xa5" * width * sum(count for _, count in runs))
    attention.read_rows(load(), pool, runs, out)
    return out


def test_a_buffer_of_another_length_is_refused() -> None:
    memory = Memory(16, False)
    row = LAYERS * 2 * HEADS * 32 * 4
    with pytest.raises(BackendError, match=f"take {2 * row} bytes, the buffer has {row}"):
        attention.read_rows(load(), memory.pool, [(3, 2)], bytearray(row))


@BOTH
@EACH_PAGE
def test_copies_move_the_named_rows_only(page: int, bf16: bool) -> None:
    memory = Memory(page, bf16)
    copies = [
        RowCopy(0, 0, 3, 0, page),
        RowCopy(3, 2, 5, 2, 7),  # reads what the first one wrote
        RowCopy(1, 3, 2, 9, 1),  # to another slot
    ]
    copy_rows(load(), memory.pool, copies)
    for c in copies:
        source, target = c.src_page * page + c.src_row, c.dst_page * page + c.dst_row
        memory.rows[:, :, target : target + c.rows] = memory.rows[:, :, source : source + c.rows]
    assert memory.unchanged_else()


@BOTH
@EACH_PAGE
def test_runs_are_read_in_canonical_order(page: int, bf16: bool) -> None:
    memory = Memory(page, bf16)
    runs = [(5, page), (3 * page, 2 * page), (2 * page + 1, 1)]
    got = read_rows(memory.pool, runs)
    want = np.concatenate([memory.rows[:, :, a : a + n] for a, n in runs], 2)
    assert got == want.tobytes()
    assert read_rows(memory.pool, []) == b""
    assert memory.unchanged_else()


@BOTH
@EACH_PAGE
def test_runs_are_written_back(page: int, bf16: bool) -> None:
    memory = Memory(page, bf16)
    held = memory.rows[:, :, : 2 * page].copy()
    runs = [(4 * page + 5, page), (0, 3)]
    write_rows(load(), memory.pool, runs, held.tobytes(), 4)
    at = 4
    for first, count in runs:
        memory.rows[:, :, first : first + count] = held[:, :, at : at + count]
        at += count
    assert memory.unchanged_else()


def test_a_run_too_short_is_refused() -> None:
    memory = Memory(16, False)
    rows = read_rows(memory.pool, [(0, 10)])
    with pytest.raises(BackendError, match="lacks row 10; it has 10 rows"):
        write_rows(load(), memory.pool, [(0, 7)], rows, 4)
    with pytest.raises(BackendError, match="lacks row"):
        write_rows(load(), memory.pool, [(0, 1)], rows[:-1], 0)
    assert memory.unchanged_else()


@BOTH
@EACH_PAGE
@pytest.mark.parametrize("threads", [1, 3])
def test_fresh_rows_go_to_their_slots_only(page: int, bf16: bool, threads: int) -> None:
    jobs = grow(4, Shape(1, 32))
    layout = Layout(page, 3, bf16=bf16)
    works = layout.place(jobs)
    k, v = (np.concatenate([getattr(job, name) for job in jobs]) for name in "kv")
    where = []
    scratch = layout.pages * page
    for work in works:
        if work.write is None:
            where.append(np.arange(scratch, scratch + len(work.tokens)))
            scratch += len(work.tokens)
        else:
            where.append(layout.rows(work.write))
    slots = np.concatenate(where)
    layout.k[:, slots], layout.v[:, slots] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    before = layout.memory.copy()
    layout.pack()
    want = layout.memory
    layout.memory = before
    layout.pool.base = before.ctypes.data
    plan = layout.plan(threads)
    plan.build(gather(works, page))
    plan.attend(layout.pool, np.concatenate([job.q for job in jobs]), (k, v))
    np.testing.assert_array_equal(before, want)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Ties, carries into the exponent, infinities, zeros of both signs, NaN."""
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 2 - 2**-9, 3.4e38, 1e-45, -0.0]
    values += [np.inf, -np.inf, np.nan, 65504.1, -1 - 2**-7 - 2**-8]
    x = np.array(values, np.float32)
    rng = np.random.default_rng(0)
    k = rng.choice(x, (40, 2, 32)).astype(np.float32)
    v = (rng.integers(0, 2**32, (40, 2, 32), dtype=np.uint32)).view(np.float32)
    jobs = grow(1, Shape(1, 32), works=1)
    job = jobs[0]
    job.path, job.q, job.k, job.v, job.written = [], normal(rng, 40, 2, 32), k, v, True
    layout = Layout(16, bf16=True, aligned=True)
    (work,) = layout.place([job])
    plan = layout.plan()
    plan.build(gather([work], 16))
    plan.attend(layout.pool, job.q, (k, v))
    assert work.write is not None
    rows = layout.rows(work.write)
    got = np.frombuffer(read_rows(layout.pool, [(int(row), 1) for row in rows]), np.uint16).reshape(
        2, 2, 40, 32
    )
    want = to_bf16(np.stack([k, v])).transpose(0, 2, 1, 3)
    is_nan = (want & 0x7FFF) > 0x7F80
    assert ((got & 0x7FFF) > 0x7F80)[is_nan].all()
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])


def test_rows_travel_beside_a_batch() -> None:
    """Runs of other pages read and written from a thread of their own while batches run."""
    import threading

    jobs = grow(8, Shape(1, 32))
    layout = Layout(16, 1)
    works = layout.place(jobs)
    used = {page for work in works for span in work.context for page in span.pages}
    used |= {page for work in works if work.write for page in work.write.pages}
    spare = sorted(set(range(layout.pages)) - used)
    plan = layout.plan()
    plan.build(gather(works, 16))
    q, k, v = (np.concatenate([getattr(job, name) for job in jobs]) for name in "qkv")
    want = plan.attend(layout.pool, q, (k, v)).tobytes()
    failed: list[int] = []
    stop = threading.Event()

    def travel() -> None:
        draw = random.Random(0)
        while not stop.is_set():
            row = 16 * draw.choice(spare) + draw.randrange(8)
            rows = np.random.default_rng(row).bytes(2 * 2 * 8 * 32 * 4)
            write_rows(load(), layout.pool, [(row, 8)], rows, 0)
            if read_rows(layout.pool, [(row, 8)]) != rows:
                failed.append(row)

    thread = threading.Thread(target=travel)
    thread.start()
    for _ in range(30):
        assert plan.attend(layout.pool, q, (k, v)).tobytes() == want
    stop.set()
    thread.join()
    assert failed == []
