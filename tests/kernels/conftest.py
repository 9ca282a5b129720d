"""Tests under device/ launch kernels: on a GPU, or on the CPU under Triton's interpreter.

The interpreter must be asked for before the kernels are imported, so `test_interpreted.py` runs
that folder in a process of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from forkserve.engine import MockBackend
    from forkserve.kernels.native.grown_tables import TablePlanner
    from forkserve.types import Batch, BatchResult

ON_DEVICE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if ON_DEVICE else ["device"]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[TablePlanner]:
    """Planners of all mocks: each batch of an engine is compared."""
    # Here, since `make gpu` reads this file where nothing but torch and Triton is installed.
    from forkserve.kernels.native.grown_tables import TablePlanner
    from tests.core.strict import StrictMock

    from .tables import same

    planners: dict[MockBackend, TablePlanner] = {}
    made: list[TablePlanner] = []
    execute = StrictMock.execute

    def spy(self: StrictMock, batch: Batch) -> BatchResult:
        if self not in planners:
            planners[self] = TablePlanner(self.config.page_size, self.window)
            made.append(planners[self])
        if batch.works:
            page = self.config.page_size
            same(planners[self].tables(batch.works), batch.works, page, self.window)
        return execute(self, batch)

    monkeypatch.setattr(StrictMock, "execute", spy)
    return made
