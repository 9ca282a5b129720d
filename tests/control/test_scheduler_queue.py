"""The scheduler's queue: bounds, cancelling, invalidation."""

from __future__ import annotations

import pytest

from forkserve.control.scheduler import Job
from forkserve.errors import AdmissionRefused, ConfigError

from .jobs import DECODE, ROOT, SPEC, TAIL, instant, job, run, scheduler

# -- the queue -------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_speculation_never_fills_it_for_committed_work() -> None:
    made = scheduler(job(SPEC, 1, 5), job(SPEC, 2, 5), max_queue=2)
    with pytest.raises(AdmissionRefused, match="2 jobs wait") as refused:
        made.submit(job(SPEC, 3, 5))
    assert refused.value.reason == "queue_full"
    made.submit(job(TAIL, 4, 5))
    made.submit(job(DECODE, 5, 5))
    with pytest.raises(AdmissionRefused):
        made.submit(job(ROOT, 6, 5))
    assert len(made) == 4


@pytest.mark.parametrize("bad", [job(TAIL, 1, 0), job(SPEC, 1, 5, chunk=0)])
def test_empty_jobs_are_refused(bad: Job) -> None:
    with pytest.raises(ConfigError, match="node 1 of session 's'"):
        scheduler(bad)


def test_a_job_is_queued_once() -> None:
    made = scheduler(job(TAIL, 1, 5))
    with pytest.raises(ConfigError):
        made.submit(made.jobs()[0])


def test_remove_and_cancel() -> None:
    tail, spec, other = job(TAIL, 1, 5), job(SPEC, 1, 5), job(SPEC, 2, 5)
    foreign = job(SPEC, 1, 5, session="x")
    made = scheduler(tail, spec, other, foreign)
    assert other in made
    assert made.remove(other)
    assert other not in made
    assert not made.remove(other)
    assert made.cancel_node("s", 1) == [tail, spec]
    assert made.cancel_node("s", 1) == made.cancel_node("nobody", 1) == []
    assert made.cancel_session("x") == [foreign]
    assert made.cancel_session("x") == []
    assert len(made) == 0
    assert not made._nodes
    assert not made._programs
    assert not made._spec


def test_a_commit_drops_only_stale_speculation_under_its_own_node() -> None:
    stale = job(SPEC, 2, 5, parent=1, generation=0)
    fresh = job(SPEC, 3, 5, parent=1, generation=1)
    elsewhere = job(SPEC, 4, 5, parent=9, generation=0)
    foreign = job(SPEC, 2, 5, parent=1, generation=0, session="x")  # B1
    tail = job(TAIL, 5, 5, parent=1)
    made = scheduler(stale, fresh, elsewhere, foreign, tail)
    assert made.invalidate("s", 1, 1) == [stale]
    assert made.jobs() == [fresh, elsewhere, foreign, tail]


def test_work_that_was_cancelled_while_it_ran_is_billed_all_the_same() -> None:
    made = scheduler(job(SPEC, 1, 100))
    plan = made.plan(0.0, instant)
    made.cancel_session("s")
    run(made, plan)
    assert made.meter.charged("t") == 25.0
    assert len(made) == 0


def test_running_more_than_is_left_is_an_error() -> None:
    made = scheduler(job(TAIL, 1, 5))
    for tokens in (6, -1):
        with pytest.raises(ConfigError, match="5 tokens left"):
            made.ran(made.jobs()[0], tokens, 0.0)


def test_decode_share_is_about_other_sessions_and_fades() -> None:
    made = scheduler(job(DECODE, 1, 5, session="a"))
    assert made.decode_share(0.0, "b") == 0.0
    run(made, made.plan(0.0, instant), 100.0)
    assert made.decode_share(100.0, "b") == 1.0
    assert made.decode_share(100.0, "a") == 0.0
    assert made.decode_share(350.0, "b") == 0.75
    assert made.decode_share(1100.0, "b") == 0.0
    assert not made._decoded_ms


def test_who_was_admitted_is_queued_again_whoever_came_meanwhile() -> None:
    spec = job(SPEC, 1, 10)
    made = scheduler(spec, job(TAIL, 2, 10, session="u"), max_queue=1)
    made.remove(spec)
    with pytest.raises(AdmissionRefused, match="queue_full"):
        made.submit(spec)
    made.submit(spec, again=True)
    assert spec in made
