"""The searches: breadth first, depth first, beam, best of n, Monte Carlo; each sync and async.

All take the engine, a `Task`, the problem as text, and the fields of `Options` as keywords.  They
raise ConfigError (settings), TaskError (what a task returned), UnreadableReply, what the task
raises, and what the engine's verbs raise.  However they end, every branch that they made is gone.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal

from forkserve.adapters.tot.driving import Plan, twins
from forkserve.adapters.tot.mcts import mcts as mcts_strategy
from forkserve.adapters.tot.options import options as settings
from forkserve.adapters.tot.run import Run, Strategy
from forkserve.adapters.tot.strategies import beam as beam_strategy
from forkserve.adapters.tot.strategies import bfs, dfs
from forkserve.adapters.tot.task import Task
from forkserve.api import Engine
from forkserve.errors import ConfigError

__all__ = [
    "abeam",
    "abest_of_n",
    "amcts",
    "atot_bfs",
    "atot_dfs",
    "beam",
    "best_of_n",
    "mcts",
    "tot_bfs",
    "tot_dfs",
]

Select = Literal["greedy", "sample"]


def _plan_tot_bfs(
    engine: Engine,
    task: Task,
    problem: str,
    *,
    beam: int = 5,
    select: Select = "greedy",
    **options: Any,
) -> Plan:
    """Breadth first: of all thoughts of a level the best `beam` are kept, by their own value.

    select: "greedy" takes the greatest values, equal ones in the order in which they were read;
    "sample" draws in proportion to the values (which must not be negative), none twice.
    An answer that is kept leaves the beam and is not expanded.  **options: fields of `Options`.
    """
    return _run(engine, task, problem, options), _bfs(beam, select)


def _plan_tot_dfs(
    engine: Engine,
    task: Task,
    problem: str,
    *,
    prune: float | None = None,
    branch: int | None = None,
    answers: int = 1,
    **options: Any,
) -> Plan:
    """Depth first, the best child first; ends with so many `answers`.

    prune: children worth less are given up.  branch: children that are followed, at most.
    A subtree without an answer gives its pages back when it is left.
    """
    return _run(engine, task, problem, options), _dfs(prune, branch, answers)


def _plan_beam(engine: Engine, task: Task, problem: str, *, width: int = 5, **options: Any) -> Plan:
    """Beam search: as `tot_bfs`, but by the mean value of the whole path.

    Answers stay in the beam and compete with what is still being thought.  With
    ``generate="sample", evaluate="logprob"`` it needs no evaluation: the values are the model's own
    log-probabilities.
    """
    return _run(engine, task, problem, options), _beam(width)


def _plan_best_of_n(
    engine: Engine, task: Task, problem: str, *, n: int = 8, **options: Any
) -> Plan:
    """Sample n whole answers and let a judge choose.

    The judge is what `evaluate` says: "value" marks each answer, "vote" sees them all in one
    ballot, "logprob" takes the model's own certainty.  With ``first=True`` (the default) an answer
    that `Task.check` calls right wins without a judge.
    """
    return _run(engine, task, problem, _samples(n, options)), bfs(1, "greedy")


def _plan_mcts(
    engine: Engine,
    task: Task,
    problem: str,
    *,
    iterations: int = 20,
    exploration: float = math.sqrt(2),
    **options: Any,
) -> Plan:
    """Monte Carlo tree search: `iterations` expansions, each at the thought that UCB1 leads to.

    exploration: weight of what was seldom visited; 0 goes where the mean reward is greatest.
    Nothing is aborted but wrong answers before the search ends, since any thought may be visited
    again.
    """
    return _run(engine, task, problem, options), _mcts(iterations, exploration, options)


tot_bfs, atot_bfs = twins("tot_bfs", _plan_tot_bfs)
tot_dfs, atot_dfs = twins("tot_dfs", _plan_tot_dfs)
beam, abeam = twins("beam", _plan_beam)
best_of_n, abest_of_n = twins("best_of_n", _plan_best_of_n)
mcts, amcts = twins("mcts", _plan_mcts)


def _run(engine: Engine, task: Task, problem: str, options: dict[str, Any]) -> Run:
    if not isinstance(problem, str):
        raise ConfigError(f"problem={problem!r:.200} must be text")
    return Run(engine, task, problem, settings(engine, task, options))


def _bfs(width: int, select: Select) -> Strategy:
    if select not in ("greedy", "sample"):
        raise ConfigError(f"select={select!r} must be 'greedy' or 'sample'")
    return bfs(_count("beam", width), select)


def _beam(width: int) -> Strategy:
    return beam_strategy(_count("width", width))


def _dfs(prune: float | None, branch: int | None, answers: int) -> Strategy:
    if prune is not None and (not isinstance(prune, Real) or math.isnan(prune)):
        raise ConfigError(f"prune={prune!r} must be a number")
    if branch is not None:
        _count("branch", branch)
    return dfs(prune, branch, _count("answers", answers))


def _mcts(iterations: int, exploration: float, options: dict[str, Any]) -> Strategy:
    if options.get("evaluate") == "vote":
        raise ConfigError(
            "mcts needs values that can be compared across the tree; evaluate='vote' compares "
            "siblings only"
        )
    if not isinstance(exploration, Real) or not 0 <= exploration < math.inf:
        raise ConfigError(f"exploration={exploration!r} must be a number >= 0")
    return mcts_strategy(_count("iterations", iterations), exploration)


def _samples(n: int, options: dict[str, Any]) -> dict[str, Any]:
    fixed = {"generate": "sample", "n_generate": _count("n", n), "depth": 1}
    if given := sorted(fixed.keys() & options.keys()):
        raise ConfigError(f"best_of_n sets {', '.join(given)} itself; say n=")
    return {**options, **fixed}


def _count(name: str, value: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number >= 1")
    return int(value)
