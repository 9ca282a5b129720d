"""`make gpu` without a GPU says so; with a fake one all of it runs, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import _within, goals, kernel_tests, summed
from benchmarks.gpu.shapes import AGENTS, FASTTREE, Tree, flat, works_of

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

TRIAL = """
import sys
from pathlib import Path
import benchmarks.gpu.__main__ as program
from benchmarks.gpu.attention import Sizes
from benchmarks.gpu.products import Products
from benchmarks.gpu.__main__ import kernel_tests
from benchmarks.gpu.shapes import Tree
from forkserve.kernels.linear import LinearShape
from forkserve.kernels.tile_attention import TileShape
from tests.kernels.interpreter import patch_once

patch_once()
program.probe = lambda: {"device": "Fake GPU 9000", "torch_device": "cpu", "driver": "1.2"}
sizes = Sizes(
    paged=((1, 20), (2, 40)),
    trees=(Tree((((1, 3), (40, 5)),)), Tree((((1, 2), (20, 3)), ((1,), (30,))))),
    heads=((8, 2),),
    dim=16,
    splits=(32,),
    tuned=(1, 40),
    shapes=(TileShape(4, 2),),
    costs=(0, 4096),
    products=Products(
        weights=((40, 32), (64, 32)), rows=(1, 70), kinds=("bfloat16", "int8"), tuned=(40, 32),
        shapes=(LinearShape(16, 32, 4, 2),), budget_s=0.0,
    ),
    budget_s=0.0,
)
status = program.main(
    sizes=sizes, scale=1e-6, results=Path(sys.argv[1]), tests=tuple(sys.argv[2:])
)
sys.exit(status)
"""


# What ForkServe needs besides; the GPU machine may have none of it.
ABSENT = ("blake3", "gguf", "httpx", "jinja2", "llguidance", "pydantic", "safetensors")
ABSENT += ("sqlite_utils", "tokenizers", "transformers")
BARE = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
"""


def trial(folder: Path, site: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """site: a folder whose sitecustomize.py every Python of the trial runs first."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they may need what is absent
    }
    return subprocess.run(
        [sys.executable, "-c", TRIAL, str(folder), *tests],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@no_gpu
def test_without_a_gpu_nothing_runs() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "No CUDA GPU found (nvidia-smi and torch see none): nothing was run."
    )


@pytest.mark.slow
def test_the_whole_of_it_on_a_fake_gpu(tmp_path: Path) -> None:
    """Torch, Triton, numpy, rich and pytest suffice: tests that need more are skipped."""
    pytest.importorskip("triton")
    site, results = tmp_path / "site", tmp_path / "results"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BARE)
    done = trial(results, site, "-k", "merging or guard or finite")
    assert done.returncode == 0, done.stderr + done.stdout
    (file,) = results.iterdir()
    assert file.name == "fake-gpu-9000.json"
    result = json.loads(file.read_text())
    assert result["tests"]["passed"]
    assert result["tests"]["summary"].startswith("4 passed")
    assert "4 skipped" in result["tests"]["summary"], "modules that need the engine's packages"
    assert {"device", "driver", "versions", "commit", "date"} <= result.keys()
    assert result["versions"]["triton"]
    assert result["ceiling"].keys() == {"copy_gb_s", "gemm_bf16_tflop_s", "launches_us"}
    assert [(r["batch"], r["context"]) for r in result["paged"]] == [(1, 20), (2, 40)]
    assert all(r["share"] == r["gb_s"] / r["copy_gb_s"] for r in result["paged"])
    assert [r["k"] for r in result["trees"]] == [3, 3]
    for row in result["trees"]:
        assert row["over_flat"] == row["flat_ms"] / row["ms"]
        assert row["bound"] in ("memory", "products", "launches")
        assert (row["goal"] == 0.7) == (row["bound"] == "memory")
    assert [r["shape"] for r in result["tuning"]] == ["default", "4w2s"]
    made = [(r["outputs"], r["rows"], r["weights"]) for r in result["products"]]
    assert made == [
        (40, 1, "bfloat16"),
        (40, 1, "int8"),
        (40, 70, "bfloat16"),
        (64, 1, "bfloat16"),
        (64, 1, "int8"),
    ]
    for row in result["products"]:
        assert row["over_torch"] == row["torch_bf16_ms"] / row["ms"]
        assert row["share"] > 0
        assert row["copy_gb_s"] == result["ceiling"]["copy_gb_s"]
    assert [r["shape"] for r in result["shapes"]] == ["default", "16x32 4w2s"] * 2
    assert [r["level_cost"] for r in result["levels"]] == [0, 4096] * 2
    assert all(r["share"] > 0 for r in result["levels"])
    assert result["left_out"] == result["failed"] == []
    assert "kept in" in done.stdout


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with a fake GPU, without tests and tables."""
    pytest.importorskip("triton")
    from benchmarks.gpu import __main__ as module

    fake = {"device": "Fake", "torch_device": "cpu", "driver": "1.2"}
    monkeypatch.setattr(module, "probe", lambda: fake)
    monkeypatch.setattr(module, "kernel_tests", lambda *_: {"passed": False, "summary": "1 failed"})
    return module


def test_failing_kernel_tests_fail_the_command(program: Any, tmp_path: Path) -> None:
    from benchmarks.gpu.attention import Sizes
    from benchmarks.gpu.products import Products

    nothing = Sizes(
        paged=(), trees=(), splits=(), tuned=(1, 1), dim=2, products=Products(rows=(), tuned=(2, 2))
    )
    assert program.main(sizes=nothing, scale=1e-6, results=tmp_path) == 1
    assert json.loads((tmp_path / "fake.json").read_text())["tests"]["summary"] == "1 failed"


def test_what_the_time_did_not_suffice_for_is_said(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row of each table is finished; the tests are cut at half of the time."""
    from benchmarks.gpu import attention, products

    tables = ("paged", "trees", "tuning", "levels", "products", "shapes")
    for name in tables:
        place = products if name in ("products", "shapes") else attention
        rows = [lambda name=name: {"name": name, "goal": None, "k": 0}] * 3
        monkeypatch.setattr(place, name, lambda *_, rows=rows: iter(rows))
    monkeypatch.setattr(program, "LIMIT_S", 0.0)
    monkeypatch.setattr(program, "kernel_tests", kernel_tests)
    assert program.main(scale=1e-6, results=tmp_path) == 1
    result = json.loads((tmp_path / "fake.json").read_text())
    assert sorted(result["left_out"]) == sorted(f"{name} after 1 rows" for name in tables)
    assert [len(result[name]) for name in tables] == [1] * 6
    assert not result["tests"]["passed"]
    assert result["tests"]["summary"] == "stopped after 0 s"


def test_a_row_that_fails_takes_nothing_else_along(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was measured is kept, the failures beside it, and the command fails."""
    from benchmarks.gpu import attention, products

    def row() -> Any:
        return {"goal": None, "k": 0}

    def breaks() -> Any:
        raise RuntimeError("results differ by 0.5 of their norm")

    for name in ("paged", "tuning", "levels", "products", "shapes"):
        place = products if name in ("products", "shapes") else attention
        monkeypatch.setattr(place, name, lambda *_: iter([row]))
    monkeypatch.setattr(attention, "trees", lambda *_: iter([row, breaks, row]))
    monkeypatch.setattr(attention, "tuning", lambda *_: iter([breaks] * 9))
    monkeypatch.setattr(program, "kernel_tests", lambda *_: {"passed": True, "summary": "ok"})
    assert program.main(scale=1e-6, results=tmp_path) == 1
    result = json.loads((tmp_path / "fake.json").read_text())
    said = "RuntimeError: results differ by 0.5 of their norm"
    assert result["failed"] == [
        f"trees, row 2: {said}",
        *(f"tuning, row {i}: {said}" for i in (1, 2, 3)),
    ]
    assert result["left_out"] == ["tuning after 3 rows"]
    assert [len(result[name]) for name in ("paged", "trees", "tuning", "levels")] == [1, 2, 0, 1]


def test_goals_say_how_many_rows_meet_them() -> None:
    paged = [{"share": share, "goal": 0.8} for share in (0.9, 0.7, 0.85)]
    (found,) = goals({"paged": [*paged, {"share": 0.1, "goal": None}]})
    assert (found["value"], found["met"]) == (0.7, False)
    assert (found["rows"], found["rows_that_meet_it"], found["median"]) == (3, 2, 0.85)


STUCK = """
import sys, threading
from pathlib import Path
import benchmarks.gpu.__main__ as program
from benchmarks.gpu import attention

def paged(*_):
    yield lambda: {"goal": None}
    threading.Event().wait()

program.probe = lambda: {"device": "Fake", "torch_device": "cpu", "driver": "1.2"}
program.kernel_tests = lambda *_: {"passed": True, "summary": "ok"}
program.LATE_S = 0.0
attention.paged = paged
program.main(scale=1e-6, results=Path(sys.argv[1]))
"""


def test_a_kernel_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """What there is by then is kept: here the tests, and perhaps a row."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], check=False, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "fake.json").read_text())
    assert result["tests"]["passed"]
    assert result["failed"][0].endswith("did not end in time")


def test_tests_that_are_late_end_with_their_workers() -> None:
    """Also those that hold the output open: nobody waits for them."""
    lasting = "import time; time.sleep(10_000)"
    call = [sys.executable, "-c", lasting]
    code = f"import subprocess; print('begun', flush=True); subprocess.run({call!r})"
    ((output, status),) = _within(2.0, [sys.executable, "-c", code], [{}])
    assert status == 1
    assert output.splitlines()[-1] == "stopped after 2 s"


def test_shares_of_the_tests_run_at_once_and_are_summed_up() -> None:
    code = "import os, sys; print(os.environ['N'], 'passed in 1s'); sys.exit(int(os.environ['S']))"
    shares = [{"N": "3", "S": "0"}, {"N": "4", "S": "5"}]
    results = _within(60.0, [sys.executable, "-c", code], shares)
    assert [status for _, status in results] == [0, 5]
    assert summed([output.splitlines()[-1] for output, _ in results]) == "7 passed"


def test_summaries_of_shares() -> None:
    lines = ["2 failed, 30 passed, 4 skipped in 9s", "1 error in 2s", "8 passed, 5 skipped in 1s"]
    assert summed(lines) == "2 failed, 1 error, 38 passed, 5 skipped"
    assert summed(["4 skipped, 9 deselected in 1s", "3 deselected in 1s"]) == "4 skipped"
    assert summed(["1 passed in 1s", "stopped after 0 s", "stopped after 0 s"]) == (
        "1 passed, stopped after 0 s"
    )
    assert summed(["no tests ran in 0.1s"]) == "no tests ran"


@no_gpu
def test_a_tool_that_finds_no_gpu_is_no_gpu(tmp_path: Path) -> None:
    """nvidia-smi without a driver says so on the standard output."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    tool.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was run" in done.stdout


def test_a_gpu_that_cannot_be_used_is_an_error(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "NEEDED", ("torch", "no_such_module"))
    assert program.main() == 1
    assert "needs no_such_module" in capsys.readouterr().err
    monkeypatch.setattr(program, "probe", lambda: None)
    monkeypatch.setattr(program, "_driver", lambda: "580.1")
    assert program.main() == 1
    assert "nvidia-smi lists a GPU" in capsys.readouterr().err


def test_a_copy_without_git_is_told_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import machine

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("FORKSERVE_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("FORKSERVE_COMMIT", "abc123")
    assert machine.commit() == "abc123"


def test_goals_are_judged_by_the_worst(program: Any) -> None:
    tree = {"k": 8, "goal": 0.7, "share": 0.9, "over_flat": 3.0, "over_sdpa": 0.5}
    tables = {
        "paged": [{"goal": 0.8, "share": 0.85}, {"goal": None, "share": 0.1}],
        "trees": [tree, {**tree, "k": 2, "over_flat": 0.1}, {**tree, "goal": None, "share": 0.2}],
    }
    reached = [(row["value"], row["met"]) for row in program.goals(tables)]
    assert reached == [(0.85, True), (0.9, True), (0.5, False)]
    assert program.goals({"paged": []}) == []


def test_the_planner_is_timed() -> None:
    from benchmarks.measure import Options
    from benchmarks.tiles import run

    report = run(Options(quick=True))
    (table,) = report.tables
    grown, anew = table.rows
    assert (grown["made"], grown["grown"], anew["made"]) == (1, 7, 8)
    assert grown["keys read"] < grown["copied"]
    (target,) = report.targets
    assert target.met is None, "a quick run can tell nothing"


def test_shapes_are_what_they_say() -> None:
    for tree in (*FASTTREE, *AGENTS):
        made = works_of(tree, 16)
        want = sum(n * rows for level in tree.levels for n, rows in zip(*level, strict=True))
        assert made.shared == want + len(made.works)
        assert len(made.works) == sum(nodes[-1] for nodes, _ in tree.levels)
        assert made.copied == sum(work.start + 1 for work in made.works)
        pages = [p for w in made.works for s in (*w.context, w.write) if s for p in s.pages]
        assert max(pages) < made.pages
        keys = {s.key for w in made.works for s in w.context}
        assert len({s.key for w in flat(made) for s in w.context}) > len(keys) or len(
            made.works
        ) == len(tree.levels)
    assert Tree((((1, 5), (20000, 200)),)).name == "1,5/20000,200"
    assert FASTTREE[9].name == "1,2,4,8,16,32,64,128,1024/16 each"
    assert len(FASTTREE) == 15
