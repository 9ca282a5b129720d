"""The two-class scheduler: committed work, order, fairness, and its own cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.scheduler import Job, Scheduler, TickPlan
from forkserve.types import JobClass
from tests.instructions import instructions

from .jobs import CONFIG, DECODE, ROOT, SPEC, TAIL, granted, instant, job, linear, run, scheduler

# -- committed work --------------------------------------------------------------------------


def test_generations_first_with_one_token_each_then_tails_then_roots() -> None:
    made = scheduler(job(ROOT, 1, 30), job(TAIL, 2, 20), job(DECODE, 3, 9), job(DECODE, 4, 9))
    plan = made.plan(0.0, instant)
    assert granted(plan) == [(3, 1), (4, 1), (2, 20), (1, 30)]
    assert (plan.committed_tokens, plan.speculative_tokens) == (52, 0)
    assert not plan.saturated


def test_a_lone_tail_gets_a_whole_chunk_not_its_rate() -> None:
    made = scheduler(job(TAIL, 1, 5000))
    tail = made.jobs()[0]
    grants = []
    while len(made):
        plan = made.plan(0.0, instant)
        grants.append(plan.items[0][1])
        run(made, plan)
    assert grants == [2048, 2048, 904]
    assert (tail.remaining, tail.attained, tail.context) == (0, 5000, 5000)


def test_every_committed_job_is_sure_of_its_rate() -> None:
    # Rates are remaining * 8 ms / 200 ms: 80, 40 and 1 (at least), and 1 for the generation.  The
    # other 78 of B_t go to the first tail.
    jobs = job(TAIL, 1, 2000), job(TAIL, 2, 1000), job(ROOT, 3, 5), job(DECODE, 4, 9)
    plan = scheduler(*jobs, max_batch_tokens=200).plan(0.0, instant)
    assert granted(plan) == [(4, 1), (1, 158), (2, 40), (3, 1)]
    assert plan.committed_tokens == 200
    assert plan.saturated


def test_b_c_is_cut_off_at_the_token_budget() -> None:
    jobs = [job(TAIL, n, 2000, submitted_ms=float(n), session=f"s{n}") for n in range(5)]
    plan = scheduler(*jobs, max_batch_tokens=200).plan(0.0, instant)
    assert granted(plan) == [(0, 80), (1, 80), (2, 40)]


def test_works_of_a_tick_are_bounded() -> None:
    jobs = [job(DECODE, n, 5) for n in range(5)]
    plan = scheduler(*jobs, job(SPEC, 9, 10), max_batch_works=5).plan(0.0, instant)
    assert len(plan.items) == 5
    assert plan.saturated


def test_a_node_runs_one_job_at_a_time_and_waits_for_its_parents_rows() -> None:
    made = scheduler(
        job(ROOT, 1, 10), job(DECODE, 1, 5), job(TAIL, 2, 10, parent=1), job(SPEC, 3, 10, parent=2)
    )
    ticks = []
    for _ in range(4):
        plan = made.plan(0.0, instant)
        ticks.append([one.node for one, _ in plan.items])
        run(made, plan)
    # The root's generation doesn't hold its child up: it writes rows of its own.
    assert ticks == [[1], [1, 2], [1, 3], [1]]


def test_the_same_node_id_in_two_sessions_is_two_nodes() -> None:
    made = scheduler(
        job(TAIL, 7, 10, session="a"), job(TAIL, 7, 10, session="b"), job(SPEC, 8, 5, session="a")
    )
    assert len(made.plan(0.0, instant).items) == 3
    assert [j.session for j in made.cancel_node("a", 7)] == ["a"]
    assert [j.session for j in made.jobs(TAIL)] == ["b"]


def test_committed_work_does_not_wait_for_speculation_on_its_node() -> None:
    spec, tail = job(SPEC, 2, 100), job(TAIL, 2, 50)
    made = scheduler(spec, tail)
    assert [one for one, _ in made.plan(0.0, instant).items] == [tail]
    child = job(TAIL, 3, 50, parent=4)
    made = scheduler(job(SPEC, 4, 100), child)
    assert made.plan(0.0, instant).items[0] == (child, 50)


def test_held_jobs_are_skipped() -> None:
    made = scheduler(job(DECODE, 1, 5, held=True), job(TAIL, 2, 5))
    assert granted(made.plan(0.0, instant)) == [(2, 5)]


def test_a_queued_tail_may_become_a_generation() -> None:
    made = scheduler(job(TAIL, 1, 5), job(TAIL, 2, 9))
    first = made.jobs()[0]
    first.kind, first.remaining = DECODE, 2
    assert made.decoding
    for _ in range(2):
        run(made, made.plan(0.0, instant))
    assert len(made) == 0


# -- order -----------------------------------------------------------------------------------


def test_programs_are_served_in_order_of_arrival() -> None:
    late = job(TAIL, 1, 100, session="late", submitted_ms=50.0)
    early = job(TAIL, 1, 100, session="early", submitted_ms=10.0)
    plan = scheduler(late, early, max_batch_tokens=100).plan(60.0, instant)
    assert plan.items[0][0] is early


def test_a_starved_program_overtakes_after_bounded_ticks() -> None:
    # Both want the whole budget.  A has 3 s of seniority; each tick of service costs it 1 s.
    settings = {"max_batch_tokens": 100, "prefill_chunk": 100, "ttft_slo_ms": 1e9}
    made = scheduler(
        job(TAIL, 1, 10_000, session="a"),
        job(TAIL, 1, 10_000, session="b", submitted_ms=3000.0),
        **settings,
    )
    leaders = []
    for tick in range(10):
        now = 3000.0 + 8 * tick
        plan = made.plan(now, instant)
        leaders.append(plan.items[0][0].session)
        run(made, plan, now)
    assert leaders[:4] == ["a"] * 4
    assert "b" in leaders[4:5]
    assert leaders[4:].count("a") == leaders[4:].count("b") == 3


def test_more_generations_than_places_take_turns() -> None:
    jobs = [job(DECODE, 1, 100, session=f"s{n}", submitted_ms=float(n)) for n in range(7)]
    made = scheduler(*jobs, max_batch_works=3)
    for tick in range(70):
        run(made, made.plan(100.0 + tick, instant))
    assert {j.attained for j in jobs} == {30}


def test_roots_are_not_starved_by_a_stream_of_tails() -> None:
    settings = {"max_batch_tokens": 64, "prefill_chunk": 64, "max_batch_works": 1}
    root = job(ROOT, 1, 64, session="new")
    made = scheduler(root, **settings)
    ticks = 0
    while root.remaining:
        now = 8.0 * ticks
        made.submit(job(TAIL, ticks, 64, session=f"s{ticks}", submitted_ms=now))
        run(made, made.plan(now, instant), now)
        ticks += 1
    assert 125 <= ticks <= 127  # aging_ms of 1000 is 125 ticks


@pytest.mark.parametrize("kind", [TAIL, ROOT])
@pytest.mark.parametrize("room", [{"max_batch_works": 3}, {"max_batch_tokens": 3}])
def test_prefills_are_not_starved_by_generations(kind: JobClass, room: dict[str, int]) -> None:
    """More of them than a tick has places or tokens for: whoever waits gets its turn."""
    made = scheduler(**room)
    for n in range(4):
        made.submit(job(DECODE, 1, 10**6, session=f"s{n}", tenant="many"))
    late = job(kind, 1, 40, session="late", tenant="few")
    made.submit(late)
    ticks = 0
    while late.remaining:
        plan = made.plan(8.0 * ticks, instant)
        run(made, plan, 8.0 * ticks)
        assert sum(one.kind is DECODE for one, _ in plan.items) >= 2  # nor are those
        ticks += 1
        assert ticks < 125 * (1 + (kind is ROOT)) + 50


def test_the_tenant_with_the_least_service_goes_first() -> None:
    made = scheduler(max_batch_tokens=100, prefill_chunk=100, ttft_slo_ms=1e9)
    for name in ("a", "b"):
        made.submit(job(TAIL, 1, 5000, session=name, tenant=name))
    for tick in range(40):
        run(made, made.plan(8.0 * tick, instant))
    assert abs(made.meter.charged("a") - made.meter.charged("b")) <= 200


def test_a_heavy_speculator_is_served_later() -> None:
    made = scheduler(max_batch_tokens=512, prefill_chunk=512)
    for name in ("heavy", "light"):
        made.submit(job(DECODE, 1, 100, session=name, tenant=name))
    made.submit(job(SPEC, 5, 400, session="heavy", tenant="heavy"))
    run(made, made.plan(0.0, instant))
    assert made.meter.charged("heavy") == 2 + 100.0  # kappa * n, to the tenant that asked
    assert made.meter.charged("light") == 2.0
    for name in ("heavy", "light"):
        made.submit(job(TAIL, 2, 5000, session=name, tenant=name))
    leaders = []
    for _ in range(2):
        plan = made.plan(2.0, instant)
        leaders.append(next(one.tenant for one, _ in plan.items if one.kind is TAIL))
        run(made, plan)
    assert leaders == ["light", "heavy"]


# -- properties ------------------------------------------------------------------------------

JOBS = st.lists(
    st.tuples(
        st.sampled_from(list(JobClass)),
        st.sampled_from("ab"),  # session
        st.integers(0, 6),  # node
        st.integers(1, 700),  # remaining
        st.sampled_from([None, 0, 1, 2]),  # parent
        st.sampled_from("tu"),  # tenant
        st.sampled_from([16, 100, 512]),  # chunk
    ),
    max_size=14,
)


def build(rows: list[tuple[Any, ...]], now_ms: float = 0.0) -> list[Job]:
    return [
        job(kind, node, remaining, session=session, tenant=tenant, chunk=chunk,
            parent=parent if parent is not None and parent < node else None, submitted_ms=now_ms)
        for kind, session, node, remaining, parent, tenant, chunk in rows
    ]  # fmt: skip


@given(
    first=JOBS,
    later=JOBS,
    budget=st.sampled_from([1, 40, 600, 8192]),
    works=st.sampled_from([1, 3, 256]),
    ms=st.sampled_from([0.0, 0.05, 0.5, 20.0]),
)
def test_any_load_is_served_within_the_limits_and_to_the_end(
    first: list[Any], later: list[Any], budget: int, works: int, ms: float
) -> None:
    made = scheduler(max_batch_tokens=budget, max_batch_works=works)
    predict = linear(ms)
    waiting = [build(first), build(later, 8.0)]
    everything = [one for batch in waiting for one in batch]
    total = {one: one.remaining for one in everything}
    ticks = 0
    while waiting or len(made):
        for one in waiting.pop(0) if waiting else ():
            made.submit(one)
        before = made.jobs()
        plan = made.plan(8.0 * ticks, predict)
        assert made.jobs() == before  # planning keeps the queue
        check_tick(made, plan, budget, works, predict)
        assert plan.items or not before  # something runs, whatever there is
        run(made, plan, 8.0 * ticks)
        ticks += 1
        assert ticks <= sum(total.values()) + 2
    assert all(one.remaining == 0 and one.attained == total[one] for one in everything)
    spec = sum(total[one] for one in everything if one.kind is SPEC)
    decode = sum(total[one] for one in everything if one.kind is DECODE)
    bill = made.meter.charged("t") + made.meter.charged("u")
    assert bill == pytest.approx(sum(total.values()) - spec * 0.75 + decode)
    assert not made._nodes
    assert not made._programs


def check_tick(
    made: Scheduler, plan: TickPlan, budget: int, works: int, predict: Callable[[int, int], float]
) -> None:
    grants = dict(plan.items)
    assert len(grants) == len(plan.items) <= works
    assert sum(grants.values()) == plan.committed_tokens + plan.speculative_tokens <= budget
    assert len({(j.session, j.node) for j in grants}) == len(grants)
    queue = made.jobs()
    for one, tokens in plan.items:
        assert 1 <= tokens <= one.remaining
        ahead = [
            j for j in queue[: queue.index(one)] if (j.session, j.node) == (one.session, one.node)
        ]
        assert all(j.kind is SPEC and one.kind is not SPEC for j in ahead)
        if one.kind is SPEC:
            assert tokens <= one.chunk
        elif one.kind is DECODE:
            assert tokens == 1
        else:
            assert tokens <= CONFIG.prefill_chunk
        above = [j for j in grants if (j.session, j.node) == (one.session, one.parent)]
        assert all(j.kind is DECODE or (j.kind is SPEC and one.kind is not SPEC) for j in above)
    kinds = [j.kind is SPEC for j in grants]
    assert kinds == sorted(kinds)
    if plan.speculative_tokens:
        assert not plan.saturated
        assert all(j.remaining == grants.get(j, 0) for j in queue if j.kind in (TAIL, ROOT))
        limit = CONFIG.gamma_ms if made.decoding else CONFIG.ttft_slo_ms / 2
        slow_page = not plan.committed_tokens and plan.speculative_tokens <= CONFIG.page_size
        assert predict(sum(grants.values()), 0) <= limit or slow_page


@given(rows=JOBS, tenants=st.permutations(["t", "u"]))
def test_planning_twice_gives_the_same_answer(rows: list[Any], tenants: list[str]) -> None:
    made = scheduler(*build(rows))
    made.meter.serve(tenants[0], TAIL, 100)
    assert made.plan(0.0, linear(0.1)) == made.plan(0.0, linear(0.1))


# -- cost ------------------------------------------------------------------------------------


def planning(count: int) -> int:
    """Instructions of a plan with `count` jobs of all classes."""
    rng = random.Random(0)
    kinds = [DECODE] * 6 + [TAIL, SPEC, SPEC, SPEC]
    jobs = [
        job(kinds[n % 10], n % 8, rng.randint(1, 600), session=f"s{n // 4}", tenant=f"t{n % 4}",
            gain=rng.random(), parent=None)
        for n in range(count)
    ]  # fmt: skip
    made = scheduler(*jobs)
    return instructions(lambda: made.plan(0.0, linear(0.001)))


def test_a_tick_of_64_jobs_costs_few_hundred_instructions_a_job() -> None:
    assert planning(64) < 64 * 300


def test_planning_is_not_quadratic() -> None:
    assert planning(3200) < 12 * planning(320)


@pytest.mark.parametrize(
    "changes", [{"aging_ms": float("inf")}, {"tick_ms": float("inf")}, {"ttft_slo_ms": 1e-320}]
)
def test_a_setting_without_a_limit_ends_no_tick(changes: dict[str, float]) -> None:
    """No ageing, and no limit to a prefill's rate: what is served still falls in line behind."""
    made = scheduler(
        job(TAIL, 1, 40, session="a"), job(TAIL, 2, 40, session="b"), max_batch_tokens=30, **changes
    )
    assert made.decode_share(0.0, "a") == 0.0
    plan = made.plan(0.0, instant)
    assert granted(plan)[0][0] == 1
    run(made, plan)
    assert sum(tokens for _, tokens in granted(made.plan(1e9, instant))) == 30
