"""The cold check on logits: what counts as equal, as a near-tie, and as different."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forkserve.cli.identity import TOLERANCE, Committed, check_cold
from forkserve.config import ForkServeConfig
from forkserve.engine.sampling import sample
from forkserve.types import Batch, BatchResult, SampleSpec, SamplingParams, WorkResult

VOCAB = 16
HISTORY = [1, 2, 3, 4, 5, 6]
DRAW = SamplingParams(temperature=0.7)


class Table:
    """A backend whose logits after position p are a fixed row."""

    def __init__(self, rows: dict[int, list[float]]) -> None:
        self.config = ForkServeConfig(page_size=4, capacity_pages=4)
        self.info = SimpleNamespace(dtype="float32", extra={})
        self.rows = rows
        self.passes: list[tuple[int, int, bool]] = []

    def execute(self, batch: Batch) -> BatchResult:
        (work,) = batch.works
        self.passes.append((work.start, len(work.tokens), work.write is not None))
        wanted = range(work.start, work.start + len(work.tokens))
        rows = [self.rows.get(p, [0.0] * VOCAB) for p in wanted]
        return BatchResult([WorkResult(logits=np.array(rows, np.float32))])


def row(*pairs: tuple[int, float]) -> list[float]:
    values = [0.0] * VOCAB
    for token, logit in pairs:
        values[token] = logit
    return values


def check(
    rows: dict[int, list[float]], tokens: Sequence[int], params: SamplingParams, seed: int = 0
) -> tuple[Any, Table]:
    backend: Any = Table(rows)
    one = Committed(6 - len(tokens), tuple(tokens), (), params, seed)
    return check_cold(backend, HISTORY, [one]), backend


def test_one_prefill_then_replays() -> None:
    found, backend = check({3: row((5, 9.0)), 4: row((6, 9.0))}, [5, 6], SamplingParams())
    assert (found.checked, found.equal, found.different) == (2, 2, 0)
    assert backend.passes == [(0, 6, True), (3, 2, False)]
    assert found.ok


@pytest.mark.parametrize(
    ("gap", "near"), [(TOLERANCE["float32"] / 2, True), (TOLERANCE["float32"] * 2, False)]
)
def test_greedy_near_tie(gap: float, near: bool) -> None:
    found, _ = check({4: row((6, 5.0), (7, 5.0 + gap))}, [6], SamplingParams())
    assert (found.near_ties, found.different) == (int(near), int(not near))
    assert found.worst == pytest.approx(gap, rel=1e-3)
    assert found.ok is near


def test_choice_is_among_allowed_ids() -> None:
    class Only:
        def allowed(self, generated: Sequence[int]) -> Sequence[int]:
            return (6, 8)

    rows = {4: row((6, 1.0), (7, 9.0))}
    assert check(rows, [6], SamplingParams(constraint=Only()))[0].equal == 1
    assert check(rows, [6], SamplingParams())[0].different == 1


def test_draw_with_the_same_seed() -> None:
    rows = {4: [float(i % 5) for i in range(VOCAB)]}
    logits = np.array(rows[4], np.float32)
    drawn = sample(logits, SampleSpec(DRAW, 3, 5, 0, 0))
    assert check(rows, [drawn], DRAW, seed=3)[0].equal == 1
    found, _ = check(rows, [(drawn + 5) % VOCAB], DRAW, seed=3)
    assert found.different == 1


def test_draw_on_a_border_is_a_near_tie() -> None:
    """The border between two tokens lies just beside the drawn point, on the other side."""
    from forkserve.engine.sampling import uniform

    point = uniform(3, 5)
    first = np.log(point / (1 - point)) * DRAW.temperature
    rows = {4: [-1e9] * VOCAB}
    rows[4][6], rows[4][7] = float(first) + 1e-4, 0.0
    found, _ = check(rows, [7], DRAW, seed=3)  # the cold draw is 6, by a hair
    assert (found.equal, found.near_ties, found.different) == (0, 1, 0)
