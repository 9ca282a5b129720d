"""Tree of Thoughts: searches over thoughts whose prompts share what they have in common.

::

    class Names(Task):
        depth = 2

        def prompt(self, role, state):
            return {"propose": "Three ideas:\\n", "value": "From 1 to 10: "}[role]

    result = tot_bfs(engine, Names(), "A name for a boat.\\n", beam=2)
    print(result.text, result.usage)

All requests of a step decode in the same forward passes, and what loses is aborted as soon as it is
known to.  docs/adapters/tot.md is the guide.  The searches follow Yao et al., "Tree of Thoughts"
(2023): stable descending order of values, breadth and depth first.
"""

from __future__ import annotations

from forkserve.adapters.tot.options import Budget, Options
from forkserve.adapters.tot.places import Trunks
from forkserve.adapters.tot.records import Step, Thought, ToTResult
from forkserve.adapters.tot.searches import (
    abeam,
    abest_of_n,
    amcts,
    atot_bfs,
    atot_dfs,
    beam,
    best_of_n,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.adapters.tot.task import State, Task, TaskError, UnreadableReply
from forkserve.adapters.tot.usage import Usage

__all__ = [
    "Budget",
    "Options",
    "State",
    "Step",
    "Task",
    "TaskError",
    "Thought",
    "ToTResult",
    "Trunks",
    "UnreadableReply",
    "Usage",
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
