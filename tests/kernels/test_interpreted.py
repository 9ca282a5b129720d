"""Every Triton kernel on the CPU, under Triton's interpreter: the tests of device/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkserve.kernels.compile import kernels

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton")


DEVICE = Path("tests") / "kernels" / "device"
ENGINE = [str(DEVICE / f"test_{name}.py") for name in ("engine", "exact", "recording")]


def run(tmp_path: Path, *arguments: str) -> set[str]:
    """Run tests of the folder in a process of its own; the kernels that it launched."""
    place = tmp_path / "launched"
    # The limit is that of the test which asks: a session takes a minute here.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout=0", *arguments]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "KERNELS_LAUNCHED": str(place),
    }
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return set(place.read_text().split())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some three minutes each, beside another worker
def test_every_kernel_under_the_interpreter(tmp_path: Path) -> None:
    """A sample of the grid; none of the kernels that a scan of the package finds is left out."""
    rest = (f"--ignore={path}" for path in ENGINE)
    assert run(tmp_path, str(DEVICE), *rest) == {kernel.name for kernel in kernels()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_engine_under_the_interpreter(tmp_path: Path) -> None:
    """Apart from the kernels alone, so that two workers share the minutes that both take."""
    assert run(tmp_path, *ENGINE)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_whole_grid(tmp_path: Path) -> None:
    run(tmp_path, str(DEVICE), "-m", "long")
