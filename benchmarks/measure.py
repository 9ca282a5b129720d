"""Timing with the share of CPU that others took, the machine's description, tables and JSON."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.machine import commit, machine, versions

__all__ = [
    "Options",
    "Report",
    "Rounds",
    "Span",
    "Table",
    "Target",
    "median",
    "profile",
    "quantile",
    "repeat",
    "share",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "cpu"
T = TypeVar("T")
median = statistics.median


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    profile: bool = False
    command: str = "python -m benchmarks"


@dataclass
class Table:
    """Rows of one question; `columns` are keys of each row."""

    title: str
    columns: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        self.rows.append(dict(zip(self.columns, values, strict=True)))


@dataclass
class Target:
    """A number that was promised.  met is None where this run cannot tell."""

    what: str
    wanted: str
    value: float | None
    met: bool | None
    why: str = ""


@dataclass
class Report:
    """Everything one benchmark found."""

    name: str
    title: str
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    others_cpu: float | None = (
        None  # share of the machine that other processes took, over the whole run
    )
    wall_s: float = 0.0

    def table(self, title: str, *columns: str) -> Table:
        self.tables.append(Table(title, list(columns)))
        return self.tables[-1]

    def as_dict(self, options: Options) -> dict[str, Any]:
        return {
            **asdict(self),
            "quick": options.quick,
            "command": options.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
        }

    def save(self, data: dict[str, Any]) -> Path:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps(data, indent=1) + "\n")
        return path

    def show(self, console: Console) -> None:
        console.print(f"\n[bold]{self.name}[/bold]: {self.title}")
        for table in self.tables:
            out = RichTable(title=table.title, title_justify="left", header_style="bold")
            for column in table.columns:
                left = all(isinstance(row[column], str) for row in table.rows)
                out.add_column(column, justify="left" if left else "right")
            for row in table.rows:
                out.add_row(*(_text(row[column]) for column in table.columns))
            console.print(out)
        for target in self.targets:
            verdict = {True: "met", False: "MISSED", None: "open"}[target.met]
            why = f"  ({target.why})" if target.why else ""
            got = _text(target.value)
            console.print(f"  {verdict:6} {target.what}: {got}, wanted {target.wanted}{why}")
        for note in self.notes:
            console.print(f"  note: {note}", style="dim")
        console.print(
            f"  {self.wall_s:.1f} s; other processes took {share(self.others_cpu)} of the CPU"
        )


_LEAST = 0.25  # s


class Span:
    """Wall time of a block, and the share of all cores that other processes used meanwhile.

    others is None for a block shorter than `_LEAST`: the kernel counts in steps of 10 ms.
    """

    wall = 0.0
    others: float | None = None

    def __enter__(self) -> Span:
        self._begin, self._own, self._busy = time.perf_counter(), _own_s(), _busy_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._begin
        own = _own_s() - self._own
        total = max(_busy_s() - self._busy - own, 0.0)
        if self.wall > _LEAST:
            self.others = round(min(1.0, total / (self.wall * (os.cpu_count() or 1))), 3)


def _own_s() -> float:
    """CPU seconds of this process and of the peers that it runs as children."""
    total = time.process_time()
    for peer in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            total += sum(peer.cpu_times()[:2])
    return total


def _busy_s() -> float:
    """CPU seconds all cores were busy since boot; 0 where that cannot be read."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


QUIET = 0.12  # share of the CPU that others may take in a round that counts as quiet


@dataclass(frozen=True)
class Rounds(Generic[T]):
    """Values of the rounds that count: the quiet ones if there are three, else all of them.

    others: mean share of the CPU that others took in these.  quiet: "3 of 7".
    """

    values: list[T]
    others: float | None
    quiet: str


def repeat(once: Callable[[int], T], rounds: int, budget_s: float) -> Rounds[T]:
    """Run rounds until enough of them were quiet, or the time is over and there are enough.

    Short ones are judged together, as many as take `_LEAST`.
    """
    done: list[tuple[T, float | None]] = []
    end = time.perf_counter() + budget_s
    while True:
        begin, values = time.perf_counter(), list[T]()
        with Span() as span:
            while time.perf_counter() - begin <= _LEAST:
                values.append(once(len(done) + len(values)))
        done += [(value, span.others) for value in values]
        quiet = [d for d in done if d[1] is not None and d[1] <= QUIET]
        if len(quiet) >= rounds or (len(done) >= rounds and time.perf_counter() > end):
            break
    used = quiet if len(quiet) >= min(3, rounds) else done
    known = [others for _, others in used if others is not None]
    mean = round(statistics.fmean(known), 3) if known else None
    return Rounds([value for value, _ in used], mean, f"{len(quiet)} of {len(done)}")


def share(others: float | None) -> str:
    return "an unknown share" if others is None else f"{others:.0%}"


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def profile(run: Callable[[], object], per: int, top: int = 10) -> list[tuple[str, float, float]]:
    """(function, own us, cumulative us) per unit, the most expensive first.

    The profiler slows Python down by half or more: read shares, not times.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    run()
    profiler.disable()
    found = []
    stats: Any = pstats.Stats(profiler)
    for (file, line, name), (_, _, own, cumulative, _) in stats.stats.items():
        where = f"{Path(file).name}:{line} {name}" if line else name
        found.append((where, own / per * 1e6, cumulative / per * 1e6))
    return sorted(found, key=lambda entry: -entry[1])[:top]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
