"""Segment attention against a float64 reference, over random forests."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from forkserve.kernels.merge import merge
from forkserve.kernels.plan import plan_attention, span_rows
from forkserve.kernels.segment_attention import segment_attention
from forkserve.kernels.write_kv import write_kv
from forkserve.types import Span, Work
from tests.forests import KV_HEADS, Forest, error, expected, grow


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seed", range(6))
def test_random_forest(group: int, page: int, dim: int, seed: int) -> None:
    forest = grow(seed + 100 * group, group, page, dim)
    want = expected(forest)
    got = forest.run()
    assert torch.isfinite(got).all()
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 150, 400, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_sliding_window(window: int, seed: int) -> None:
    """As if each row saw the last `window` positions alone; rows before them are not read."""
    forest = grow(seed + 1000 * window, 4, 16, 64, works=9)
    forest.window = window
    want = expected(forest)
    forest.forget()
    got = forest.run()
    assert torch.isfinite(got).all()
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("seed", range(4))
def test_scale_and_soft_cap(window: int, seed: int) -> None:
    forest = grow(seed + 50, 4, 16, 64)
    forest.window, forest.scale, forest.softcap = window, 0.5, 3.0
    want = expected(forest)
    got = forest.run()
    assert error(got, want) < 1e-5
    forest.softcap = 0.0
    assert error(got, expected(forest)) > 0.01  # the cap bites


def test_long_prompt_under_a_window() -> None:
    """3,000 rows in tiles: a window's worth of keys a tile, whatever the chunks."""
    dim, window, n = 64, 700, 3000
    pages = list(range(200))
    kv = torch.full((2 * KV_HEADS, 200 * 16, dim), float("nan"))
    work = Work("s", 0, [0] * n, 0, (), Span(0, pages, 0, n))
    forest = Forest(
        kv, torch.randn(n, 4, dim), torch.randn(n, 2 * KV_HEADS, dim), [work], 16, 0, window
    )
    plan = forest.plan()
    keys = sum(task.n_keys for task in plan.of(window))
    assert keys < n / 512 * (window + 2 * 512)
    want = expected(forest)
    got = forest.run()
    assert error(got, want) < 1e-5
    for low, high in pairwise([0, 5, 1300, 1301, n]):  # the same in chunks
        chunk = Work("s", 0, [0] * (high - low), low, (), None)
        chunk.write = Span(0, pages[low // 16 :], low, high - low, low % 16)
        chunk.context = (Span(0, pages, 0, low),) if low else ()
        part = forest.attend(forest.q[low:high], forest.plan([chunk]))
        assert error(part, want[low:high]) < 1e-5


def test_a_window_that_hides_nothing_is_planned_as_none() -> None:
    works = fan(8, 2048)
    plan = plan_attention(works, 16, 10_000, (0, 3000, 4096))
    assert plan.of(3000) is plan.of(4096) is plan.of(0)
    short = plan_attention(works, 16, 10_000, (512,))
    assert not short.tasks  # no layer sees everything
    assert sum(task.n_keys for task in short.of(512)) == 507 + 8 * 5  # 512 less four and itself


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seed", range(6))
def test_bfloat16(group: int, page: int, dim: int, seed: int) -> None:
    forest = grow(seed + 100 * group, group, page, dim)
    forest.kv, forest.q = forest.kv.bfloat16(), forest.q.bfloat16()
    forest.fresh = forest.fresh.bfloat16()
    want = expected(forest)
    assert error(forest.run(), want) < 1e-2


def test_rows_do_not_depend_on_their_mates() -> None:
    forest = grow(11, 4, 16, 64, works=9)
    together = forest.run()
    first = 0
    for work in forest.works:
        rows = slice(first, first + len(work.tokens))
        plan = forest.plan([work])
        write_kv(forest.kv, plan.slots, forest.fresh[rows])
        alone = segment_attention(forest.q[rows], forest.kv, plan)
        torch.testing.assert_close(alone, together[rows], atol=1e-5, rtol=0)
        first = rows.stop


def fan(k: int, trunk: int, tail: int = 4) -> list[Work]:
    """k decodes over one trunk."""
    pages = list(range(-(-trunk // 16)))
    shared = Span("trunk", pages, 0, trunk)
    works = []
    for i in range(k):
        own = [len(pages) + i]
        context = (shared, Span(i, own, trunk, tail))
        works.append(Work("s", i, [0], trunk + tail, context, Span(i, own, trunk + tail, 1, tail)))
    return works


def test_trunk_is_read_once() -> None:
    plan = plan_attention(fan(8, 2048), 16, 10_000)
    assert plan.keys_read == 2048 + 8 * 5
    assert len(plan.tasks) == 2


def test_turns_of_one_conversation_are_one_task() -> None:
    """Twenty committed turns under eight children: one gather, not twenty tasks and merges."""
    turns = tuple(Span(("turn", i), [3 * i + j for j in range(3)], 40 * i, 40) for i in range(20))
    works = [Work("s", i, [0], 800, turns, Span(i, [100 + i], 800, 1)) for i in range(8)]
    plan = plan_attention(works, 16, 10_000)
    assert len(plan.tasks) == 2
    assert plan.keys_read == 800 + 8


def test_short_trunk_is_folded_into_its_children() -> None:
    plan = plan_attention(fan(8, 20), 16, 10_000)
    assert len(plan.tasks) == 1
    assert plan.keys_read == 8 * 25


def test_one_stream_in_one_run_is_one_view() -> None:
    pages = list(range(10))
    work = Work("s", 0, [0], 100, (Span(0, pages, 0, 100),), Span(0, pages[6:], 100, 1, 4))
    (task,) = plan_attention([work], 16, 10_000).tasks
    assert task.keys == slice(0, 101)
    assert task.mask is None


def test_spans_of_one_key_may_differ_in_length() -> None:
    """Stretches are shared by those that reach them: 600 by three, then 300 by two, 100 by one."""
    pages = list(range(70))
    works = [
        Work("s", i, [0], n, (Span("t", pages, 0, n),), Span(i, [100 + i], n, 1))
        for i, n in enumerate((600, 1000, 900))
    ]
    plan = plan_attention(works, 16, 10_000)
    shared = [(task.n_rows, task.n_keys) for task in plan.tasks if not task.own]
    assert shared == [(3, 600), (2, 300)]
    assert plan.keys_read <= 600 + 300 + 101 * 3


@pytest.mark.parametrize("fragmented", [False, True])
def test_long_trunks_are_cut_at_absolute_positions(fragmented: bool) -> None:
    """5,000 rows under decodes and a chunk: three views, or one gather where pages are strewn."""
    trunk, page, dim = 5000, 16, 64
    pages = list(range(330))
    if fragmented:
        random.Random(0).shuffle(pages)
    rows = 330 * page
    kv = torch.full((2 * KV_HEADS, rows + 8, dim), float("nan"))
    shared = Span("t", pages[:313], 0, trunk)
    kv[:, torch.from_numpy(span_rows(shared, page))] = torch.randn(2 * KV_HEADS, trunk, dim)
    works = [
        Work("s", i, [0] * n, trunk, (shared,), Span(i, pages[313 + i :], trunk, n, 2))
        for i, n in enumerate((1, 1, 13, 1))
    ]
    q, fresh = torch.randn(16, 2 * KV_HEADS, dim), torch.randn(16, 2 * KV_HEADS, dim)
    forest = Forest(kv, q, fresh, works, page, rows)
    sizes = [task.n_keys for task in forest.plan().tasks if not task.own]
    assert sizes == ([5000] if fragmented else [2048, 2048, 904])
    want = expected(forest)
    assert error(forest.run(), want) < 1e-5


@pytest.mark.parametrize("n", [1, 5])
def test_one_long_stream(n: int) -> None:
    """5,000 rows before n fresh ones in the same run: cut at 2,048 and 4,096, nothing gathered."""
    pages, start, dim = list(range(330)), 5000, 64
    kv = torch.full((2 * KV_HEADS, 330 * 16 + 8, dim), float("nan"))
    kv[:, :start] = torch.randn(2 * KV_HEADS, start, dim)
    write = Span(0, pages[312:], start, n, 8)
    work = Work("s", 0, [0] * n, start, (Span(0, pages, 0, start),), write)
    forest = Forest(
        kv, torch.randn(n, 8, dim), torch.randn(n, 2 * KV_HEADS, dim), [work], 16, 330 * 16
    )
    tasks = forest.plan().tasks
    assert all(isinstance(task.keys, slice) for task in tasks)
    assert sorted(task.n_keys for task in tasks) == (
        [905, 2048, 2048] if n == 1 else [n, 904, 2048, 2048]
    )
    want = expected(forest)
    assert error(forest.run(), want) < 1e-5


@pytest.mark.parametrize("lse1", [0.3, -np.inf])
@pytest.mark.parametrize("lse2", [-2.0, -np.inf])
def test_merge_survives_empty_parts(lse1: float, lse2: float) -> None:
    parts = []
    for lse, value in ((lse1, 1.5), (lse2, -4.0)):
        empty = lse == -np.inf
        parts.append((torch.full((3, 2, 4), 0.0 if empty else value), torch.full((3, 2), lse)))
    weights = np.exp([lse1, lse2])
    total = weights.sum()
    want = 0.0 if total == 0 else float(weights @ np.array([1.5, -4.0]) / total)
    got, lse = merge(*parts[0], *parts[1])
    assert torch.allclose(got, torch.full_like(got, want))
    assert torch.allclose(lse, torch.full_like(lse, float(np.logaddexp(lse1, lse2))))


def test_merge_is_the_softmax_over_both_parts() -> None:
    scores, values = torch.randn(5, 9).double(), torch.randn(9, 4).double()
    a, b = scores[:, :6], scores[:, 6:]
    got, lse = merge(
        a.softmax(-1) @ values[:6], a.logsumexp(-1), b.softmax(-1) @ values[6:], b.logsumexp(-1)
    )
    torch.testing.assert_close(got, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
