"""The branch that a decorated node gets as `fork`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forkserve.adapters.langgraph.registry import Fork, Registry, Run
from forkserve.adapters.langgraph.state import Ref
from forkserve.branch import Branch
from forkserve.control.generation import Generation
from forkserve.types import SamplingParams, Tokens, derive_seed

__all__ = ["NodeBranch"]


class NodeBranch(Branch):
    """A `forkserve.Branch` that knows its place in the graph.

    role: trunk, branch or join.  name: of the node.  index: place among the Sends of its step, or
    None.  attempt: 1 on the first run of the node, 2 on its first retry.  state: what the node got.

    Branches that it forks are its own: at the end of the run those that were not committed are
    aborted.
    """

    def __init__(
        self,
        registry: Registry,
        run: Run,
        fork: Fork,
        *,
        role: str,
        state: Any,
        index: int | None = None,
        attempt: int = 1,
        step: int = 0,
    ) -> None:
        super().__init__(fork.live.session, fork.node)
        self.role = role
        self.state = state
        self.index = index
        self.attempt_number = attempt
        self.base = fork.base
        self._registry = registry
        self._run = run
        self._fork = fork
        self._step = step
        self._draws = 0
        self._decision: Any = None  # of a join

    @property
    def ref(self) -> Ref:
        """Where it is now, as plain JSON for the state or a `send`.

        A trunk node that has added nothing is still where it began.
        """
        tip = self._last()
        if self.role != "branch" and tip.length == self.base["length"]:
            return self.base
        fork = self._fork
        branch = (fork.branch or self.id) if self.role == "branch" else 0
        return self._registry.ref(fork.live, tip.id, branch=branch, index=self.index)

    @property
    def added(self) -> int:
        """Tokens that this node has added so far."""
        return self._last().length - self.base["length"]

    def fork(self, name: str = "", text: str | Tokens = ()) -> Branch:
        """A branch of this one; see `forkserve.Branch.fork`.  Aborted at the end of the run."""
        child = super().fork(name, text)
        self._run.scratch.append((self._fork.live, child.id))
        return child

    def hint(self, text: str | Tokens, *, t_idle_ms: float = 1e9) -> None:
        """A branch will begin with `text`: prefill it now, while this node waits for a tool.

        The ``fs.send(..., text=text)`` that leaves from here takes it over.  It is droppable: the
        engine may refuse it, and only the time is lost.
        """
        # Where `ref` says it is: a trunk node that adds nothing leaves no node of its own.
        self._registry.hint(self._run, self._fork.live, self.ref["node"], text, t_idle_ms)

    def _start(self, max_tokens: int, params: SamplingParams) -> Generation:
        # Lines are numbered in the order in which threads arrive; the seed must not depend on it.
        if params.seed is None:
            self._draws += 1
            where = (self._step, self.name, -1 if self.index is None else self.index)
            path = (*where, self.attempt_number, self._draws)
            params = replace(params, seed=derive_seed(self._fork.live.seed, *path))
        return super()._start(max_tokens, params)
