"""From the end of a tool to the first token of the next turn, through the adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import models
from benchmarks.measure import Options, Report, Target, median, repeat, share
from benchmarks.turn_kinds import Shot, Size, bare, error, rewritten, send
from forkserve import Engine, SamplingParams


def run(options: Options) -> Report:
    report = Report("turns", "from the end of a tool to the first token (SmolLM2, float32, CPU)")
    size = Size(80, 2, 20, (0.05,), 1, 0.0) if options.quick else Size()
    report.table(
        "medians; both ways in turn, on the same text",
        *("turn", "tool s", "known", "observed", "without ms", "with ms", "with/without"),
        *("possible ms", "saved/possible", "same tokens", "quiet rounds", "others"),
    )
    for kind in (bare, rewritten, send, error):
        with kind(options, size) as (engine, shoot):
            for way in (True, False):  # memory is touched, the cost model learns
                shoot(0.02, way)
            possible: float | None = None
            for pause in size.pauses_s:
                found = repeat(lambda n, p=pause: _round(shoot, p, n), size.rounds, size.budget_s)
                known, observed = found.values[-1][0].known, found.values[-1][0].observed
                if possible is None:
                    possible = _possible(engine, known, observed, size.rounds)
                _row(report, kind.__doc__ or "", pause, found, known, observed, possible, options)
    report.notes += [
        "known: tokens of the next prompt that are certain while the tool runs (error: likely)",
        "possible: a pass over known and observed tokens less one over the observed alone, from a "
        "commit to a first token on the same engine, medians: what there is to take away",
        "small gain: a bare wrapper rides in a pass that is needed anyhow",
        "a tool of 0.1 s ends before a long suffix is computed on a slow machine: then the planner "
        "takes what fits, or nothing",
    ]
    return report


def _round(shoot: Callable[[float, bool], Shot], pause: float, number: int) -> tuple[Shot, Shot]:
    """(with, without), in an order that changes."""
    ways = (True, False) if number % 2 else (False, True)
    shots = {way: shoot(pause, way) for way in ways}
    return shots[True], shots[False]


def _row(
    report: Report,
    kind: str,
    pause: float,
    found: Any,
    known: int,
    observed: int,
    possible: float,
    options: Options,
) -> None:
    pairs = found.values
    with_, without = median(a.ms for a, _ in pairs), median(b.ms for _, b in pairs)
    ratio = median(a.ms / b.ms for a, b in pairs)
    taken = median((b.ms - a.ms) / max(possible, 1e-9) for a, b in pairs)
    # Events may hold several tokens: the shorter text has to begin the longer one.
    same = all(a.text.startswith(b.text) or b.text.startswith(a.text) for a, b in pairs)
    report.tables[-1].add(
        *(kind, pause, known, observed, without, with_, ratio, possible, taken),
        *("yes" if same else "NO", found.quiet, found.others),
    )
    why = f"others took {share(found.others)} of the CPU"
    outlasts = pause * 1e3 > 1.5 * possible
    if outlasts and kind != bare.__doc__:
        met = None if options.quick else taken >= 0.9
        what = f"share of the known suffix's time taken away: {kind}, {pause} s"
        report.targets.append(Target(what, ">= 0.9", taken, met, why))
        if kind in (rewritten.__doc__, send.__doc__):
            met = None if options.quick else ratio <= 0.5
            report.targets.append(Target(f"with/without: {kind}, {pause} s", "<= 0.5", ratio, met))
    report.targets.append(
        Target(f"same tokens: {kind}, {pause} s", "yes", float(same), same if same else False)
    )


def _possible(engine: Engine, known: int, observed: int, rounds: int) -> float:
    """Time that the known tokens cost when nobody computed them before, in ms."""
    vocab = engine.backend.info.vocab_size
    trunk = models.text(900, vocab, 1)
    engine.close(engine.open(trunk).id)

    def first(count: int, seed: int) -> float:
        handle = engine.open(trunk)
        engine.generate(handle.id, 1, params=SamplingParams(ignore_eos=True))
        text = models.text(count, vocab, seed)
        begin = time.perf_counter()
        engine.commit(handle.id, engine.tip(handle.id), text)
        engine.start(handle.id, 1, params=SamplingParams(ignore_eos=True)).result()
        ms = (time.perf_counter() - begin) * 1e3
        engine.close(handle.id)
        return ms

    observed = max(observed, 1)
    return median(
        first(known + observed, 100 + n) - first(observed, 200 + n) for n in range(rounds)
    )
