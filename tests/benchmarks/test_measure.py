"""Rounds are taken until enough of them were quiet."""

from __future__ import annotations

import os

import pytest

from benchmarks import measure


class Machine:
    """A clock that rounds move, and what all processes have used of its cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure, "_own_s", lambda: 0.0)
        monkeypatch.setattr(measure, "_busy_s", lambda: self.busy)

    def work(self, wall: float, others: float) -> None:
        """Time goes by, of which others take a share of all cores."""
        self.now += wall
        self.busy += wall * others * (os.cpu_count() or 1)


def test_short_rounds_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def once(number: int) -> int:
        machine.work(0.1, 0.02)
        return number

    found = measure.repeat(once, 5, budget_s=60)
    assert found.values == [0, 1, 2, 3, 4, 5]
    assert (found.others, found.quiet) == (0.02, "6 of 6")
    assert machine.now < 1


def test_rounds_beside_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def once(number: int) -> int:
        machine.work(1.0, 0.5 if number < 4 else 0.0)
        return number

    found = measure.repeat(once, 3, budget_s=60)
    assert (found.values, found.others, found.quiet) == ([4, 5, 6], 0, "3 of 7")


def test_a_machine_that_is_never_quiet_ends_with_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    found = measure.repeat(lambda number: machine.work(1.0, 0.5), 3, budget_s=5)
    assert (len(found.values), found.others, found.quiet) == (6, 0.5, "0 of 6")
