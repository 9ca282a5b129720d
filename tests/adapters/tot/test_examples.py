"""The examples and the programs of the guide run, and show what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import best_of_n, tot_game24
from examples.game24 import PUZZLES, Game24, after, parse, show, solves, steps
from forkserve.adapters.tot import State

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "adapters" / "tot.md"


@pytest.mark.parametrize("search", tot_game24.SEARCHES)
def test_game_of_24_on_the_mock(search: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = tot_game24.main("mock", PUZZLES[0], search)
    assert result.solved
    shown = capsys.readouterr().out
    assert "\nsolved\n" in shown
    saved = re.search(r"(\d+) prompt tokens prefilled; (\d+) without reuse, (\d+) with", shown)
    assert saved is not None
    ours, none, cache = (int(number) for number in saved.groups())
    assert ours <= cache < none / 5


@pytest.mark.model
@pytest.mark.xdist_group("smollm2")
def test_game_of_24_on_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """It hardly ever wins; but under the grammar every step is legal, and its sum is right."""
    result = tot_game24.main("smollm2", "2 3 5 12")
    assert result.best is not None
    numbers = parse("2 3 5 12")
    for step in result.best.state.thoughts:
        left = after(numbers, step)
        assert left is not None
        numbers = left
    assert result.solved == solves("2 3 5 12", result.best.state.thoughts)
    assert result.usage.prefilled < result.usage.prompt / 3
    assert not any(step.unreadable for step in result.trace)
    assert ("\nsolved\n" in capsys.readouterr().out) == result.solved


def test_best_of_n_on_the_mock(capsys: pytest.CaptureFixture[str]) -> None:
    result = best_of_n.main()
    assert result.text == best_of_n.ANSWERS[1]
    assert f"best: {best_of_n.ANSWERS[1]}" in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.xdist_group("smollm2")
def test_best_of_n_on_the_model() -> None:
    result = best_of_n.main("smollm2")
    assert result.text
    assert result.usage.prefilled < result.usage.prompt
    marks = [thought.score for thought in result.tree.children if thought.status != "duplicate"]
    assert all(mark is not None and 1 <= mark <= 9 for mark in marks)


def test_examples_run_as_programs(tmp_path: Path) -> None:
    for name in ("tot_game24", "best_of_n"):
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# --- the rules of the game -----------------------------------------------------------------------


def test_every_step_that_is_offered_is_legal() -> None:
    numbers = parse("2 3 5 12")
    offered = steps(numbers)
    assert len(offered) == len(set(offered))
    assert all(after(numbers, step) is not None for step in offered)
    assert {show(after(parse("6 4"), step) or ()) for step in steps(parse("6 4"))} == {
        "10", "2", "-2", "24", "3/2", "2/3"
    }  # fmt: skip


@pytest.mark.parametrize(
    "step",
    [
        "3 + 5 = 9 (left: 2 9 12)",  # the sum is wrong
        "3 + 5 = 8 (left: 2 8)",  # a number is lost
        "3 + 4 = 7 (left: 2 5 7 12)",  # a number that is not there
        "3 + 3 = 6 (left: 2 5 6 12)",  # a number twice
        "3 / 0 = 0 (left: 2 5 12)",
        "3 + 5 = 8",
        "3 ^ 5 = 8 (left: 2 8 12)",
        "x + 5 = 8 (left: 2 8 12)",
        "3 + 5 = 1/0 (left: 2 8 12)",
        "",
    ],
)
def test_illegal_steps_are_refused(step: str) -> None:
    assert after(parse("2 3 5 12"), step) is None


def test_only_whole_derivations_solve() -> None:
    right = [
        "5 / 2 = 5/2 (left: 5/2 3 12)",
        "3 - 5/2 = 1/2 (left: 1/2 12)",
        "12 / 1/2 = 24 (left: 24)",
    ]
    assert solves("2 3 5 12", right)
    assert not solves("2 3 5 12", right[:2])
    assert not solves("2 3 5 11", right)
    assert Game24().thoughts(
        "propose", State("2 3 5 12"), "noise\n2 + 3 = 5 (left: 5 5 12)\n2 + 3 = 6 (left: 5 6 12)"
    ) == ["2 + 3 = 5 (left: 5 5 12)"]


# --- the guide -----------------------------------------------------------------------------------


def test_programs_of_the_guide_run(tmp_path: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(programs) > 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(programs), encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
