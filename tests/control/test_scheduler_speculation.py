"""The two-class scheduler: speculation in what committed work leaves."""

from __future__ import annotations

from collections import Counter

import pytest

from forkserve.control.scheduler import Job
from forkserve.types import WorkKind

from .jobs import CONFIG, DECODE, ROOT, SPEC, TAIL, granted, instant, job, linear, run, scheduler

# -- speculation -----------------------------------------------------------------------------


def test_speculation_gets_what_is_left_of_the_budget_densest_first() -> None:
    made = scheduler(
        job(TAIL, 1, 100),
        job(SPEC, 2, 900, gain=5.0),
        job(SPEC, 3, 900, gain=9.0),
        job(SPEC, 4, 900, gain=9.0, work=WorkKind.RESIDUAL, cost=0.0),
        max_batch_tokens=800,
    )
    plan = made.plan(0.0, instant)
    assert granted(plan) == [(1, 100), (3, 512), (2, 188)]
    assert (plan.committed_tokens, plan.speculative_tokens) == (100, 700)
    assert not plan.saturated


def test_speculation_is_ordered_by_tenant_first() -> None:
    made = scheduler(max_batch_tokens=512)
    made.meter.serve("greedy", TAIL, 1000)
    made.submit(job(SPEC, 1, 512, session="a", tenant="greedy", gain=100.0))
    made.submit(job(SPEC, 1, 512, session="b", tenant="modest", gain=1.0))
    assert [one.tenant for one, _ in made.plan(0.0, instant).items] == ["modest"]


def test_no_speculation_while_committed_prefill_is_unfinished() -> None:
    made = scheduler(job(SPEC, 2, 100), job(TAIL, 1, 3000))
    plan = made.plan(0.0, instant)
    assert granted(plan) == [(1, 2048)]
    assert plan.saturated
    assert len(made) == 2
    run(made, plan)
    assert granted(made.plan(0.0, instant)) == [(1, 952), (2, 100)]


def test_a_tail_that_waits_for_pages_keeps_speculation_out() -> None:
    made = scheduler(job(SPEC, 2, 100), job(TAIL, 1, 30, held=True))
    plan = made.plan(0.0, instant)
    assert plan.items == []
    assert plan.saturated


@pytest.mark.parametrize(
    ("decodes", "tokens"),
    [
        (0, 192),  # half of the TTFT SLO is 100 ms: 200 tokens, 12 pages
        (2, 32),  # gamma is 20 ms: 40 tokens, 2 are taken
        (40, 0),
    ],
)
def test_speculation_keeps_the_predicted_step_time(decodes: int, tokens: int) -> None:
    made = scheduler(*[job(DECODE, n, 9) for n in range(decodes)], job(SPEC, 99, 500))
    plan = made.plan(0.0, linear(0.5))
    assert plan.speculative_tokens == tokens
    assert plan.saturated is (tokens == 0)
    assert len(made.jobs(SPEC)) == 1


def test_a_small_chunk_does_not_jump_the_queue_into_a_full_step() -> None:
    made = scheduler(job(SPEC, 1, 500), job(SPEC, 2, 8, gain=1.0))
    assert granted(made.plan(0.0, linear(0.5))) == [(1, 192)]  # 8 more would keep the 100 ms


def test_context_counts_in_the_step_time() -> None:
    def predict(tokens: int, context: int) -> float:
        return tokens * (0.01 + context * 1e-5)

    shallow = scheduler(job(SPEC, 1, 512)).plan(0.0, predict)
    deep = scheduler(job(SPEC, 1, 512, context=100_000)).plan(0.0, predict)
    assert (shallow.speculative_tokens, deep.speculative_tokens) == (512, 96)


def test_an_otherwise_idle_machine_always_runs_a_page() -> None:
    slow = linear(50.0)  # a page takes 800 ms
    made = scheduler(job(SPEC, 1, 40), job(SPEC, 2, 40))
    assert granted(made.plan(0.0, slow)) == [(1, 16)]
    made.submit(job(DECODE, 3, 5))
    assert granted(made.plan(0.0, slow)) == [(3, 1)]
    made.jobs(DECODE)[0].held = True  # it doesn't run, so nothing of it can be late
    assert granted(made.plan(0.0, slow)) == [(1, 16)]


def test_chunks_of_a_node_are_contiguous_whatever_their_density() -> None:
    # B14: the guess is small and dense, but its rows come after those of the known suffix.
    known = job(SPEC, 2, 1200, gain=1.0)
    guess = job(SPEC, 2, 20, gain=99.0, work=WorkKind.RESIDUAL)
    made = scheduler(known, guess, max_batch_tokens=512)
    ran: list[Job] = []
    while len(made):
        plan = made.plan(0.0, instant)
        ran += [one for one, _ in plan.items]
        run(made, plan)
    assert ran == [known, known, known, guess]


def test_a_child_does_not_run_in_the_tick_that_writes_its_parents_rows() -> None:
    made = scheduler(job(TAIL, 1, 20), job(SPEC, 2, 20, parent=1), job(SPEC, 3, 20, parent=2))
    for expected in ([(1, 20)], [(2, 20)], [(3, 20)]):
        plan = made.plan(0.0, instant)
        assert granted(plan) == expected
        run(made, plan)


def test_late_speculation_is_dropped_with_its_reason() -> None:
    late, held = job(SPEC, 1, 20, deadline_ms=10.0), job(SPEC, 2, 20, deadline_ms=10.0, held=True)
    fine = job(SPEC, 3, 20, deadline_ms=11.0)
    made = scheduler(late, held, fine)
    plan = made.plan(10.0, instant)
    assert plan.dropped == [(late, "deadline")]
    assert granted(plan) == [(3, 20)]
    assert made.jobs() == [held, fine]


def test_a_commit_waits_for_one_chunk_at_most() -> None:
    made = scheduler(job(SPEC, 1, 10_000))
    predict = linear(0.2)
    plan = made.plan(0.0, predict)
    running_ms = predict(plan.speculative_tokens, 0)
    assert running_ms <= CONFIG.ttft_slo_ms / 2
    made.submit(job(TAIL, 2, 700, session="other"))  # arrives while the chunk runs
    run(made, plan, running_ms)
    after = made.plan(running_ms, predict)
    assert granted(after) == [(2, 700)]
    assert after.saturated


def test_token_time_with_speculation_stays_within_the_slo() -> None:
    def mean_ms(spec: bool) -> float:
        made = scheduler(*[job(DECODE, n, 50, session=f"d{n}") for n in range(4)])
        if spec:
            made.submit(job(SPEC, 1, 10**6, session="x"))
        steps = []
        while made.decoding:
            plan = made.plan(0.0, linear(0.2))
            steps.append(0.2 * sum(tokens for _, tokens in plan.items))
            run(made, plan)
        assert max(steps) <= CONFIG.gamma_ms
        return sum(steps) / len(steps)

    assert mean_ms(False) == pytest.approx(0.8)
    assert 0.8 < mean_ms(True) <= CONFIG.gamma_ms < CONFIG.tbt_slo_ms


def test_alone_it_runs_chunks_that_are_worth_their_pass() -> None:
    """A pass of 150 ms and 1 ms a row: 48 rows are what the SLO of 200 ms leaves."""

    def affine(tokens: int, context: int) -> float:
        return 150.0 + tokens

    made = scheduler(job(SPEC, 1, 500, chunk=48), job(SPEC, 2, 500, chunk=48))
    assert granted(made.plan(0.0, affine)) == [(1, 48)]
    made = scheduler(job(SPEC, 1, 20, chunk=48), job(SPEC, 2, 500, chunk=48))
    assert granted(made.plan(0.0, affine)) == [(1, 20)]
    beside = scheduler(job(SPEC, 1, 500, chunk=48), job(DECODE, 2, 9, session="other"))
    assert granted(beside.plan(0.0, affine)) == [(2, 1)]


def test_the_backlog_by_shape_is_that_of_the_queue() -> None:
    jobs = [job(SPEC, n, 1 + n % 3, context=n % 2) for n in range(9)]
    made = scheduler(*jobs, job(DECODE, 50, 9))
    assert sum(made.backlog("s", ()).values()) == 9
    made.submit(job(SPEC, 10, 4))
    made.remove(jobs[0])
    made.ran(jobs[1], 1, 0.0)
    expected = Counter((j.remaining, j.context) for j in made.jobs(SPEC) if j.node not in (2, 3))
    assert made.backlog("s", (2, 3)) == expected
    assert made.backlog("other", (2, 3)) == made.backlog("s", ())
    assert sum(made.backlog("s", ()).values()) == len(made.jobs(SPEC))


def test_of_jobs_with_the_same_next_page_one_runs() -> None:
    page, other = b"page", b"other"
    made = scheduler(
        *[job(ROOT, n, 500, page=page, session=f"s{n}") for n in range(3)],
        job(ROOT, 3, 500, page=other, session="s3"),
        job(ROOT, 4, 500, session="s4"),
        job(ROOT, 5, 500, page=page, context=7, session="s5"),  # it has most of that page
    )
    plan = made.plan(0.0, instant)
    assert [one.node for one, _ in plan.items] == [5, 3, 4]
