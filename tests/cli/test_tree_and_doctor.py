"""`forkserve tree`, `forkserve doctor`, and the group they hang in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

import forkserve
from forkserve.cli import doctor, main
from forkserve.cli.record import RunNode, save_run, state_path
from forkserve.cli.words import one_line, shortened
from forkserve.installing import install_extra, install_model
from forkserve.values import counted

from .conftest import Run

# --- tree -------------------------------------------------------------------------------------


def test_tree_of_the_last_run(run: Run, state: Path) -> None:
    assert run("demo", "--backend", "mock", "--branches", "3").exit_code == 0
    assert state.is_file()
    drawn = run("tree")
    assert drawn.exit_code == 0
    for text in ("committed", "aborted", "won", "lost", "attempt 3", "tokens", "pages", "question"):
        assert text in drawn.stdout


def test_tree_as_json(run: Run) -> None:
    run("demo", "--backend", "mock", "--branches", "3")
    record = json.loads(run("tree", "--json").stdout)
    nodes = record["nodes"]
    outcomes = [node["outcome"] for node in nodes]
    assert outcomes.count("won") == 1
    assert outcomes.count("lost") == 2
    assert outcomes.count("aborted") == 6  # in each turn the branch that was not taken
    ids = {node["id"] for node in nodes}
    assert [node["id"] for node in nodes if node["parent"] is None] == [1]
    assert all(node["parent"] in ids for node in nodes if node["parent"] is not None)
    assert all(node["tokens"] > 0 for node in nodes if node["outcome"] == "committed")
    assert record["backend"] == "mock"


NASTY = (
    "First line\n\tsecond \x1b[31mred\x07 \u202e日本語 👩\u200d👩\u200d👧\u200d👦 [bold]x[/] "
    + "long " * 99
)


def record(*, branch: str = "b") -> None:
    """A run whose texts a model may have written, three levels deep beside the committed line."""
    nodes = [RunNode(1, None, "trunk", "committed", 2000, 1, NASTY)]
    for turn in range(3):
        top, last = 10 * turn + 10, nodes[0].id if not turn else 10 * turn
        nodes.append(RunNode(top, last, branch, "committed", 1, 0, NASTY))
        for deep in range(3):
            parent = last if not deep else top + deep
            nodes.append(RunNode(top + deep + 1, parent, branch, "aborted", 1, 0, ""))
    save_run({"model": "m", "device": "cpu", "document": "d"}, nodes)


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_a_node_is_a_line_whatever_was_said(
    run: Run, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    record(branch=f"[red]turn[/]\n{NASTY[:20]}")
    drawn = run("tree")
    head, *lines = drawn.stdout.splitlines()
    assert head == "m on cpu, d: 13 nodes, 9 aborted"
    assert len(lines) == 13
    assert all(c.isprintable() or c in "\n\u200d" for c in drawn.stdout)
    if width:
        assert max(map(cell_len, lines)) <= width
        assert any(line.endswith("…") for line in lines)
    else:  # a pipe: as much as was kept
        assert sum("👩\u200d👩\u200d👧\u200d👦 [bold]x[/] long long" in line for line in lines) == 4
    assert "2,000 tokens, 1 pag" in lines[0]
    assert all("[red]turn[/] First" in line for line in lines[1:])
    assert all(line == line.rstrip() for line in lines)
    depths = [line.index("✗") // 4 for line in lines if "✗" in line]
    assert depths == [1, 2, 3] * 3


@pytest.mark.usefixtures("state")
def test_a_screen_that_cannot_show_a_sign() -> None:
    record()
    command = [sys.executable, "-c", "from forkserve.cli import main; main()", "tree"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "? trunk  committed" in done.stdout


def test_a_record_says_that_a_text_was_cut() -> None:
    assert shortened("a" * 9, 8) == "a" * 7 + "…"
    assert shortened("a" * 8, 8) == "a" * 8
    assert shortened("aaaaaa bbb", 8) == "aaaaaa…"
    assert one_line("\ta \n\n b\x00\ud800c ") == "a bc"
    assert [counted(n, "page") for n in (0, 1, 2000)] == ["0 pages", "1 page", "2,000 pages"]


def test_no_run_yet(run: Run) -> None:
    result = run("tree")
    assert result.exit_code == 2
    assert "there is no run yet" in result.stderr
    assert "forkserve demo" in result.stderr


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"nodes": []}', '{"format": 9, "nodes": [{}]}']
)
def test_unreadable_run(run: Run, state: Path, content: str) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(content)
    result = run("tree")
    assert result.exit_code == 2
    assert "is not a run" in result.stderr


def test_place_of_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKSERVE_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_path() == tmp_path / "forkserve" / "last-run.json"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_path() == tmp_path / ".local" / "state" / "forkserve" / "last-run.json"
    monkeypatch.setenv("FORKSERVE_STATE", "~/x.json")
    assert state_path() == tmp_path / "x.json"


# --- doctor -----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small measurements."""
    monkeypatch.setattr(doctor, "_COPY_MB", 4)
    monkeypatch.setattr(doctor, "_GEMM", 64)


@pytest.mark.usefixtures("quick")
def test_doctor_json(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["forkserve"] == forkserve.__version__
    assert found["devices"][0]["kind"] == "cpu"
    assert found["devices"][0]["cores"] >= 1
    assert found["measured"]["copy_gb_s"] > 0
    assert found["measured"]["gemm_gflop_s"] > 0
    assert found["background_loop_ms"] > 0
    assert found["pool"]["tokens"] == found["pool"]["pages"] * found["pool"]["page_size"]
    assert found["pool"]["kv_bytes_per_token"] == 46080
    assert found["versions"]["numpy"] == importlib.metadata.version("numpy")


@pytest.mark.usefixtures("quick")
def test_doctor_on_the_screen(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for text in ("forkserve", "installed", "cpu", "GB/s", "GFLOP/s", "page pool", "works"):
        assert text in result.stdout


@pytest.mark.usefixtures("quick")
def test_doctor_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_EXTRAS", {"engine": ("no_such_module_here",)})
    monkeypatch.setattr(doctor, "MODEL_MODULE", "no_such_model_here")
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    result = run("doctor")
    assert result.exit_code == 0
    assert install_extra("engine") in result.stdout
    assert install_model() in result.stdout
    assert "What is missing is optional." in result.stdout


@pytest.mark.usefixtures("quick")
def test_doctor_says_what_is_broken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("the loop stands still")

    monkeypatch.setattr(doctor, "_loop_ms", broken)
    monkeypatch.setattr(doctor, "_REQUIRED", ("numpy", "no-such-package-here"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "the loop stands still" in result.stdout
    assert "no-such-package-here is required" in result.stdout


@pytest.mark.usefixtures("quick")
def test_doctor_fails_where_the_engine_would(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKSERVE_ISA", "sse")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["problems"] == [f"FORKSERVE_ISA=sse: {found['native_kernels']['why_not']}"]
    assert "'sse' is unknown" in found["problems"][0]


@pytest.mark.usefixtures("quick")
def test_doctor_says_what_serves_without_native_kernels(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.library, "_FOLDER", tmp_path)
    (tmp_path / "not_built.txt").write_text("FORKSERVE_NATIVE=off\n")
    monkeypatch.setattr(doctor, "_REQUIRED", ("numpy",))
    monkeypatch.setattr(doctor, "_OPTIONAL", ("torch",))
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    found = json.loads(run("doctor", "--json").stdout)["native_kernels"]
    assert (found["serves"], found["used"]) == ("torch", None)
    assert "installed (FORKSERVE_NATIVE=off)" in found["why_not"]
    shown = " ".join(run("doctor").stdout.split())
    assert "none: the native kernels were not built" in shown
    assert "the engine runs on torch, which is slower" in shown
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name == "numpy" else None)
    assert json.loads(run("doctor", "--json").stdout)["native_kernels"]["serves"] is None


@pytest.mark.usefixtures("quick")
def test_doctor_knows_the_extras_of_the_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    gone = ("cryptography", "zstandard", "obstore")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else there(name)
    )
    found = json.loads(run("doctor", "--json").stdout)
    assert set(gone) <= set(found["versions"])
    assert found["missing"]["store"] == ["cryptography", "zstandard"]
    assert found["missing"]["s3"] == ["obstore"]
    assert install_extra("store") in found["advice"]


@pytest.mark.usefixtures("quick")
def test_doctor_knows_the_extras_of_the_adapters(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    gone = ("langgraph", "langchain", "langchain_core")

    def find(name: str) -> Any:
        if name == "openhands.sdk":
            raise ModuleNotFoundError(name)
        return None if name in gone else there(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    found = json.loads(run("doctor", "--json").stdout)
    assert {"langgraph", "langchain", "langchain-core", "openhands-sdk"} <= set(found["versions"])
    assert found["missing"]["langgraph"] == ["langgraph", "langchain", "langchain_core"]
    assert found["missing"]["langchain"] == ["langchain_core"]
    assert found["missing"]["openhands"] == ["openhands.sdk"]
    assert {install_extra("langgraph"), install_extra("langchain")} <= set(found["advice"])

    monkeypatch.setattr(doctor, "_PYTHON", {"openhands": (9, 1)})  # pip would install nothing
    shown = run("doctor").stdout
    assert "incomplete: openhands.sdk; needs Python 9.1 or newer" in shown
    assert install_extra("openhands") not in shown
    monkeypatch.setattr(doctor, "_PYTHON", {})
    assert install_extra("openhands") in run("doctor").stdout


# --- the group --------------------------------------------------------------------------------


def test_help_and_version(run: Run) -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in ("demo", "tree", "doctor"))
    assert forkserve.__version__ in run("--version").stdout


@pytest.mark.parametrize("words", [(), ("store",)])
def test_a_summary_fits_its_line(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).stdout
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert len(lines) >= 5
    assert [line for line in lines if line.endswith("...") or len(line) > 80] == []


@pytest.mark.parametrize("name", ["demo", "tree", "doctor"])
def test_every_option_has_help(name: str) -> None:
    command = main.commands[name]
    options: list[Any] = list(command.params)
    assert command.help
    assert all(option.help for option in options)


def test_import_is_light() -> None:
    code = (
        "import sys, forkserve.cli; "
        "print([m for m in ('torch', 'rich', 'numpy', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
