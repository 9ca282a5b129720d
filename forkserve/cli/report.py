"""What the demo found: records, their JSON, and the table."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Identity", "Report", "TurnRow", "show"]


@dataclass(slots=True)
class TurnRow:
    """Numbers of one turn.  Times in ms, everything else in tokens or pages.

    known: tokens known before the observation (the wrapper).  skipped: those of them that the
    commit found computed (`ready_tokens` in the JSON).  prefilled: computed as committed work;
    speculative: computed ahead; wasted: the part of those that was not used.  shared: trunk tokens
    that the branches used without computing or copying them.  live_pages: pages of the whole tree
    when it was widest; clone_pages: what they would be if every branch had a copy of its own.
    """

    name: str
    question: str
    tool: str
    call: str
    tool_ok: bool
    tool_ms: float
    hit: str
    known: int
    skipped: int
    ttft_ms: float
    ttft_ms_without_speculation: float
    same_first_token: bool
    prefilled: int
    shared: int
    speculative: int
    wasted: int
    branches: int
    live_pages: int
    clone_pages: int
    refused: list[str] = field(default_factory=list)
    answer: str = ""

    @property
    def idle(self) -> bool:
        """Nothing was speculated: the turn did the same work as the one without speculation."""
        return not self.skipped and not self.speculative


@dataclass(slots=True)
class Identity:
    """Committed tokens against a cold engine.

    checked = equal + near_ties + different.  tolerance: in logits, 0 where equality is exact;
    worst: the largest amount by which a cold logit fell short of the cold choice.
    """

    checked: int = 0
    equal: int = 0
    near_ties: int = 0
    different: int = 0
    answers: int = 0
    tolerance: float = 0.0
    worst: float = 0.0
    method: str = ""

    @property
    def ok(self) -> bool:
        return self.checked > 0 and self.different == 0


@dataclass(slots=True)
class Report:
    """One run of the demo.  load_average: before it began; None where no clock was measured."""

    backend: str
    model: str
    device: str
    dtype: str
    document: str
    trunk_tokens: int
    seed: int
    branches: int
    speculate: bool
    clock: str
    turns: list[TurnRow]
    identity: Identity
    wall_s: float
    load_average: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; times rounded to a microsecond."""
        report = {key: _rounded(value) for key, value in asdict(self).items()}
        for turn in report["turns"]:
            turn["ready_tokens"] = turn["skipped"]
        return report


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6 if value < 1 else 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def show(report: Report, console: Console) -> None:
    """The table, what its columns mean, and the verdict."""
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"pad_edge": False, "padding": (0, 1, 0, 0), "header_style": "bold"}
    times = Table(box=box.SIMPLE_HEAD, **style)
    for head in ("turn", "tool", "tool ms", "TTFT ms", "without", "ready", "hit"):
        left = head in ("turn", "tool", "hit")
        times.add_column(head, justify="left" if left else "right", no_wrap=head != "hit")
    costs = Table(box=box.SIMPLE_HEAD, **style)
    heads = ("turn", "prefilled", "shared", "speculative", "wasted", "pages", "if cloned")
    for head in heads:
        costs.add_column(head, justify="left" if head == "turn" else "right")
    for row in report.turns:
        times.add_row(
            row.name,
            row.tool if row.tool_ok else f"{row.tool} [red]✗[/]",
            _ms(row.tool_ms),
            f"[bold]{_ms(row.ttft_ms)}[/]",
            _without(row),
            f"{row.skipped}/{row.known}",
            _hit(row),
        )
        counts = (row.prefilled, row.shared, row.speculative, row.wasted)
        pages = (row.live_pages, row.clone_pages)
        costs.add_row(row.name, *(f"{n:,}" for n in (*counts, *pages)))
    console.print()
    console.print(times)
    console.print(_about_times(report), style="dim", highlight=False)
    console.print(costs)
    console.print(_COSTS, style="dim", highlight=False)
    console.print()
    console.print(_verdict(report), highlight=False)


_TIMES = {
    clock: (
        "TTFT: from the tool's result to the first token of the answer; without: the same turn "
        f"without speculation. {how} ready: of the tokens known before the result (end of the "
        "call, header, checklist), those that the commit found computed. hit: whether that text "
        "was forked before the result, and its KV computed. ✗: the tool failed."
    )
    for clock, how in {
        "virtual": "Simulated by the mock's clock.",
        "wall": "Both measured in this run, once.",
    }.items()
}
_COSTS = (
    "In tokens: prefilled when needed; shared: trunk that branches used without computing or "
    "copying it; speculative: computed while a tool ran; wasted: the part of that which was not "
    "used. pages: of the whole tree at its widest; if cloned: with a copy for every branch."
)


def _about_times(report: Report) -> str:
    """What the columns mean and how far the times can be trusted."""
    text = _TIMES[report.clock]
    if any(row.idle for row in report.turns):
        text += " –: nothing was speculated: any difference is noise."
    if any(not row.skipped and not row.idle for row in report.turns):
        text += (
            " ~: nothing was ready, only the branch that lost was computed: a difference is noise, "
            "or a wait for that branch."
        )
    if report.clock == "wall":
        text += "\nTimes are single samples on this machine"
        if report.load_average is not None:
            cores = os.cpu_count() or 1
            text += (
                f"; its load average was {report.load_average:.1f} on {cores} "
                f"processor{'s' * (cores > 1)} before the demo began"
            )
        text += ". Run `python -m benchmarks ttft` for a measurement."
    return text


def _without(row: TurnRow) -> str:
    """The time without speculation, as far as it can be compared."""
    if row.idle:
        return "–"
    return ("" if row.skipped else "~") + _ms(row.ttft_ms_without_speculation)


def _hit(row: TurnRow) -> str:
    """The hit together with how much of it was computed."""
    if row.hit != "known_suffix":
        return row.hit.replace("_", " ")
    if row.skipped >= row.known:
        return "known, KV ready"
    return "known, KV partly" if row.skipped else "known, no KV"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _verdict(report: Report) -> str:
    found = report.identity
    near = ""
    if found.tolerance:
        near = (
            f", {found.near_ties} near-ties (cold logit within {found.tolerance:g}; "
            f"worst {found.worst:.2g})"
        )
    body = (
        f"{found.equal} of {found.checked} committed tokens in {found.answers} generations equal a "
        f"cold engine's{near}: {found.method}."
    )
    if found.ok:
        return f"[bold green]Identity holds.[/] {body}"
    return f"[bold red]Identity fails.[/] {found.different} tokens differ. {body}"
