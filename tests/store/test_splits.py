"""SmolLM2, killed after each token: another process goes on with the same logits, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forkserve.kernels.native import library

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(library.available() is not None, reason=str(library.available())),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]


def run(folder: Path, what: str) -> tuple[int, int]:
    """Exit code and pid of one program, which has ended."""
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-m", "store.splits", what, str(folder)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors[-4000:]
    return process.returncode, process.pid


def test_every_split_of_smollm2_goes_on_with_the_same_logits(tmp_path: Path) -> None:
    code, writer = run(tmp_path, "write")
    assert code == -signal.SIGKILL
    assert not list(tmp_path.rglob("[0-9]/*-shm"))
    assert run(tmp_path, "resume")[0] == 0
    whole = np.load(tmp_path / "whole.npz")
    tokens, logits = whole["tokens"].tolist(), whole["logits"]
    count = len(tokens)
    assert count == 8
    assert logits.shape[0] == count
    assert logits.dtype == np.float32
    for k in range(count + 1):
        split = np.load(tmp_path / f"{k}.npz")
        assert split["owners"].tolist() == [writer], "the owner was the process that was killed"
        assert split["restored"] == 256
        assert split["before"].tolist() == tokens[:k]
        assert split["tokens"].tolist() == tokens[k:]
        assert split["logits"].tobytes() == logits[k:].tobytes(), f"other logits after token {k}"
        if k < count:
            assert split["computed"] == 12 + k, "the whole chunk came from the disk"
