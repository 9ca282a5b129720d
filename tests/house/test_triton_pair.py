"""`make triton` runs with the pair that it is for, or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "triton_pair.sh"
PAIR = ("torch", "triton")


def test_another_pair_is_refused() -> None:
    try:
        here = [f"{name}=={version(name)}" for name in PAIR]
    except PackageNotFoundError as error:
        pytest.skip(str(error))
    wanted = [re.search(rf"{name}==[\d.]+", SCRIPT.read_text()).group() for name in PAIR]  # type: ignore[union-attr]
    assert here != wanted
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        check=False,
        env={**os.environ, "FORKSERVE_TRITON_VENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.split()[:2] == here
    assert done.stderr.strip() == f"wanted: {' '.join(wanted)}"


def test_the_oldest_pair_is_the_one_that_is_promised() -> None:
    """By the page for users, and by the lower bound of the development tools."""
    text = SCRIPT.read_text()
    assert "triton==3.6." in text
    assert '"triton>=3.6;' in (ROOT / "pyproject.toml").read_text()
    assert "(2.11 or later)" in (ROOT / "docs" / "kernels.md").read_text()
    assert "torch==2.11." in text
