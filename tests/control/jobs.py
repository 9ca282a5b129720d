"""Jobs and schedulers for the tests of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forkserve.config import ForkServeConfig
from forkserve.control.fairness import FairMeter
from forkserve.control.scheduler import Job, Scheduler, TickPlan
from forkserve.types import JobClass

DECODE, TAIL, ROOT, SPEC = JobClass
CONFIG = ForkServeConfig()  # B_t 8192, prefill_chunk 2048, gamma 20 ms, TTFT SLO 200 ms, tick 8 ms


def instant(tokens: int, context: int) -> float:
    return 0.0


def linear(ms_per_token: float) -> Callable[[int, int], float]:
    return lambda tokens, context: ms_per_token * tokens


def job(kind: JobClass, node: int, remaining: int, **changes: Any) -> Job:
    fields: dict[str, Any] = {"session": "s", "tenant": "t", "submitted_ms": 0.0}
    if kind is SPEC:
        fields |= {"parent": 0, "chunk": 512, "gain": 10.0, "cost": 1.0}
    return Job(kind=kind, node=node, remaining=remaining, **{**fields, **changes})


def scheduler(*jobs: Job, **settings: Any) -> Scheduler:
    config = CONFIG.replace(**settings)
    made = Scheduler(config, FairMeter(config))
    for one in jobs:
        made.submit(one)
    return made


def run(made: Scheduler, plan: TickPlan, now_ms: float = 0.0) -> None:
    for one, tokens in plan.items:
        made.ran(one, tokens, now_ms)


def granted(plan: TickPlan) -> list[tuple[int, int]]:
    return [(one.node, tokens) for one, tokens in plan.items]
