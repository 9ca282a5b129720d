"""VTC: prices, the lift rule, misses, and what is remembered."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.config import ForkServeConfig
from forkserve.control.fairness import FairMeter
from forkserve.errors import ConfigError
from forkserve.types import JobClass

CONFIG = ForkServeConfig()  # kappa 0.25


def busy(meter: FairMeter, tenant: str, tokens: int = 0) -> None:
    """The tenant has committed work queued and was served some of it."""
    meter.arrive(tenant)
    meter.serve(tenant, JobClass.TAIL, tokens)


@pytest.mark.parametrize(
    ("kind", "price"),
    [(JobClass.DECODE, 2.0), (JobClass.TAIL, 1.0), (JobClass.ROOT, 1.0), (JobClass.SPEC, 0.25)],
)
def test_prices(kind: JobClass, price: float) -> None:
    meter = FairMeter(CONFIG)
    meter.serve("a", kind, 100)
    assert meter.charged("a") == meter.counter("a") == 100 * price
    assert meter.charged("b") == meter.counter("b") == 0.0


def test_committed_speculation_costs_what_committed_prefill_costs() -> None:
    meter = FairMeter(CONFIG)
    meter.serve("a", JobClass.SPEC, 100)
    meter.commit_speculative("a", 60)
    assert meter.charged("a") == pytest.approx(60 + 0.25 * 40)


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["tail", "decode", "spec"]), st.integers(0, 500)), max_size=30
    ),
    kept=st.floats(0, 1),
    kappa=st.floats(0, 1),
)
def test_charge_is_committed_cost_plus_kappa_times_waste(
    events: list[tuple[str, int]], kept: float, kappa: float
) -> None:
    meter = FairMeter(CONFIG.replace(kappa=kappa))
    kinds = {"tail": JobClass.TAIL, "decode": JobClass.DECODE, "spec": JobClass.SPEC}
    total = dict.fromkeys(kinds, 0)
    for name, tokens in events:
        meter.serve("a", kinds[name], tokens)
        total[name] += tokens
    used = int(kept * total["spec"])
    meter.commit_speculative("a", used)
    committed = total["tail"] + 2 * total["decode"] + used
    assert meter.charged("a") == pytest.approx(committed + kappa * (total["spec"] - used))


def test_weights_divide_the_charge() -> None:
    meter = FairMeter(CONFIG)
    meter.set_weight("a", 4.0)
    meter.serve("a", JobClass.TAIL, 100)
    assert (meter.counter("a"), meter.charged("a")) == (25.0, 100.0)
    for weight in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="'a'"):
            meter.set_weight("a", weight)


# -- lift ------------------------------------------------------------------------------------


def test_an_idle_tenant_is_lifted_to_the_least_of_the_backlogged() -> None:
    meter = FairMeter(CONFIG)
    busy(meter, "a", 500)
    busy(meter, "b", 300)
    meter.serve("b", JobClass.TAIL, 500)
    meter.arrive("c")
    assert meter.counter("c") == 500
    meter.serve("a", JobClass.TAIL, 100)
    meter.arrive("c")  # a second job: it was not idle
    assert meter.counter("c") == 500


def test_a_debtor_is_not_lowered() -> None:
    meter = FairMeter(CONFIG)
    meter.serve("b", JobClass.SPEC, 4000)
    busy(meter, "a", 100)
    meter.arrive("b")
    assert meter.counter("b") == 1000


def test_a_tenant_that_only_speculates_does_not_hold_the_minimum_down() -> None:
    meter = FairMeter(CONFIG)
    meter.open("speculator")
    meter.serve("speculator", JobClass.SPEC, 4)
    busy(meter, "a", 500)
    meter.arrive("b")
    assert meter.counter("b") == 500
    meter.arrive("speculator")
    assert meter.counter("speculator") == 500


def test_after_a_quiet_time_one_starts_where_the_last_one_stopped() -> None:
    meter = FairMeter(CONFIG)
    busy(meter, "a", 1000)
    meter.leave("a")
    meter.tick()
    meter.arrive("b")
    assert meter.counter("b") == 1000


def test_one_job_after_another_between_ticks_is_not_idling() -> None:
    meter = FairMeter(CONFIG)
    busy(meter, "a", 100)
    busy(meter, "b", 300)  # starts level with a
    meter.leave("a")
    meter.arrive("a")
    assert meter.counter("a") == 100
    meter.leave("a")
    meter.tick()
    meter.arrive("a")
    assert meter.counter("a") == 400


def test_leaving_without_a_job_is_a_broken_invariant() -> None:
    meter = FairMeter(CONFIG)
    meter.open("a")
    with pytest.raises(AssertionError, match="'a'"):
        meter.leave("a")


# -- misses ----------------------------------------------------------------------------------


def test_a_miss_bills_the_victims_tokens_and_raises_lambda() -> None:
    meter = FairMeter(CONFIG)
    assert meter.tbt_factor("a", 0.0) == 1.0
    meter.miss("a", 7, 1000.0)
    assert meter.charged("a") == 7.0
    assert meter.tbt_factor("a", 1000.0) == 2.0
    assert meter.tbt_factor("b", 1000.0) == 1.0


def test_lambda_decays_back_and_has_a_ceiling() -> None:
    meter = FairMeter(CONFIG)
    for _ in range(10):
        meter.miss("a", 1, 0.0)
    assert meter.tbt_factor("a", 0.0) == 16.0
    assert meter.tbt_factor("a", 10_000.0) == pytest.approx(8.5)
    assert meter.tbt_factor("a", 1e6) == pytest.approx(1.0)
    meter.miss("a", 1, 10_000.0)
    assert meter.tbt_factor("a", 10_000.0) == 16.0


def test_negative_tokens_are_an_error() -> None:
    with pytest.raises(ConfigError, match="-1 tokens"):
        FairMeter(CONFIG).serve("a", JobClass.TAIL, -1)


# -- memory ----------------------------------------------------------------------------------


def test_closing_keeps_a_debt_until_the_level_has_passed_it() -> None:
    meter = FairMeter(CONFIG)
    busy(meter, "a", 100)
    busy(meter, "debtor", 900)
    meter.leave("debtor")
    meter.close("debtor")
    assert meter.counter("debtor") == 1000
    meter.arrive("debtor")
    assert meter.counter("debtor") == 1000  # reopened with its debt
    meter.leave("debtor")
    meter.close("debtor")
    meter.serve("a", JobClass.TAIL, 1000)
    meter.open("c")
    meter.close("c")
    assert len(meter) == 1
    meter.arrive("debtor")
    assert meter.counter("debtor") == 1100


def test_memory_stays_bounded() -> None:
    meter = FairMeter(CONFIG)
    for i in range(2000):  # one after the other: nothing is owed
        busy(meter, str(i), 10)
        meter.leave(str(i))
        meter.close(str(i))
    assert len(meter) <= 1
    busy(meter, "slow", 0)
    for i in range(2000):  # all above the level
        meter.serve(f"x{i}", JobClass.TAIL, 100_000 + i)
        meter.close(f"x{i}")
    assert len(meter) == 1025
    assert meter.counter("x1999") > 0.0  # the greatest debts are kept
    assert meter.charged("x0") == 0.0


def test_a_late_bill_does_not_reopen_a_closed_tenant() -> None:
    meter = FairMeter(CONFIG)
    meter.open("a")
    meter.close("a")
    meter.serve("a", JobClass.SPEC, 4)
    busy(meter, "b", 10)
    meter.close("unknown")
    meter.open("c")
    meter.close("c")
    assert len(meter) == 1


def test_weights_outlive_a_closed_tenant() -> None:
    meter = FairMeter(CONFIG)
    meter.set_weight("a", 2.0)
    meter.open("a")
    meter.close("a")
    assert len(meter) == 0
    meter.serve("a", JobClass.TAIL, 10)
    assert meter.counter("a") == 5.0


@given(
    quanta=st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=5, max_size=80),
    weights=st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 3.0])),
)
def test_service_of_backlogged_tenants_stays_within_twice_the_largest_quantum(
    quanta: list[tuple[int, bool]], weights: tuple[float, float]
) -> None:
    """VTC's bound: for two tenants that are backlogged all along, |W_i/w_i - W_j/w_j| <= 2 U."""
    meter = FairMeter(CONFIG)
    tenants = ("a", "b")
    for tenant, weight in zip(tenants, weights, strict=True):
        meter.set_weight(tenant, weight)
        meter.arrive(tenant)
    most = 2.0 * 400
    for tokens, decode in quanta:
        tenant = min(tenants, key=meter.counter)
        meter.serve(tenant, JobClass.DECODE if decode else JobClass.TAIL, tokens)
        service = [meter.charged(t) / w for t, w in zip(tenants, weights, strict=True)]
        assert abs(service[0] - service[1]) <= 2 * most
