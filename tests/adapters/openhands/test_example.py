"""The example runs, and shows what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.adapters.openhands.conftest import REASON, SDK

if not SDK:
    pytest.skip(REASON, allow_module_level=True)


def test_step(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "openhands_step.py"
    runpy.run_path(str(example))["main"]("mock")
    out = capsys.readouterr().out
    assert "answer: It stands on shelf 12." in out
    assert "fork:   It is not on loan." in out
    assert "back:   Shelf 12, on the left." in out
    rows, sessions = map(int, re.findall(r"(\d+) rows for both, in (\d+) session", out)[0])
    assert rows < 150
    assert sessions == 1
    assert int(re.findall(r"(\d+) were speculated on", out)[0]) > 20
