"""The planner: formulas by hand, one test per refusal, the ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.candidates import Candidate
from forkserve.control.costs import page_price, pages_for, usefulness
from forkserve.control.planner import Load, Planner, PoolView
from forkserve.errors import ConfigError
from forkserve.types import WorkKind

from .plans import CONFIG, ROOMY, admitted, branch, linear, plan, reasons

# -- formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "eta_partial", "eta"),
    [
        (1.0, 0.5, 1.0),
        (0.5, 0.5, 0.5),
        (0.35, 0.5, 0.35),  # B12: never raised to eta_partial
        (0.0, 0.5, 0.0),
        (0.5, 0.8, 0.8),
        (1.0, 0.8, 1.0),
        (0.25, 0.8, 0.64),
        (0.1, 1.0, 1.0),
    ],
)
def test_usefulness(q: float, eta_partial: float, eta: float) -> None:
    assert usefulness(q, eta_partial) == pytest.approx(eta)


@pytest.mark.parametrize(
    ("context", "tokens", "pages"),
    [(0, 0, 0), (0, 1, 1), (0, 16, 1), (0, 17, 2), (15, 1, 1), (15, 2, 2), (2050, 48, 4)],
)
def test_pages_for(context: int, tokens: int, pages: int) -> None:
    assert pages_for(context, tokens, 16) == pages


@pytest.mark.parametrize(
    ("free", "price"), [(1000, 0.0), (500, 0.0), (250, 0.5), (100, 0.8), (0, 1.0)]
)
def test_page_price_rises_with_pressure(free: int, price: float) -> None:
    assert page_price(PoolView(1000, 1000, 8.0), free, 8.0) == pytest.approx(price)


@pytest.mark.parametrize(
    # G = p * min(T_pre, T_idle) * eta;  C = price * pages * hold_s.  300 of 1000 pages are free,
    # a page comes back in 0.8 ms and is kept for 8 s: price = (used - 0.5) / 0.5 * 0.1.
    ("candidate", "gain", "cost", "pages"),
    [
        (branch(), 6.4, 4 * 0.0408 * 1.0, 4),  # 704 pages used, for 1 s
        (branch(p=0.5), 3.2, 4 * 0.0408 * 1.0, 4),
        (branch(t_idle_ms=1e9), 6.4, 4 * 0.0408 * 8.0, 4),
        (branch(t_idle_ms=100.0), 6.4, 4 * 0.0408 * 0.1, 4),
        (branch(known=62, context=1034), 6.2, 5 * 0.041, 5),  # behind 10 rows of a page
        (branch(known=0, guess=32, q=0.5), 3.2 * 0.5, 2 * 0.0404, 2),
        (branch(known=0, guess=32, q=0.5, p=0.5), 3.2 * 0.25, 2 * 0.0404, 2),
    ],
)
def test_gain_and_cost_by_hand(candidate: Candidate, gain: float, cost: float, pages: int) -> None:
    (admission,) = plan(candidate, pool=PoolView(300, 1000, 0.8)).admitted
    assert admission.gain_ms == pytest.approx(gain)
    assert admission.cost_ms == pytest.approx(cost)
    assert admission.pages == pages


def test_doubling_lambda_changes_a_choice() -> None:
    # One page takes 24 ms, 4 more than gamma, and every other tick somebody decodes:
    # C = lambda * 0.5 * 4 ms against G = 0.5 * 24 ms.
    load = Load(decode_share=0.5)
    one = branch(known=16, p=0.5)
    first = plan(one, ms=1.5, load=load)
    assert [(a.gain_ms, a.cost_ms) for a in first.admitted] == [(12.0, 8.0)]
    second = plan(one, ms=1.5, load=load, config=CONFIG.replace(tbt_weight=8.0))
    assert reasons(second) == [(2, "not_worth", 16)]


def test_lambda_counts_each_chunk_and_a_tenants_misses() -> None:
    two = plan(branch(known=32), ms=1.5, load=Load(decode_share=0.5))
    assert [(a.chunk, a.cost_ms) for a in two.admitted] == [(16, 16.0)]
    load = Load(decode_share=0.5, tbt_factor={"t": 2.0})
    assert [a.cost_ms for a in plan(branch(known=32), ms=1.5, load=load).admitted] == [32.0]


def test_priority_of_a_declared_branch_counts() -> None:
    # B13: two equal branches, time for one.  The likelier one is taken.
    answer = plan(branch(2, p=0.2, t_idle_ms=10.0), branch(3, p=1.0, t_idle_ms=10.0))
    assert admitted(answer)[0] == (3, WorkKind.KNOWN, 64)
    assert answer.admitted[0].gain_ms == pytest.approx(6.4)


# -- refusals --------------------------------------------------------------------------------


def test_refused_empty() -> None:
    answer = plan(branch(known=0))
    assert reasons(answer) == [(2, "empty", 0)]


def test_refused_free_form() -> None:
    answer = plan(branch(guess=32, schema_stable=False))
    assert admitted(answer) == [(2, WorkKind.KNOWN, 64)]
    assert reasons(answer) == [(2, "free_form", 32)]


@pytest.mark.parametrize(("q", "taken"), [(0.34, False), (0.35, True)])
def test_refused_low_probability(q: float, taken: bool) -> None:
    answer = plan(branch(guess=32, q=q))
    assert ((2, WorkKind.RESIDUAL, 32) in admitted(answer)) is taken
    assert reasons(answer) == ([] if taken else [(2, "low_probability", 32)])
    if not taken:
        assert "q=0.34 is below q_min=0.35" in answer.refused[0].message


def test_refused_idle_horizon_with_numbers() -> None:
    answer = plan(branch(t_idle_ms=1.0))  # one page takes 1.6 ms
    assert admitted(answer) == []
    assert reasons(answer) == [(2, "idle_horizon", 64)]
    assert "16 of 64 tokens would end 1.6 ms from now, but the pause is 1 ms" in str(
        answer.refused[0].message
    )


def test_the_horizon_is_cumulative_and_counts_the_backlog() -> None:
    pair = branch(2, t_idle_ms=10.0), branch(3, t_idle_ms=10.0)
    answer = plan(*pair)  # 6.4 ms, then 3.6 are left: 2 pages of 1.6
    assert admitted(answer) == [(2, WorkKind.KNOWN, 64), (3, WorkKind.KNOWN, 32)]
    assert reasons(answer) == [(3, "idle_horizon", 32)]
    assert admitted(plan(*pair, load=Load(backlog_ms=10.0))) == []


def test_refused_pages_with_numbers() -> None:
    answer = plan(branch(), pool=PoolView(3, 10_000, 0.0), config=CONFIG.replace(c_spec=64))
    assert reasons(answer) == [(2, "pages", 64)]
    assert "need 4 pages, but 3 are free" in answer.refused[0].message


def test_refused_branch_cap_counts_known_and_guesses_alike() -> None:
    config = CONFIG.replace(branch_cap=2)
    known, guess, late = branch(2), branch(3, known=0, guess=32), branch(4, known=0, guess=16)
    answer = plan(known, guess, late, config=config)
    assert admitted(answer) == [(2, WorkKind.KNOWN, 64), (3, WorkKind.RESIDUAL, 32)]
    assert reasons(answer) == [(4, "branch_cap", 16)]


def test_the_cap_counts_children_that_speculate_already_but_not_other_parents() -> None:
    config = CONFIG.replace(branch_cap=2)
    busy = {("s", 1): 2, ("other", 9): 2}
    answer = plan(branch(2), branch(3, parent=9), config=config, speculating=busy)
    assert admitted(answer) == [(3, WorkKind.KNOWN, 64)]
    assert reasons(answer) == [(2, "branch_cap", 64)]


def test_a_branch_counts_once_for_its_known_suffix_and_its_guess() -> None:
    answer = plan(branch(2, guess=32), config=CONFIG.replace(branch_cap=1))
    assert admitted(answer) == [(2, WorkKind.KNOWN, 64), (2, WorkKind.RESIDUAL, 32)]


def test_refused_tbt_margin_is_tested_on_the_chunk() -> None:
    # The whole item takes 640 ms, its chunks of one page 16 ms: within gamma.
    running = Load(decoding=True)
    long = branch(known=640)
    fine = plan(long, ms=1.0, load=running)
    assert [(a.tokens, a.chunk) for a in fine.admitted] == [(640, 16)]
    assert fine.admitted[0].cost_ms == 0.0
    slow = plan(long, ms=1.5, load=running)  # one page takes 24 ms
    assert reasons(slow) == [(2, "tbt_margin", 640)]
    assert "16 tokens takes 24 ms" in slow.refused[0].message
    assert admitted(plan(long, ms=1.5)) == [(2, WorkKind.KNOWN, 640)]  # nobody decodes


def test_refused_not_worth() -> None:
    assert reasons(plan(branch(p=0.0))) == [(2, "not_worth", 64)]
    answer = plan(branch(), pool=PoolView(10, 1000, 1e6))
    assert reasons(answer) == [(2, "not_worth", 64)]
    assert "save 6.4 ms and cost" in answer.refused[0].message


def test_a_guess_needs_its_whole_known_suffix() -> None:
    answer = plan(branch(guess=32, t_idle_ms=5.0))
    assert admitted(answer) == [(2, WorkKind.KNOWN, 48)]
    assert reasons(answer) == [(2, "idle_horizon", 16), (2, "idle_horizon", 32)]
    assert "16 of the 64 known tokens" in answer.refused[1].message


# -- guesses, exact and greedy ---------------------------------------------------------------


def test_known_items_come_first_even_where_a_guess_is_denser() -> None:
    weak, strong = branch(2, p=0.1, t_idle_ms=7.0), branch(3, known=0, guess=64, t_idle_ms=7.0)
    answer = plan(weak, strong)
    assert admitted(answer) == [(2, WorkKind.KNOWN, 64)]
    assert reasons(answer) == [(3, "idle_horizon", 64)]


def test_a_guess_shares_the_tail_page_of_its_known_suffix() -> None:
    answer = plan(branch(known=20, guess=10, context=1024))  # 30 tokens: 2 pages in all
    assert [a.pages for a in answer.admitted] == [2, 0]


def test_exact_beats_greedy_density_and_greedy_serves_many() -> None:
    # Room for 10 pages.  One dense small branch shuts out the big one; the exact answer doesn't.
    small, big = branch(2, known=16), branch(3, known=160, p=0.99)
    pool = PoolView(10, 10_000, 0.0)
    assert [a.candidate.node for a in plan(small, big, pool=pool).admitted] == [3]
    many = [branch(n, known=16 * (n % 5 + 1), parent=n) for n in range(2, 40)]
    answer = plan(*many, pool=PoolView(50, 10_000, 0.0))
    assert sum(a.pages for a in answer.admitted) == 50


# -- the ledger ------------------------------------------------------------------------------


def test_pages_are_reserved_across_calls_until_settled_or_released() -> None:
    planner = Planner(CONFIG.replace(c_spec=64), linear(0.1))
    pool = PoolView(6, 10_000, 0.0)
    assert admitted(planner.plan([branch(2)], pool, speculating={})) != []
    assert planner.ledger.total == planner.ledger.held("s", 2) == 4
    assert reasons(planner.plan([branch(3)], pool, speculating={})) == [(3, "pages", 64)]
    # Allocated for real: the pool has fewer free pages, the ledger holds none.
    planner.ledger.settle("s", 2, 4)
    assert reasons(planner.plan([branch(3)], PoolView(2, 10_000, 0.0), speculating={})) != []
    planner.ledger.release_session("s")
    assert admitted(planner.plan([branch(3)], pool, speculating={})) != []


# -- errors ----------------------------------------------------------------------------------


def test_a_candidate_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="node 2 of session 's'"):
        plan(branch(2), branch(2))
    assert len(plan(branch(2), branch(2, session="other")).admitted) == 2  # B1


@pytest.mark.parametrize("ms", [math.nan, math.inf, -1.0])
def test_a_broken_predictor_is_an_error_and_reserves_nothing(ms: float) -> None:
    planner = Planner(CONFIG, lambda tokens, context: ms)
    with pytest.raises(ConfigError, match="predict_ms"):
        planner.plan([branch()], ROOMY, speculating={})
    assert planner.ledger.total == 0


@pytest.mark.parametrize("values", [(-1, 10, 1.0), (11, 10, 1.0), (0, 0, 1.0), (1, 10, math.nan)])
def test_bad_pools(values: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError):
        PoolView(*values)


@pytest.mark.parametrize("values", [(False, 1.5), (False, math.nan), (True, 0.5, -1.0)])
def test_bad_loads(values: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        Load(*values)


# -- properties ------------------------------------------------------------------------------

CANDIDATES = st.lists(
    st.builds(
        branch,
        node=st.integers(2, 40),
        parent=st.integers(0, 1),
        known=st.sampled_from([0, 5, 16, 100, 700, 3000]),
        guess=st.sampled_from([0, 7, 32]),
        p=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
        q=st.sampled_from([0.1, 0.5, 1.0]),
        schema_stable=st.booleans(),
        t_idle_ms=st.sampled_from([0.0, 5.0, 60.0, 2000.0, 1e9]),
        context=st.sampled_from([0, 9, 1024, 5000]),
    ),
    max_size=20,
    unique_by=lambda c: c.node,
)


@given(
    candidates=CANDIDATES,
    free=st.integers(0, 300),
    ms=st.sampled_from([0.01, 0.3, 2.0]),
    load=st.builds(Load, st.booleans(), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 30.0])),
    busy=st.integers(0, 7),
)
def test_every_plan_keeps_the_hard_limits_and_accounts_for_every_token(
    candidates: list[Candidate], free: int, ms: float, load: Load, busy: int
) -> None:
    planner = Planner(CONFIG, linear(ms))
    pool = PoolView(free, 400, 3.0)
    answer = planner.plan(candidates, pool, speculating={("s", 1): busy}, load=load)

    now = load.backlog_ms
    for a in answer.admitted:
        now += ms * a.tokens
        assert now <= a.candidate.t_idle_ms + 1e-6
        assert a.gain_ms > a.cost_ms >= 0.0
        assert 1 <= a.chunk <= CONFIG.c_spec
        if load.decoding:
            assert ms * min(a.chunk, a.tokens) <= CONFIG.gamma_ms
    assert sum(a.pages for a in answer.admitted) == planner.ledger.total <= free
    for parent, taken in ((0, 0), (1, busy)):
        nodes = {a.candidate.node for a in answer.admitted if a.candidate.parent == parent}
        assert len(nodes) <= max(0, CONFIG.branch_cap - taken)

    kinds = [a.kind for a in answer.admitted]
    assert kinds == sorted(kinds)  # F31
    for c in candidates:
        for kind, wanted in ((WorkKind.KNOWN, c.known), (WorkKind.RESIDUAL, c.guess)):
            got = [a.tokens for a in answer.admitted if a.candidate is c and a.kind is kind]
            left = [r.tokens for r in answer.refused if r.candidate is c and r.kind is kind]
            assert len(got) <= 1
            assert sum(got) + sum(left) == wanted


@given(candidates=CANDIDATES, free=st.integers(0, 300))
def test_guesses_never_take_anything_from_known_text(
    candidates: list[Candidate], free: int
) -> None:
    pool = PoolView(free, 400, 3.0)
    both = plan(*candidates, pool=pool)
    bare = plan(*[branch(**{f: getattr(c, f) for f in c.__slots__} | {"guess": 0})
                  for c in candidates], pool=pool)  # fmt: skip
    known = [a for a in admitted(both) if a[1] is WorkKind.KNOWN]
    assert known == admitted(bare)


@given(
    tokens=st.integers(1, 512),
    q=st.floats(0, 1),
    p=st.floats(0.01, 1),
    eta=st.floats(0.01, 1),
)
def test_a_known_suffix_is_worth_no_less_than_an_equal_guess(
    tokens: int, q: float, p: float, eta: float
) -> None:
    """Proposition 1: equal T_pre and equal cost, so G/C of the known one is no less."""
    config = CONFIG.replace(eta_partial=eta, q_min=0.0)
    known = plan(branch(known=tokens, p=p), config=config)
    guess = plan(branch(known=0, guess=tokens, q=q, p=p), config=config)
    assert known.admitted[0].cost_ms == 0.0
    assert all(g.gain_ms <= known.admitted[0].gain_ms + 1e-9 for g in guess.admitted)
