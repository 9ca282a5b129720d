"""The command as a user calls it, with the state file of a test of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forkserve.cli import main

Run = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the last run is kept."""
    path = tmp_path / "state" / "last-run.json"
    monkeypatch.setenv("FORKSERVE_STATE", str(path))
    return path


@pytest.fixture
def run(state: Path) -> Run:
    """run("demo", "--json") -> result; an exception that is no exit fails the test."""

    def call(*arguments: str) -> Result:
        result = CliRunner().invoke(main, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def mock_demo(run: Run) -> Callable[..., dict[str, Any]]:
    """The demo on the mock, as its JSON."""

    def call(*arguments: str) -> dict[str, Any]:
        result = run("demo", "--backend", "mock", "--json", *arguments)
        assert result.exit_code == 0, result.output
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    return call
