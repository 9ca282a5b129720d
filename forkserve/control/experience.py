"""What one session has seen of its tools and branches: how long, what text, which way.

One object per session: tool output must not cross sessions or tenants.
"""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.config import ForkServeConfig
from forkserve.control.candidates import NGramResidual
from forkserve.control.prior import BranchPrior
from forkserve.control.timings import IdleTimes
from forkserve.types import Tokens

__all__ = ["UNBOUNDED_MS", "Experience"]

UNBOUNDED_MS = 1e9  # a pause of unknown length


class Experience:
    """Learns from `observe`; answers what `speculate` left open."""

    def __init__(self, config: ForkServeConfig) -> None:
        self._times = IdleTimes(config.idle_quantile)
        self._prior = BranchPrior(config.prior_width, config.prior_depth, config.prior_decay)
        self._texts = NGramResidual(config.ngram_order, config.ngram_tokens, config.q_min)

    def tool_ran(
        self, tool: str, ms: float | None, output: Tokens | None, schema_stable: bool
    ) -> None:
        """A tool took `ms` and returned `output`; free-form output is not learned."""
        if ms is not None:
            self._times.observe(tool, ms)
        if output is not None:
            self._texts.observe(tool, output, schema_stable=schema_stable)

    def head(self, output: Tokens) -> Tokens:
        """The part of an output that is learned: what a store has to keep of it."""
        return output[: self._texts.tokens]

    def took(self, role: str, branch: str) -> None:
        """After a node named `role` the branch `branch` was committed."""
        self._prior.observe(role, branch)

    def pause_ms(self, tool: str | None) -> float:
        """Expected pause while the tool runs."""
        return self._times.expect(tool, UNBOUNDED_MS) if tool is not None else UNBOUNDED_MS

    def output(self, tool: str) -> tuple[tuple[int, ...], float]:
        """How the tool's output will begin, and the probability that it does."""
        return self._texts.predict(tool)

    def priorities(self, role: str, branches: Sequence[str]) -> dict[str, float]:
        """Probabilities of declared branches by how often each was taken after `role`."""
        return self._prior.rank(role, branches)
