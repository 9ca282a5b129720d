"""Each benchmark runs in its quick form and says what it promises to say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NEED_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
NAMES = ["fork", "tick", "pages", "decorator", "fanout", "ttft", "turns", "speed"]
KEYS = {"name", "title", "tables", "targets", "notes", "others_cpu", "wall_s", "quick"}
KEYS |= {"command", "date", "commit", "machine", "versions"}


def kept() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*") if path.is_file()}


def quick(tmp_path: Path, *names: str) -> list[dict[str, Any]]:
    file = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *names, "--quick", "--json", str(file)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(file.read_text())
    return results


def check(result: dict[str, Any], name: str) -> None:
    assert result.keys() == KEYS
    assert (result["name"], result["quick"]) == (name, True)
    assert result["tables"]
    for table in result["tables"]:
        assert table["rows"], table["title"]
        assert all(list(row) == table["columns"] for row in table["rows"])
    for target in result["targets"]:
        assert target["met"] in (True, False, None)
    assert result["machine"]["cores"] >= 1
    assert "python" in result["versions"]


@pytest.mark.parametrize("name", NAMES[:4])
def test_control_plane(tmp_path: Path, name: str) -> None:
    before = kept()
    (result,) = quick(tmp_path, name)
    check(result, name)
    assert kept() == before, "a quick run must not overwrite results"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[4:])
def test_on_a_tiny_model(tmp_path: Path, name: str) -> None:
    """No weights are needed: the quick form writes a random checkpoint of its own."""
    for module in NEED_TORCH:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    before = kept()
    (result,) = quick(tmp_path, name)
    check(result, name)
    assert kept() == before


def test_attention(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from forkserve.kernels.native.library import available

    if (reason := available()) is not None:
        pytest.skip(reason)
    before = kept()
    (result,) = quick(tmp_path, "attention")
    check(result, "attention")
    assert kept() == before


def test_pages_are_exact_even_in_the_quick_form(tmp_path: Path) -> None:
    (result,) = quick(tmp_path, "pages")
    assert [t["value"] for t in result["targets"] if "design" in t["what"]] == [0]


def test_an_unknown_name_is_refused() -> None:
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["nothing"])
    assert stop.value.code == 2
