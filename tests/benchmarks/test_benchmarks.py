"""Each benchmark runs in its quick form and says what it promises to say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NEED_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
PLAIN = ["fork", "tick", "pages", "decorator", "trees", "trajectories"]
ON_A_MODEL = ["variants", "fanout", "ttft", "turns", "speed", "store"]
STRICT = ConfigDict(extra="forbid", strict=True)


class TableOf(BaseModel):
    """One question and its rows."""

    model_config = STRICT
    title: str = Field(min_length=1)
    columns: list[str] = Field(min_length=1)
    rows: list[dict[str, str | int | float | None]] = Field(min_length=1)


class TargetOf(BaseModel):
    """One promised number."""

    model_config = STRICT
    what: str = Field(min_length=1)
    wanted: str = Field(min_length=1)
    value: float | None
    met: bool | None
    why: str


class MachineOf(BaseModel):
    """Where it was taken."""

    model_config = STRICT
    cores: int = Field(ge=1)
    threads: int = Field(ge=1)
    system: str = Field(min_length=1)
    cpu: str = Field(min_length=1)
    memory_gb: float = Field(gt=0)


class ResultOf(BaseModel):
    """Schema of a result: nothing may be missing, nothing unknown be there."""

    model_config = STRICT
    name: str = Field(pattern=r"^[a-z_]+$")
    title: str = Field(min_length=1)
    tables: list[TableOf] = Field(min_length=1)
    targets: list[TargetOf]
    notes: list[str]
    others_cpu: float | None = Field(ge=0, le=1)
    wall_s: float = Field(gt=0)
    quick: bool
    command: str = Field(pattern=r"^python -m benchmarks")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")
    commit: str = Field(pattern=r"^([0-9a-f]{40}|unknown)\+?$")
    machine: MachineOf
    versions: dict[str, str]


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
    ResultOf.model_validate_json(json.dumps(result))
    assert (result["name"], result["quick"]) == (name, True)
    assert result["tables"]
    for table in result["tables"]:
        assert table["rows"], table["title"]
        assert all(list(row) == table["columns"] for row in table["rows"])
    for target in result["targets"]:
        assert target["met"] in (True, False, None)
    assert result["machine"]["cores"] >= 1
    assert "python" in result["versions"]


@pytest.mark.parametrize("path", sorted((RESULTS / "cpu").glob("*.json")), ids=lambda p: p.stem)
def test_kept_results_lack_no_field(path: Path) -> None:
    text = path.read_text()
    found = ResultOf.model_validate_json(text)
    assert (found.name, found.quick) == (path.stem, False)
    assert {"python", "numpy"} <= found.versions.keys()
    for table in found.tables:
        assert all(list(row) == table.columns for row in table.rows)
    for field in ResultOf.model_fields:
        with pytest.raises(ValidationError):
            ResultOf.model_validate_json(
                json.dumps({k: v for k, v in json.loads(text).items() if k != field})
            )
    with pytest.raises(ValidationError):
        ResultOf.model_validate_json(json.dumps({**json.loads(text), "more": 1}))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(PLAIN, id="control_plane"),
        pytest.param(ON_A_MODEL, id="on_a_tiny_model", marks=pytest.mark.slow),
    ],
)
def test_quick_forms(tmp_path: Path, names: list[str]) -> None:
    """One process for several: starting it takes longer than most of them.

    No weights are needed: those on a model write a random checkpoint of their own.
    """
    for module in NEED_TORCH if names is ON_A_MODEL else ():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    before = kept()
    for name, result in zip(names, quick(tmp_path, *names), strict=True):
        check(result, name)
        if name == "pages":  # exact even in the quick form
            assert [t["value"] for t in result["targets"] if "design" in t["what"]] == [0]
    assert kept() == before, "a quick run must not overwrite results"


@pytest.mark.parametrize("name", ["attention", "profile"])
def test_native_kernels(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from forkserve.kernels.native.library import available

    if (reason := available()) is not None:
        pytest.skip(reason)
    before = kept()
    (result,) = quick(tmp_path, name)
    check(result, name)
    assert kept() == before


@pytest.mark.parametrize("name", ["trees", "trajectories", "speed", "attention", "variants"])
def test_charts_are_drawn(tmp_path: Path, name: str) -> None:
    """From the kept results, so that they fit what the charts name."""
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    charts = importlib.import_module(f"benchmarks.{name}").CHARTS
    data = json.loads((RESULTS / "cpu" / f"{name}.json").read_text())
    drawn = draw(data, charts, tmp_path / f"{name}.svg").read_text()
    assert "<svg" in drawn
    assert drawn == draw(data, charts, tmp_path / "again.svg").read_text()


def test_kept_results_are_drawn_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as command

    drawn: list[str] = []
    monkeypatch.setattr(command, "plot", lambda name, data, console: drawn.append(data["name"]))
    monkeypatch.setattr(command, "run", None)
    assert command.main(["speed", "trees", "--redraw"]) == 0
    assert drawn == ["speed", "trees"]


def test_without_the_recordings_a_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import recordings, trajectories, trees
    from benchmarks.measure import Options

    monkeypatch.setattr(recordings, "FOLDER", ROOT / "nowhere")
    for module in (trees, trajectories):
        report = module.run(Options())
        assert report.tables == []
        assert "is not there" in report.notes[0]


def test_a_replay_has_the_recorded_prompts() -> None:
    """The conversation at the end is the recorded one, whatever was speculated."""
    from benchmarks.trajectories import WAYS, made_up, parse, replay

    talks = [parse(entry["messages"]) for entry in made_up()]
    found = [replay(talks, True, *way) for way in WAYS.values()]
    assert len({(one.turns, one.tools, one.prompt, one.fresh, one.cache) for one in found}) == 1
    assert found[0].ahead == found[0].used == 0 < found[1].used
    assert found[0].waited == found[1].waited + found[1].used
    assert found[1].ahead == found[1].used <= found[2].ahead


def test_an_unknown_name_is_refused() -> None:
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["nothing"])
    assert stop.value.code == 2
