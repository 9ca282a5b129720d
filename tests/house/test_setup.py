"""`make PYTHON=...` makes .venv with that interpreter, or says that another one is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", "scripts/setup.sh")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout whose .venv is up to date, and of a Python that is nowhere else."""
    (tmp_path / "scripts").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.11.0 in /elsewhere\n")
    python.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    return tmp_path


def setup(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHON" and not k.startswith("MAKE")}
    command = ["make", "-C", str(clone), "setup", *arguments]
    return subprocess.run(command, check=False, env=kept | env, capture_output=True, text=True)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_another_interpreter_is_not_ignored(clone: Path, by: str) -> None:
    if by == "argument":
        done = setup(clone, f"PYTHON={sys.executable}")
    else:
        done = setup(clone, PYTHON=sys.executable)
    assert done.returncode == 2
    assert "has Python 3.11.0 in /elsewhere, but PYTHON=" in done.stderr
    assert f"is {'.'.join(map(str, sys.version_info[:3]))} in {sys.base_prefix}" in done.stderr
    assert "Remove .venv" in done.stderr


def test_the_same_one_is_fine_by_any_name(clone: Path) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    for name in (sys.executable, str(base) if base.exists() else sys.executable):
        done = setup(clone, f"PYTHON={name}")
        assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_asked_without_the_name(clone: Path) -> None:
    done = setup(clone)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_does_not_run(clone: Path) -> None:
    done = setup(clone, "PYTHON=/no/such/python")
    assert done.returncode == 2
    assert "'/no/such/python' does not run" in done.stderr
