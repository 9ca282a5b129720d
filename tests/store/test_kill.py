"""Kill -9 at every step of commit, publish, gc, migrate and import, and at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkserve.store import faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # minutes beside a dozen other programs
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]


def run(folder: Path, mode: str, rounds: int) -> dict[str, int]:
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-m", "store.killer", str(folder), mode, str(rounds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    killed: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return killed


def test_killed_at_every_step_nothing_committed_is_lost(tmp_path: Path) -> None:
    killed = run(tmp_path, "points", 2)
    assert set(killed) == set(faults.POINTS), "a step was never reached"


def test_killed_at_any_moment_two_hundred_times(tmp_path: Path) -> None:
    assert run(tmp_path, "random", 200)["random"] > 100
