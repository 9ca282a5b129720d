"""Native attention: against float64, and bit by bit against itself however a row is computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from forkserve.errors import BackendError
from forkserve.kernels.native.attention import gather
from forkserve.kernels.native.library import available, supported
from forkserve.types import Span, Work
from tests.kernels.forest import (
    SCRATCH,
    Floats,
    Job,
    Layout,
    Node,
    Shape,
    error,
    expected,
    fan,
    from_bf16,
    grow,
    normal,
    run,
    same,
    to_bf16,
)

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
EACH_ISA = pytest.mark.parametrize("isa", supported())


def check(jobs: list[Job], got: list[Floats], **options: float) -> None:
    for job, rows in zip(jobs, got, strict=True):
        assert np.isfinite(rows).all()
        assert error(rows, expected(job, **options)) < 1e-5  # type: ignore[arg-type]


# --- against float64 --------------------------------------------------------------------------


def each_shape(test: Callable[..., None]) -> Callable[..., None]:
    """Every group of heads, page size and head dimension, over two forests."""
    for name, values in (
        ("group", [1, 3, 4, 8]),
        ("page", [16, 32]),
        ("dim", [64, 128]),
        ("seed", range(2)),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@each_shape
def test_random_forest(group: int, page: int, dim: int, seed: int) -> None:
    jobs = grow(seed + 10 * group, Shape(group, dim))
    check(jobs, run(jobs, Layout(page, seed)))


@EACH_ISA
@pytest.mark.parametrize("shape", [(7, 32), (2, 48), (1, 80), (5, 96), (64, 112), (3, 256)])
@pytest.mark.parametrize("page", [16, 48, 64])
def test_any_shape(isa: str, shape: tuple[int, int], page: int) -> None:
    jobs = grow(sum(shape), Shape(*shape), works=4)
    check(jobs, run(jobs, Layout(page, 1), isa=isa))


@pytest.mark.parametrize("window", [1, 16, 100, 700])
@pytest.mark.parametrize("threads", [1, 2])
def test_sliding_window(window: int, threads: int) -> None:
    """Rows see themselves and window - 1 rows before; runs that nobody sees are not read."""
    for seed in range(3):
        jobs = grow(seed, Shape(), scale=3)
        check(jobs, run(jobs, Layout(16, seed), window=window, threads=threads), window=window)


def test_rows_outside_the_window_are_not_read() -> None:
    (job,) = fan(1, 2000, Shape())
    layout = Layout(16)
    plan = layout.plan
    works = layout.place([job])
    built = plan(window=100)
    built.build(gather(works, 16))
    assert built.counts["rows_read"] == 100


@pytest.mark.parametrize("window", [0, 90])
def test_soft_cap(window: int) -> None:
    jobs = grow(5, Shape())
    for job in jobs:
        job.q *= 8
    got = run(jobs, softcap=3.0, window=window)
    check(jobs, got, softcap=3.0, window=window)
    assert not same(got, run(jobs, window=window))


def test_large_scores() -> None:
    """Scores of thousands: the softmax is over one key, and nothing overflows."""
    jobs = grow(6, Shape())
    for job in jobs:
        job.q *= 500
    for job, rows in zip(jobs, run(jobs), strict=True):
        assert error(rows, expected(job)) < 1e-3


@each_shape
def test_bfloat16_rows(group: int, page: int, dim: int, seed: int) -> None:
    """Equal to float32 attention over rows that were rounded first, bit by bit."""
    jobs = grow(seed + 10 * group, Shape(group, dim))

    def rounded(x: Floats) -> Floats:
        return from_bf16(to_bf16(x))

    nodes: dict[Node, Node] = {}
    coarse = []
    for job in jobs:
        path = []
        for node, rows in job.path:
            known = nodes.setdefault(node, Node(node.start, rounded(node.k), rounded(node.v)))
            path.append((known, rows))
        coarse.append(replace(job, path=path, k=rounded(job.k), v=rounded(job.v)))
    got = run(jobs, Layout(page, seed, bf16=True))
    assert same(got, run(coarse, Layout(page, seed)))
    for job, rows in zip(jobs, got, strict=True):
        assert error(rows, expected(job)) < 1e-2


# --- bit by bit -------------------------------------------------------------------------------


def forests() -> list[list[Job]]:
    """Small ones, ones over several splits, and a wide fan."""
    made = [grow(seed, Shape(group), scale=scale) for seed, group, scale in FORESTS]
    return [*made, fan(20, 1100, Shape(), tail=37), fan(5, 600, Shape(4, 128), n=21)]


FORESTS = [(1, 3, 1), (2, 1, 1), (3, 4, 4), (4, 8, 2), (5, 3, 4), (6, 3, 3)]
EACH_FOREST = pytest.mark.parametrize("number", range(len(FORESTS) + 2))


@EACH_FOREST
def test_rows_do_not_depend_on_their_mates(number: int) -> None:
    jobs = forests()[number]
    together = run(jobs)
    for job, rows in zip(jobs, together, strict=True):
        assert same(run([job]), [rows])
    order = list(range(len(jobs)))
    random.Random(number).shuffle(order)
    assert same(run([jobs[i] for i in order]), [together[i] for i in order])


@EACH_FOREST
@pytest.mark.parametrize("size", [1, 6])
def test_rows_do_not_depend_on_chunks(number: int, size: int) -> None:
    jobs = forests()[number]
    whole = run(jobs)
    cut = [job.chunks(size) for job in jobs]
    rows = iter(run([chunk for chunks in cut for chunk in chunks]))
    parts = [np.concatenate([next(rows) for _ in chunks]) for chunks in cut]
    assert same(parts, whole)


@EACH_FOREST
@pytest.mark.parametrize("page", [16, 32, 64])
def test_rows_do_not_depend_on_pages(number: int, page: int) -> None:
    """Other page ids and sizes, segments that begin in mid-page or on a boundary, tails that are
    runs of their own (frozen) or repeated in the next one (packed)."""
    jobs = forests()[number]
    whole = run(jobs, Layout(16, 1, aligned=True))
    assert same(run(jobs, Layout(page, 2)), whole)
    assert same(run(jobs, Layout(page, 3)), whole)
    assert same(run([job.flat() for job in jobs], Layout(page, 4)), whole)


@EACH_FOREST
def test_rows_do_not_depend_on_threads_or_instruction_set(number: int) -> None:
    jobs = forests()[number]
    for options in ({}, {"window": 90}, {"softcap": 4.0}):
        results = [
            run(jobs, isa=isa, threads=threads, **options)  # type: ignore[arg-type]
            for isa, threads in itertools.product(supported(), (1, 2, 3))
        ]
        assert all(same(other, results[0]) for other in results[1:])


@EACH_FOREST
def test_bfloat16_rows_do_not_depend_on_anything(number: int) -> None:
    jobs = forests()[number]
    whole = run(jobs, Layout(bf16=True))
    assert same([run([job], Layout(32, 5, bf16=True))[0] for job in jobs], whole)
    for isa in supported():
        assert same(run(jobs, Layout(16, 6, bf16=True), isa=isa, threads=1), whole)


@each_shape
def test_paired_over_the_whole_grid(group: int, page: int, dim: int, seed: int) -> None:
    jobs = grow(seed + 10 * group, Shape(group, dim))
    for job, rows in zip(jobs, run(jobs, paired(page, seed)), strict=True):
        assert error(rows, expected(job)) < 1e-2


def paired(page: int = 16, seed: int = 0) -> Layout:
    return Layout(page, seed, bf16=True, paired=True)


@pytest.mark.parametrize("shape", [(3, 64), (1, 16), (7, 32), (2, 48), (5, 112), (3, 256)])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_paired_against_float64(shape: tuple[int, int], softcap: float) -> None:
    """Operands of eight bits, and no more is lost."""
    jobs = [*grow(sum(shape), Shape(*shape)), *fan(3, 70, Shape(*shape), n=9)]
    for isa in supported():
        got = run(jobs, paired(), isa=isa, softcap=softcap)
        for job, rows in zip(jobs, got, strict=True):
            assert np.isfinite(rows).all()
            assert error(rows, expected(job, softcap=softcap)) < 1e-2


@EACH_FOREST
@pytest.mark.parametrize("isa", supported())
def test_paired_rows_do_not_depend_on_anything(number: int, isa: str) -> None:
    """On tiles or on vectors: mates, chunks, pages, threads and the instruction set."""
    jobs = forests()[number]
    options = ({}, {"window": 90}, {"softcap": 4.0})[number % 3]
    whole = run(jobs, paired(), threads=1, **options)  # type: ignore[arg-type]
    more = {"isa": isa, **options}
    assert same(run(jobs, paired(32, 3), threads=3, **more), whole)  # type: ignore[arg-type]
    alone = [run([job], paired(64, 4), **more)[0] for job in jobs]  # type: ignore[arg-type]
    assert same(alone, whole)
    cut = [job.chunks(5) for job in jobs]
    together = [chunk for chunks in cut for chunk in chunks]
    rows = iter(run(together, paired(16, 5), **more))  # type: ignore[arg-type]
    assert same([np.concatenate([next(rows) for _ in chunks]) for chunks in cut], whole)


def test_paired_prefill_has_the_bits_of_its_rows_alone() -> None:
    """A prompt whose tiles see whole blocks of positions and parts of them, over a trunk that ends
    within a block."""
    rng = np.random.default_rng(0)
    trunk = Node(0, *normal(rng, 2, 555, 2, 64))
    job = Job([(trunk, 555)], normal(rng, 600, 6, 64), *normal(rng, 2, 600, 2, 64))
    (whole,) = run([job], paired())
    for isa, size in zip(supported(), (37, 200, 90), strict=False):
        parts = run(job.chunks(size), paired(32, size), isa=isa)
        assert same([np.concatenate(parts)], [whole])
    rows = run(job.chunks(1)[::83], paired(16, 9))
    assert same(rows, [whole[i : i + 1] for i in range(0, 600, 83)])


@EACH_ISA
@pytest.mark.parametrize("shape", [(3, 64), (7, 48), (50, 16), (9, 256)])
@pytest.mark.parametrize("form", ["bfloat16", "paired"])
def test_any_number_of_branches(isa: str, shape: tuple[int, int], form: str) -> None:
    """Few vectors and many: several groups that share widened rows, up to three tiles of equally
    many, and more heads than three tiles hold."""
    jobs = fan(17, 550, Shape(*shape), tail=3)

    def rows(k: int, seed: int) -> list[Floats]:
        layout = Layout(32, seed, bf16=True, paired=form == "paired")
        return run(jobs[:k], layout, isa=isa, threads=1 + k % 2)

    alone = [run([job], Layout(bf16=True, paired=form == "paired"))[0] for job in jobs]
    for k in (2, 3, 5, 6, 8, 11, 16, 17):
        assert same(rows(k, k), alone[:k])


def test_windowed_rows_do_not_depend_on_mates_or_chunks() -> None:
    for number, window in itertools.product((0, 4, 7), (5, 64, 600)):
        jobs = forests()[number]
        whole = run(jobs, window=window)
        assert same([run([job], window=window, threads=1)[0] for job in jobs], whole)
        cut = [job.chunks(5) for job in jobs]
        rows = iter(run([c for chunks in cut for c in chunks], Layout(32, 7), window=window))
        assert same([np.concatenate([next(rows) for _ in chunks]) for chunks in cut], whole)


def test_zeros_have_one_sign() -> None:
    """Products that vanish leave -0 where the last one was negative, and 0 times a masked key's
    value would make that 0."""
    (job,) = fan(1, 40, Shape(), n=9)
    job.q = np.abs(job.q)
    for node, _ in job.path:
        node.k[:], node.v[:] = 0, 0
    job.path[0][0].k[0] = 1  # most of the weight is on a value of 0
    job.k[:] = 0
    job.v[:] = -1e-45
    job.v[1::2] = 1e-45
    assert same([np.concatenate(run(job.chunks(1)))], run([job]))


# --- what is shared ---------------------------------------------------------------------------


def counts(jobs: list[Job], threads: int = 2, **options: int) -> dict[str, int]:
    layout = Layout(16)
    works = layout.place(jobs)
    plan = layout.plan(threads, **options)
    plan.build(gather(works, 16))
    return plan.counts


def test_trunk_is_read_once() -> None:
    found = counts(fan(8, 2048, Shape()))
    assert found["rows_read"] == 2048 + 8 * 5
    # Four splits for all; the private tails, which have nothing in common, for each.
    assert found["units"] == 4 + 8
    assert counts(fan(8, 2048, Shape()), threads=1)["units"] == 1


def test_many_branches_take_several_tiles() -> None:
    """Sixteen rows of three heads fill a tile: 40 branches read the trunk three times."""
    found = counts(fan(40, 1024, Shape()))
    assert found["rows_read"] == 3 * 1024 + 40 * 5


def test_short_trunk_is_folded_into_its_children() -> None:
    """20 shared rows: a unit for each work spreads better than one that reads them once."""
    found = counts(fan(8, 20, Shape()))
    assert (found["units"], found["rows_read"]) == (8, 8 * 25)
    found = counts(fan(8, 64, Shape()))
    assert found["rows_read"] == 64 + 8 * 5


def test_subtrees_share_what_they_have_in_common() -> None:
    """Two branches of 300 rows with four children each, in any order of the works."""
    rng = np.random.default_rng(0)

    def node(start: int, length: int) -> Node:
        return Node(start, *(normal(rng, length, 2, 64) for _ in "kv"))

    root, twigs = node(0, 700), [node(700, 300), node(700, 300)]
    jobs = [
        Job([(root, 700), (twigs[i % 2], 300)], normal(rng, 1, 6, 64), *normal(rng, 2, 1, 2, 64))
        for i in range(8)
    ]
    assert counts(jobs)["rows_read"] == 700 + 2 * 300 + 8
    check(jobs, run(jobs))


def test_rows_shared_under_different_keys_are_read_once() -> None:
    """Two sessions whose prompt is in the prefix index: equal pages, keys of their own."""
    layout = Layout(16)
    works = layout.place(fan(2, 640, Shape(), tail=3))
    shared = works[0].context[0]
    split = [
        Span("a", shared.pages, 0, 100, shared.offset),
        Span(
            "b", shared.pages[(100 + shared.offset) // 16 :], 100, 540, (100 + shared.offset) % 16
        ),
    ]
    works[1].context = (*split, *works[1].context[1:])
    plan = layout.plan()
    plan.build(gather(works, 16))
    assert plan.counts["rows_read"] == 640 + 2 * 4


def test_spans_of_one_key_may_differ_in_length() -> None:
    """600 rows for three works, 300 more for two, 100 more for one."""
    rng = np.random.default_rng(0)
    trunk = Node(0, *normal(rng, 2, 1000, 2, 64))
    jobs = [
        Job([(trunk, n)], normal(rng, 1, 6, 64), *normal(rng, 2, 1, 2, 64))
        for n in (600, 1000, 900)
    ]
    assert counts(jobs)["rows_read"] == 600 + 300 + 100 + 3
    check(jobs, run(jobs))


def test_prefill_is_cut_in_tiles_not_in_splits() -> None:
    rng = np.random.default_rng(0)
    job = Job([], normal(rng, 1100, 6, 64), *normal(rng, 2, 1100, 2, 64))
    found = counts([job])
    assert found["cut_rows"] == 0
    assert found["units"] == 69
    check([job], run([job]))


# --- what is refused --------------------------------------------------------------------------


def refused(work: Work, match: str, window: int = 0) -> None:
    layout = Layout(16)
    layout.place(fan(1, 40, Shape()))
    plan = layout.plan()
    with pytest.raises(BackendError, match=match):
        plan.build(gather([work], 16, window))


def test_rows_within_the_window_must_be_there() -> None:
    """What lies before every window may be absent, one row more may not."""
    late = Work("s", 0, [0], 40, (Span(0, [1, 2], 16, 24),), None)
    refused(late, "context of work 0 does not tile")
    refused(late, "context of work 0 does not tile", window=26)
    layout = Layout(16)
    layout.place(fan(1, 40, Shape()))
    layout.plan().build(gather([late], 16, window=25))


def test_nonsense_is_refused() -> None:
    good = Span(0, [0, 1, 2], 0, 40)
    refused(Work("s", 0, [0], 41, (good,), None), "context of work 0 does not tile")
    refused(Work("s", 0, [0], 80, (good, good), None), "context of work 0 does not tile")
    refused(Work("s", 0, [0], 40, (replace(good, pages=[0, 1]),), None), "lacks pages")
    refused(Work("s", 0, [0], 40, (replace(good, pages=[0, 1, 9999]),), None), "outside the pool")
    refused(Work("s", 0, [0], 40, (replace(good, pages=[0, 1, -1]),), None), "outside the pool")
    refused(Work("s", 0, [0], 40, (good,), Span(1, [3], 41, 1)), "write span of work 0")
    refused(Work("s", 0, [0] * 20, 40, (good,), Span(1, [3], 40, 20)), "write span of work 0")
    refused(Work("s", 0, [], 40, (good,), None), "no tokens")
    refused(Work("s", 0, [0] * (SCRATCH * 16 + 1), 40, (good,), None), "scratch rows")


def test_shapes_without_a_kernel_are_refused() -> None:
    for page, dim in ((8, 64), (24, 64), (16, 72), (16, 272)):
        layout = Layout(16)
        works = layout.place(fan(1, 5, Shape()))
        layout.page, layout.dim = page, dim
        with pytest.raises(BackendError, match="no native kernel"):
            layout.plan().build(gather(works, 16))
