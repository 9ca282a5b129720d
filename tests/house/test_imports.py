"""What an import costs, what it loads, and which way the layers point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "transformers", "langgraph", "fastapi", "ray", "vllm")

PROBE = """
import sys
before = set(sys.modules)
import {module}
loaded = set(sys.modules) - before
import json
print(json.dumps([len(loaded), [m for m in {heavy!r} if m in loaded]]))
"""


def probe(module: str) -> tuple[int, list[str]]:
    """How many modules an import loads in a fresh interpreter, and the heavy ones of them."""
    code = PROBE.format(module=module, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    count, heavy = json.loads(done.stdout)
    return count, heavy


def test_bare_import_is_fast() -> None:
    """Some milliseconds, since the rest is loaded when it is used; a clock would say less."""
    assert probe("forkserve")[0] < 60


@pytest.mark.parametrize(
    "module",
    [
        "forkserve",
        "forkserve.types",
        "forkserve.tree",
        "forkserve.control",
        "forkserve.engine",
        "forkserve.api",
        "forkserve.session",
        "forkserve.cli",
    ],
)
def test_import_loads_no_optional_part(module: str) -> None:
    assert probe(module)[1] == []


def test_public_names_resolve() -> None:
    """Names in __all__ exist, also those that load on first use."""
    code = "import forkserve\nfor n in forkserve.__all__: getattr(forkserve, n)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_layers_point_down() -> None:
    """The contracts of [tool.importlinter] in pyproject.toml hold."""
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is a development dependency")
    done = subprocess.run(
        [program, "--no-cache", "--no-logo"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
