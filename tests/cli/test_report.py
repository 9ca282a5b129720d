"""The demo's words for what it found."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from forkserve.cli.agent import refusals
from forkserve.cli.report import Identity, Report, TurnRow, show


def turn(**values: Any) -> TurnRow:
    row: dict[str, Any] = dict.fromkeys(TurnRow.__dataclass_fields__, 0)
    row |= {"name": "look up", "tool": "search", "tool_ok": True, "hit": "known_suffix"}
    row |= {"known": 10, "ttft_ms": 700.0, "ttft_ms_without_speculation": 912.0, "refused": []}
    return TurnRow(**row | values)


def shown(row: TurnRow, clock: str = "wall", load: float | None = 1.25) -> str:
    report = Report(
        *("local", "m", "cpu", "float32", "d"), 1, 0, 1, True, clock, [row], Identity(), 0.0, load
    )
    console = Console(file=io.StringIO(), width=80)
    show(report, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize(
    ("skipped", "words"),
    [(0, "known, no KV"), (4, "known, KV partly"), (10, "known, KV ready")],
)
def test_hit_says_how_much_was_ready(skipped: int, words: str) -> None:
    assert f"{skipped}/10 {words}" in shown(turn(skipped=skipped))


def test_a_turn_without_speculation_has_no_difference_to_show() -> None:
    text = shown(turn())
    assert "700 – 0/10" in text
    assert "912" not in text
    assert "any difference is noise" in text


def test_work_ahead_keeps_its_difference() -> None:
    text = shown(turn(skipped=10, speculative=12))
    assert "700 912" in text
    assert "noise" not in text


def test_where_only_the_losing_branch_was_computed() -> None:
    """It cannot have gained anything, but the work may have been in the way."""
    text = shown(turn(speculative=12))
    assert "700 ~912 0/10" in text
    assert "noise, or a wait for that branch" in text


def test_times_say_what_they_are() -> None:
    text = shown(turn())
    assert "Run `python -m benchmarks ttft` for a measurement." in text
    assert "single samples on this machine; its load average was 1.2 on" in text
    assert "load average" not in shown(turn(), load=None)
    assert "single samples" not in shown(turn(), clock="virtual")


def test_refusals_in_words() -> None:
    pairs = [("result", "idle_horizon"), ("error", "idle_horizon"), ("error", "pages")]
    assert refusals(pairs, 625.0) == (
        "result and error, as the expected pause of 0.62 s is shorter than the prefill; "
        "error, as there are not enough free KV pages"
    )
    assert "1.2 ms" in refusals(pairs, 1.25)


@pytest.mark.parametrize(
    "reason",
    [
        "idle_horizon",
        "pages",
        "branch_cap",
        "tbt_margin",
        "low_probability",
        "free_form",
        "empty",
        "not_worth",
        "queue_full",
        "planner_failed",
        "deadline",
    ],
)
def test_every_reason_has_words(reason: str) -> None:
    assert "_" not in refusals([("result", reason)], 500.0)
