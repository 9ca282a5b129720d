from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OPENHANDS_SUPPRESS_BANNER", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OTEL_SDK_DISABLED", "true")

HERE = Path(__file__).parent
WITHOUT = {"test_trees.py", "test_bridge.py", "test_missing.py"}  # run everywhere
SDK = sys.version_info >= (3, 12) and find_spec("openhands") is not None
REASON = "needs Python 3.12 and the extra `openhands`; scripts/openhands_leg.sh runs these"

if SDK:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import openhands.sdk  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK and what it brings warn of many things, which are theirs to mend."""
    for item in items:
        if item.path.parent == HERE and item.path.name not in WITHOUT:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Any]:
    """An engine, an adapter on it, and a way to make conversations."""
    from tests.adapters.openhands.rigs import Rig

    made = Rig(tmp_path)
    yield made
    made.close()
