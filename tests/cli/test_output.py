"""An output that cannot be written is one line and exit code 2, whatever command wrote it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkserve.cli.record import RunNode, save_run
from forkserve.store import Store

COMMANDS = (
    "--help",
    "--version",
    "tree --help",
    "store --help",
    "tree",
    "tree --json",
    "doctor",
    "demo --backend mock",
    "demo --backend mock --json",
    "store ls",
    "store --json ls",
)
# Without the measurements of `doctor`, which take long.
QUICK = "from forkserve.cli import doctor, main; doctor._COPY_MB = 1; doctor._GEMM = 8; main()"


@pytest.fixture
def full() -> Iterator[int]:
    """A descriptor of a disk that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def call(
    command: str, state: Path, output: int, error: int = subprocess.PIPE, first: str = ""
) -> subprocess.CompletedProcess[str]:
    store = state.parent / "store"
    Store(store).close()
    save_run({}, [RunNode(1, None, "trunk", "committed", 1, 1, "")])
    env = {**os.environ, "FORKSERVE_STORE": str(store), "FORKSERVE_STATE": str(state)}
    words = [sys.executable, "-c", first + QUICK, *command.split()]
    return subprocess.run(words, check=False, env=env, stdout=output, stderr=error, text=True)


def refused(done: subprocess.CompletedProcess[str], why: str) -> None:
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert [line for line in said if line.startswith("Error: ")] == said[-1:]
    assert said[-1].endswith(why)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_full_disk(state: Path, full: int, command: str) -> None:
    refused(call(command, state, full), "No space left on device")


@pytest.mark.parametrize("command", COMMANDS)
def test_closed_pipe(state: Path, unread: int, command: str) -> None:
    refused(call(command, state, unread), "Broken pipe")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_was_closed_before_the_program_began(state: Path, command: str) -> None:
    """`forkserve ... >&-`, and a program without a console: nobody asked to be told."""
    done = call(command, state, subprocess.PIPE, first="import sys; sys.stdout = None; ")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["tree", "store ls", "store verify"])
def test_an_error_output_that_was_closed_before_the_program_began(
    state: Path, command: str
) -> None:
    done = call(command, state, subprocess.PIPE, first="import sys; sys.stderr = None; ")
    assert done.returncode == 0
    assert done.stdout


def test_nothing_can_be_said_at_all(state: Path, full: int) -> None:
    assert call("tree", state, full, full).returncode == 2


def test_the_package_is_the_command() -> None:
    words = [sys.executable, "-m", "forkserve", "--version"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("forkserve, version ")
