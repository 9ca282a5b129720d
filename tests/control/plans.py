"""Candidates and plans for the tests of the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forkserve.config import ForkServeConfig
from forkserve.control.candidates import Candidate
from forkserve.control.planner import Load, Plan, Planner, PoolView
from forkserve.types import WorkKind

CONFIG = ForkServeConfig()  # gamma 20 ms, lambda 4, P 16, c_spec 512, TTFT SLO 200 ms
ROOMY = PoolView(10_000, 10_000, 1.0)


def linear(ms_per_token: float) -> Callable[[int, int], float]:
    return lambda tokens, context: ms_per_token * tokens


def branch(node: int = 2, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "session": "s", "node": node, "parent": 1, "branch": f"b{node}", "generation": 0,
        "tenant": "t", "known": 64, "guess": 0, "p": 1.0, "q": 0.9, "schema_stable": True,
        "t_idle_ms": 1000.0, "context": 1024,
    }  # fmt: skip
    return Candidate(**{**fields, **changes})


def plan(
    *candidates: Candidate,
    pool: PoolView = ROOMY,
    ms: float = 0.1,
    config: ForkServeConfig = CONFIG,
    speculating: dict[tuple[str, int], int] | None = None,
    load: Load = Load(),  # noqa: B008
) -> Plan:
    planner = Planner(config, linear(ms))
    return planner.plan(candidates, pool, speculating=speculating or {}, load=load)


def admitted(answer: Plan) -> list[tuple[int, WorkKind, int]]:
    return [(a.candidate.node, a.kind, a.tokens) for a in answer.admitted]


def reasons(answer: Plan) -> list[tuple[int, str, int]]:
    return [(r.candidate.node, r.reason, r.tokens) for r in answer.refused]
