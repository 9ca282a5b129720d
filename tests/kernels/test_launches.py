"""Passes of the engine as a GPU would be asked for them, compiled by Triton at their launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkserve.kernels.compile import kernels

for _needed in ("triton", "transformers", "tokenizers"):
    pytest.importorskip(_needed)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_90"])
def test_every_launch_of_a_pass_compiles(target: str, tmp_path: Path) -> None:
    """With what Triton makes of the arguments: no kernel is left out, and none spills registers.

    The cache is the test's own, so that each is compiled, whatever was compiled before.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.absent_gpu", target],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said["compiled"]) == {kernel.name for kernel in kernels()}
    assert said["spilled"] == []
