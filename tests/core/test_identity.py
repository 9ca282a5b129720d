"""Output identity: whatever is done to the tree, committed text goes on as a cold engine's would.

Schedules of every verb on tiny pools (8 to 24 pages in random order, free slots poisoned, batches
checked against the backend's contract), with a naive model of the token tree beside them and
`check()` after every step.  A Hypothesis state machine draws and shrinks them; a plain random
driver with weights goes deeper in the same time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .driver import play, schedule, shrink
from .schedules import Schedules

DEEP = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 1
EXAMPLES = 420 * DEEP  # of each of the five settings: 2,100 schedules by Hypothesis
SEEDS = 40 * DEEP  # of each of 20 blocks: 800 longer ones by the driver
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"tail": "auto"},
    "pack": {"tail": "pack"},
    "freeze": {"tail": "freeze"},
    "no_index": {"tail": "auto", "prefix_index": False},
    "odd": {"tail": "auto", "page_size": 3, "max_batch_works": 2, "max_queue": 3},
}


def machine(name: str) -> Any:
    """The machine under one setting, so that workers can share the schedules."""
    kind = type(name, (Schedules,), {"fixed": SETTINGS[name]})
    case = kind.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestAuto = machine("auto")
TestPack = machine("pack")
TestFreeze = machine("freeze")
TestNoIndex = machine("no_index")
TestOddPages = machine("odd")


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("setting", SETTINGS)
def test_random_schedules(setting: str, block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        begin, steps = schedule(seed, 60)
        try:
            play(SETTINGS[setting], begin, steps)
        except Exception as error:
            short = shrink(SETTINGS[setting], begin, steps, error)
            lines = "\n".join(f"    {name}({args})" for name, args in short)
            raise AssertionError(f"seed {seed}, {begin}\n{lines}") from error
