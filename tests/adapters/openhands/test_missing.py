"""Without the SDK, and on any Python: importable, and what is asked for says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forkserve.errors import MissingExtra
from tests.adapters.openhands.conftest import SDK


@pytest.mark.skipif(SDK, reason="the SDK is installed here")
def test_what_is_missing_is_named() -> None:
    import forkserve.adapters.openhands as module

    with pytest.raises(MissingExtra, match=r"Python 3.12 or newer.*pip install .*\[openhands\]"):
        module.OpenHandsAdapter  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        module.Other  # noqa: B018


def test_importing_loads_no_framework() -> None:
    program = (
        "import sys, forkserve.adapters.openhands, forkserve.adapters.openhands.bridge\n"
        "assert not {'openhands', 'litellm'} & set(sys.modules), 'a framework was loaded'"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
