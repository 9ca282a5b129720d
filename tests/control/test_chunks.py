"""The planner: fractional admission, and how long a chunk is."""

from __future__ import annotations

import pytest

from forkserve.control.costs import least_chunk
from forkserve.control.planner import Load, Planner, PoolView

from .plans import CONFIG, ROOMY, branch, plan, reasons

# -- fractions and chunks --------------------------------------------------------------------


def test_a_long_item_is_admitted_up_to_the_last_whole_chunk() -> None:
    answer = plan(branch(known=2000, t_idle_ms=110.0))  # a chunk of 512 takes 51.2 ms
    (admission,) = answer.admitted
    assert (admission.tokens, admission.chunk, admission.pages) == (1024, 512, 64)
    assert admission.gain_ms == pytest.approx(102.4)
    assert reasons(answer) == [(2, "idle_horizon", 976)]


def test_a_chunk_longer_than_the_pause_is_cut_to_pages_that_fit() -> None:
    answer = plan(branch(known=400, t_idle_ms=33.0))
    assert [(a.tokens, a.chunk) for a in answer.admitted] == [(320, 320)]


def test_pages_cut_an_item_too() -> None:
    answer = plan(branch(known=2000), pool=PoolView(100, 10_000, 0.0))
    assert [(a.tokens, a.pages) for a in answer.admitted] == [(1536, 96)]
    assert reasons(answer) == [(2, "pages", 464)]


@pytest.mark.parametrize(
    ("ms", "load", "chunk"),
    [
        (0.01, Load(), 512),  # c_spec
        (0.5, Load(), 192),  # 96 ms: half of the TTFT SLO is 100
        (0.5, Load(decoding=True), 32),  # 16 ms: gamma is 20
        (0.5, Load(decode_share=0.1), 32),
        (50.0, Load(), 16),  # a page at least
    ],
)
def test_chunks_are_sized_by_predicted_time(ms: float, load: Load, chunk: int) -> None:
    answer = plan(branch(known=4000, t_idle_ms=1e9), ms=ms, load=load)
    assert [a.chunk for a in answer.admitted] == [chunk]


@pytest.mark.parametrize(
    ("fixed_ms", "row_ms", "load", "pause_ms", "chunk"),
    [
        (60.0, 1.0, Load(), 1e9, 64),  # 60 rows cost as much as the pass itself; 124 ms
        (60.0, 0.5, Load(), 1e9, 128),
        (90.0, 1.0, Load(), 1e9, 96),  # not even a page keeps 100 ms
        (90.0, 1.0, Load(), 110.0, 16),  # the pause is too short for more
        (150.0, 1.0, Load(), 1e9, 48),  # what the SLO leaves: 198 ms
        (300.0, 1.0, Load(), 1e9, 16),
        (60.0, 1.0, Load(decoding=True), 1e9, None),  # a page takes 76 ms, gamma is 20
        (60.0, 1.0, Load(decode_share=0.001), 1e9, 64),
        (2.0, 1.0, Load(decode_share=0.001), 1e9, 16),  # a page keeps gamma
    ],
)
def test_a_chunk_is_worth_its_pass(
    fixed_ms: float, row_ms: float, load: Load, pause_ms: float, chunk: int | None
) -> None:
    """On a slow machine a pass costs much whatever it holds."""
    planner = Planner(CONFIG, lambda tokens, context: fixed_ms + row_ms * tokens)
    answer = planner.plan(
        [branch(known=4000, t_idle_ms=pause_ms)], ROOMY, speculating={}, load=load
    )
    assert [a.chunk for a in answer.admitted] == ([chunk] if chunk else [])


@pytest.mark.parametrize("most", [1, 2, 32])
def test_least_chunk_of_any_cost(most: int) -> None:
    for fixed, rate, wanted in ((0, 1, 1), (100, 0, most), (5, 5, 1), (50, 5, 10), (51, 5, 11)):
        got = least_chunk(lambda n, _, a=fixed, b=rate: a + b * n / 16, 16, most, 0, 1e9)
        assert got == min(wanted, most)
    assert least_chunk(lambda n, _: 1e3, 16, most, 0, 1.0) == 1


def test_c_spec_below_a_page_is_kept() -> None:
    answer = plan(branch(), config=CONFIG.replace(c_spec=10))
    assert [a.chunk for a in answer.admitted] == [10]


def test_deep_context_makes_smaller_chunks() -> None:
    planner = Planner(CONFIG, lambda tokens, context: tokens * (0.01 + context * 1e-5))
    shallow = planner.plan([branch(2, known=2000, context=0)], ROOMY, speculating={})
    deep = planner.plan([branch(3, known=2000, context=100_000)], ROOMY, speculating={})
    assert shallow.admitted[0].chunk == 512
    assert deep.admitted[0].chunk == 96
