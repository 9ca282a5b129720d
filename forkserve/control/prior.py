"""Which branch was taken before, by role: a decaying count-min sketch of one session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from forkserve.errors import ConfigError

__all__ = ["BranchPrior"]

_RESCALE = 1e12  # largest weight of a new observation before all counters are scaled down
_FORGET = 1e-9  # a counter this small in today's units is dropped


class BranchPrior:
    """Re-ranks declared branches by how often this session took them; it never adds one.

    width, depth: counters per row and rows of the sketch (memory is at most width * depth
    counters; only touched ones are stored).  decay: factor on old counts at each observation.
    Cells are chosen by blake2b, so two processes agree.  One object per session.
    """

    def __init__(self, width: int, depth: int, decay: float) -> None:
        if width < 1 or depth < 1 or not 0 < decay <= 1:
            raise ConfigError(
                f"prior width={width} and depth={depth} must be >= 1, decay={decay} in (0, 1]"
            )
        self._width = width
        self._depth = depth
        self._decay = decay
        self._cells: dict[int, float] = {}
        # Instead of scaling every counter down at each observation, new ones weigh more.
        self._unit = 1.0

    def __len__(self) -> int:
        """Counters in use."""
        return len(self._cells)

    def observe(self, role: str, branch: str) -> None:
        """A parent of this role continued with this branch."""
        self._unit /= self._decay
        if self._unit > _RESCALE:
            scaled = ((cell, value / self._unit) for cell, value in self._cells.items())
            self._cells = {cell: value for cell, value in scaled if value > _FORGET}
            self._unit = 1.0
        for cell in self._cells_of(role, branch):
            self._cells[cell] = self._cells.get(cell, 0.0) + self._unit

    def estimate(self, role: str, branch: str) -> float:
        """Decayed count of a branch; never below the true one, the latest counts 1."""
        return min(self._cells.get(c, 0.0) for c in self._cells_of(role, branch)) / self._unit

    def rank(self, role: str, branches: Sequence[str]) -> dict[str, float]:
        """Weights of the given branches, heaviest first, summing to 1; ties keep their order.

        Every count starts at 1: an empty prior is uniform, and no branch is ruled out.
        """
        counts = {branch: 1.0 + self.estimate(role, branch) for branch in branches}
        total = sum(counts.values())
        order = sorted(counts, key=lambda branch: -counts[branch])
        return {branch: counts[branch] / total for branch in order}

    def _cells_of(self, role: str, branch: str) -> list[int]:
        """One cell per row, by double hashing."""
        role_bytes = role.encode("utf-8", "surrogatepass")  # names may come from a model
        # The role's length keeps ("a", "bc") apart from ("ab", "c").
        key = (
            len(role_bytes).to_bytes(8, "little")
            + role_bytes
            + branch.encode("utf-8", "surrogatepass")
        )
        digest = hashlib.blake2b(key, digest_size=16).digest()
        first = int.from_bytes(digest[:8], "little")
        step = int.from_bytes(digest[8:], "little") | 1
        return [
            row * self._width + (first + row * step) % self._width for row in range(self._depth)
        ]
