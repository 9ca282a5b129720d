"""Bar charts of kept results; needs matplotlib (the development tools have it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

__all__ = ["Chart", "draw"]

COLOURS = (
    *("#1b6ca8", "#e0a030", "#b04a4a", "#7a7a7a", "#4a9a6a"),
    *("#8a5ab0", "#5ab0c8", "#c87ab0", "#a08050", "#304050"),
)


@dataclass(frozen=True)
class Chart:
    """Bars of one table: the one whose title begins with `table`.

    labels: columns that name a group of bars.  bars: columns that give its heights, each named by
    how it begins; without any, all that hold nothing but numbers, so that peers may be lacking.
    """

    table: str
    labels: Sequence[str]
    bars: Sequence[str] = ()

    def columns(self, table: Mapping[str, Any]) -> list[str]:
        """The columns of the bars in a kept table.  Shares of the CPU are nobody's result."""
        if self.bars:
            return [next(c for c in table["columns"] if c.startswith(bar)) for bar in self.bars]
        rest = [c for c in table["columns"] if c not in {*self.labels, "others"}]
        return [c for c in rest if all(isinstance(row[c], int | float) for row in table["rows"])]


def draw(data: Mapping[str, Any], charts: Sequence[Chart], path: Path) -> Path:
    """Draw the charts of a kept result below each other into an SVG file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "forkserve"  # the same picture is the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(charts), 1, figsize=(8, 2.8 * len(charts)), squeeze=False, layout="constrained"
    )
    for axis, chart in zip(axes[:, 0], charts, strict=True):
        table = next(t for t in data["tables"] if t["title"].startswith(chart.table))
        rows = table["rows"]
        columns = chart.columns(table)
        width = 0.8 / len(columns)
        for number, column in enumerate(columns):
            places = [i + (number - (len(columns) - 1) / 2) * width for i in range(len(rows))]
            heights = [row[column] for row in rows]
            bars = axis.bar(places, heights, width * 0.95, color=COLOURS[number], label=column)
            axis.bar_label(bars, fmt=_short, fontsize=6)
        axis.set_xticks(range(len(rows)), [_label(r, chart) for r in rows])
        axis.tick_params(which="both", labelsize=7)
        axis.set_title(fill(f"{table['title']} (log scale)", 110), fontsize=9, loc="left")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False, ncols=8)
        axis.margins(y=0.3)
    figure.savefig(path, metadata={"Date": None, "Creator": "ForkServe benchmarks"})
    pyplot.close(figure)
    return path


def _label(row: Mapping[str, Any], chart: Chart) -> str:
    return "\n".join(fill(str(row[column]), 18) for column in chart.labels)


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
