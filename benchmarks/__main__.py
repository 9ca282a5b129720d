"""Run benchmarks.  Results are kept in benchmarks/results/cpu; benchmarks/README.md reads them."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure import RESULTS, ROOT, Options, Report, Span
from benchmarks.plot import draw

NAMES = (
    *("fork", "tick", "pages", "attention", "tiles", "decorator", "trees", "trajectories"),
    *("variants", "fanout", "ttft", "turns", "speed", "profile", "store"),
)


def run(name: str, options: Options) -> Report:
    """One benchmark, timed as a whole."""
    with Span() as span:
        report: Report = import_module(f"benchmarks.{name}").run(options)
    report.wall_s, report.others_cpu = span.wall, span.others
    return report


def plot(name: str, data: dict[str, Any], console: Console) -> None:
    """Draw the charts of a benchmark that has some beside its kept result."""
    saved = RESULTS / f"{name}.json"
    charts = getattr(import_module(f"benchmarks.{name}"), "CHARTS", ())
    if charts:
        path = draw(data, charts, saved.with_suffix(".svg"))
        console.print(f"  drawn in {path.relative_to(ROOT)}", style="dim")


def main(arguments: list[str] | None = None) -> int:
    """The command.  0 unless a benchmark itself fails: a missed target is a result."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; results are not kept")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    parser.add_argument("--plot", action="store_true", help="also draw charts (needs matplotlib)")
    parser.add_argument("--redraw", action="store_true", help="run nothing: draw kept results")
    parser.add_argument("--json", metavar="FILE", help="write all results there as one JSON list")
    args = parser.parse_args(given)
    unknown = sorted(set(args.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = args.names or NAMES
    shown = [*names, *(["--quick"] if args.quick else []), *(["--profile"] if args.profile else [])]
    options = Options(args.quick, args.profile, " ".join(["python -m benchmarks", *shown]))
    console = Console(width=None if sys.stdout.isatty() else 170)
    results: list[dict[str, Any]] = []
    if args.redraw:
        for name in names:
            if (kept := RESULTS / f"{name}.json").exists():
                plot(name, json.loads(kept.read_text()), console)
        return 0
    for name in names:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        report = run(name, options)
        report.show(console)
        results.append(report.as_dict(options))
        if not args.quick and report.tables:
            saved = report.save(results[-1])
            console.print(f"  kept in {saved.relative_to(ROOT)}", style="dim")
            if args.plot:
                plot(name, results[-1], console)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
