"""Prefill, decode and fan-out of the bundled engine beside llama.cpp and Hugging Face.

All systems run the same GGUF with the same number of threads and take turns in every round.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.measure import Options, Report, Target, median, repeat, share
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.workers import LlamaCpp, Vllm
from benchmarks.plot import Chart
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.kernels.native import library

FREE = SamplingParams(ignore_eos=True)
# Execution variants of the bundled engine: options of `LocalBackend`.
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
}
if library.available() is None:
    for _name in ("int8", "w8a16"):
        VARIANTS[_name] = {"dtype": _name}
Timed = Callable[[int], float]  # a round's number -> seconds


@dataclass
class Size:
    prefill: tuple[int, ...] = (512, 2048)
    contexts: tuple[int, ...] = (128, 2048, 4096)
    k: int = 8
    steps: int = 24
    rounds: int = 5
    budget_s: float = 60.0


class Ours:
    """The bundled engine in one variant, with trunks that stay open."""

    def __init__(self, model: Any, size: Size, options: Mapping[str, Any]) -> None:
        pages = (sum(size.contexts) + max(size.prefill) + 64 * size.k) // 16 + 512
        config = ForkServeConfig(capacity_pages=pages, branch_cap=64, prefix_index=False)
        self.eng = Engine(models.Watched(config, model, **options))
        self._open: dict[int, Any] = {}

    def prefill(self, tokens: list[int]) -> float:
        """A whole prompt to its first token."""
        begin = time.perf_counter()
        handle = self.eng.open(tokens)
        self.eng.generate(handle.id, 1, params=FREE)
        seconds = time.perf_counter() - begin
        self.eng.close(handle.id)
        return seconds

    def decode(self, tokens: list[int], steps: int, k: int = 1) -> float:
        """`steps` tokens of each of k branches; forks and the first token are not counted.

        The first token of each is drawn before the clock starts, as the peers' first is given.
        """
        with self.branches(tokens, k) as targets:
            begin = time.perf_counter()
            self.eng.generate_many(targets, steps, params=FREE)
            return time.perf_counter() - begin

    @contextmanager
    def branches(self, tokens: list[int], k: int) -> Iterator[list[tuple[str, int]]]:
        """k branches of an open trunk that have drawn a token; they end with the block."""
        session, tip = self._trunk(tokens)
        eng = self.eng
        nodes = [eng.fork(session, tip, f"b{i}", [100 + i]) for i in range(k)]
        for node in nodes:
            eng.attempt(session, node)
        targets = [(session, node) for node in nodes]
        eng.generate_many(targets, 1, params=FREE)
        yield targets
        for node in nodes:
            eng.abort(session, node)

    def fork(self, tokens: list[int], k: int) -> float:
        """Seconds for one of k forks of an open trunk."""
        session, tip = self._trunk(tokens)
        begin = time.perf_counter()
        nodes = [self.eng.fork(session, tip, f"b{i}") for i in range(k)]
        seconds = time.perf_counter() - begin
        for node in nodes:
            self.eng.abort(session, node)
        return seconds / k

    def close(self) -> None:
        self.eng.shutdown()

    def _trunk(self, tokens: list[int]) -> tuple[str, int]:
        if len(tokens) not in self._open:
            self._open[len(tokens)] = self.eng.open(tokens)
            self.eng.generate(self._open[len(tokens)].id, 1, params=FREE)
        handle = self._open[len(tokens)]
        return handle.id, self.eng.tip(handle.id)


@dataclass
class Field:
    """Everybody who takes part; llama.cpp in both settings, vLLM where it is installed."""

    ours: dict[str, Ours]
    others: dict[str, LlamaCpp | Vllm] = field(default_factory=dict)
    hf: HuggingFace | None = None

    def everyone(self) -> dict[str, Any]:
        hf = {"HF float32": self.hf} if self.hf is not None else {}
        return {**{f"fs {name}": one for name, one in self.ours.items()}, **self.others, **hf}

    def close(self) -> None:
        for one in self.everyone().values():
            one.close()


def run(options: Options) -> Report:
    report = Report("speed", "prefill, decode, fan-out beside llama.cpp and Hugging Face")
    size = Size((48,), (32, 64), 2, 3, 1, 0.0) if options.quick else Size()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames an argument
        crowd = gather(report, size, options)
        try:
            vocab = next(iter(crowd.ours.values())).eng.backend.info.vocab_size
            prefill(report, crowd, size, vocab, options)
            decode(report, crowd, size, vocab, options)
            fan_out(report, crowd, size, vocab, options)
            forks(report, crowd, size, vocab, options)
        finally:
            crowd.close()
    return report


def gather(report: Report, size: Size, options: Options) -> Field:
    """Load everybody; say who is missing."""
    model: Any = models.tiny_llama() if options.quick else "smollm2"
    crowd = Field({name: Ours(model, size, extra) for name, extra in VARIANTS.items()})
    crowd.hf = HuggingFace(model)
    threads, room = torch.get_num_threads(), max(size.contexts) + 2048
    if options.quick:
        report.notes.append("llama.cpp and vLLM are left out of the quick form")
    else:
        if LlamaCpp.there():
            source = open_checkpoint(model)
            (path,) = source.files()
            source.close()
            for name, flash in (("llama.cpp", False), ("llama.cpp flash", True)):
                crowd.others[name] = LlamaCpp(path, threads=threads, flash=flash, context=room)
        if Vllm.there():
            with tempfile.TemporaryDirectory() as folder:
                crowd.hf.save(Path(folder))
                crowd.others["vLLM bf16"] = Vllm(
                    Path(folder), threads=threads, dtype="bfloat16", context=room
                )
        for kind in (LlamaCpp, Vllm):
            if not kind.there():
                report.notes.append(f"no {kind.module}: set {kind.variable} to a Python with it")
        report.notes += [f"{name}: version {one.version}" for name, one in crowd.others.items()]
    report.notes.append(
        f"{threads} threads; llama.cpp: the GGUF as it is (Q4_1), KV in float16, unified, forks by "
        "llama_memory_seq_cp; HF: float32, the same weights; its branches are a repeated cache; "
        "vLLM: the same weights in bfloat16, its branches share by its prefix cache"
    )
    return crowd


def compare(
    table: Any, label: tuple[Any, ...], timed: Mapping[str, Timed], work: float, size: Size
) -> dict[str, list[float]]:
    """Rounds in which all take turns; adds a row of `work` per second.  Seconds by system."""
    names = list(timed)

    def once(number: int) -> dict[str, float]:
        turn = number % len(names)
        return {name: timed[name](number) for name in [*names[turn:], *names[:turn]]}

    found = repeat(once, size.rounds, size.budget_s)
    seconds = {name: [row[name] for row in found.values] for name in names}
    rates = [work / median(seconds[name]) for name in names]
    table.add(*label, *rates, found.quiet, found.others)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: list[str], peers: list[str]) -> float | None:
    """Median over rounds of (best peer's time) / (our best variant's time); None without a peer.

    Best: the one with the smallest median, so that each is taken in its better setting.
    """
    there = [name for name in peers if name in seconds]
    if not there:
        return None
    best = min(ours, key=lambda name: median(seconds[name]))
    peer = min(there, key=lambda name: median(seconds[name]))
    return median(b / a for a, b in zip(seconds[best], seconds[peer], strict=True))


LLAMA = ["llama.cpp", "llama.cpp flash"]


def prefill(report: Report, crowd: Field, size: Size, vocab: int, options: Options) -> None:
    everyone = crowd.everyone()
    table = report.table(
        "prefill to the first token, tokens/s", "tokens", *everyone, "quiet rounds", "others"
    )
    seeds = count(1000)
    for length in size.prefill:
        texts = [models.text(length, vocab, next(seeds)) for _ in range(64)]
        timed = {
            name: lambda n, one=one, texts=texts: one.prefill(texts[n % 64])
            for name, one in everyone.items()
        }
        seconds = compare(table, (length,), timed, length, size)
        if length == size.prefill[-1]:
            mine = [f"fs {name}" for name in crowd.ours]
            target(
                report,
                f"prefill {length} against llama.cpp",
                2,
                ratio(seconds, mine, LLAMA),
                options,
            )
            value = ratio(seconds, ["fs float32"], ["HF float32"])
            target(report, f"prefill {length}, float32 against HF", 1.1, value, options)


def decode(report: Report, crowd: Field, size: Size, vocab: int, options: Options) -> None:
    everyone = crowd.everyone()
    table = report.table(
        f"one stream, {size.steps} tokens, tokens/s", "context", *everyone, "quiet rounds", "others"
    )
    wanted = {size.contexts[0]: 0.8, size.contexts[-1]: 1.2}
    for context in size.contexts:
        text = models.text(context, vocab, context)
        timed = {
            name: lambda n, one=one, text=text: one.decode(text, size.steps)
            for name, one in everyone.items()
        }
        seconds = compare(table, (context,), timed, size.steps, size)
        if context in wanted:
            value = ratio(seconds, [f"fs {name}" for name in crowd.ours], LLAMA)
            target(
                report,
                f"one stream at {context}, against llama.cpp",
                wanted[context],
                value,
                options,
            )


def fan_out(report: Report, crowd: Field, size: Size, vocab: int, options: Options) -> None:
    everyone = crowd.everyone()
    table = report.table(
        f"{size.k} branches over one trunk, {size.steps} tokens each, tokens/s in all",
        *("trunk", *everyone, "quiet rounds", "others"),
    )
    for context in size.contexts:
        text = models.text(context, vocab, context)
        timed = {
            name: lambda n, one=one, text=text: one.decode(text, size.steps, size.k)
            for name, one in everyone.items()
        }
        seconds = compare(table, (context,), timed, size.steps * size.k, size)
        if context == size.contexts[0]:
            continue
        mine = [f"fs {name}" for name in crowd.ours]
        target(
            report,
            f"k={size.k} over {context}, against llama.cpp",
            2,
            ratio(seconds, mine, LLAMA),
            options,
        )
        if context == size.contexts[1]:
            value = ratio(seconds, mine, ["HF float32"])
            target(report, f"k={size.k} over {context}, against HF batched", 1, value, options)
            copied(report, crowd, size, text, options)


def copied(report: Report, crowd: Field, size: Size, text: list[int], options: Options) -> None:
    """The same branches, Hugging Face one after another on copies of the trunk's cache."""
    if crowd.hf is None:
        return
    hf, steps = crowd.hf, max(size.steps // 3, 1)
    timed: dict[str, Timed] = {
        f"fs {name}": lambda n, one=one: one.decode(text, steps, size.k)
        for name, one in crowd.ours.items()
    }
    timed["HF copied caches"] = lambda n: hf.decode_each(text, steps, size.k)
    table = report.table(
        f"{size.k} branches over {len(text)}, {steps} tokens each, against copied caches, tokens/s",
        *("trunk", *timed, "quiet rounds", "others"),
    )
    seconds = compare(table, (len(text),), timed, steps * size.k, size)
    value = ratio(seconds, [f"fs {name}" for name in crowd.ours], ["HF copied caches"])
    target(report, f"k={size.k} over {len(text)}, against copied caches", 6, value, options)


def forks(report: Report, crowd: Field, size: Size, vocab: int, options: Options) -> None:
    """A fork alone."""
    who: dict[str, Any] = {"fs": next(iter(crowd.ours.values()))}
    who |= {name: one for name, one in crowd.others.items() if isinstance(one, LlamaCpp)}
    table = report.table(
        f"one of {size.k} forks of a trunk, microseconds", "trunk", *who, "quiet rounds", "others"
    )
    for context in size.contexts:
        text = models.text(context, vocab, context)
        timed: dict[str, Timed] = {
            name: partial(_fork, one, text, size.k) for name, one in who.items()
        }
        names = list(timed)
        found = repeat(
            lambda n, timed=timed: {name: timed[name](n) for name in timed},
            size.rounds * 4,
            size.budget_s / 4,
        )
        seconds = {name: [row[name] for row in found.values] for name in names}
        table.add(
            context, *(median(seconds[name]) * 1e6 for name in names), found.quiet, found.others
        )
        if context == size.contexts[-1]:
            micro = median(seconds["fs"]) * 1e6
            known = None if options.quick else micro < 10
            report.targets.append(Target(f"fork of {context}, us", "< 10", micro, known))
            target(
                report,
                f"fork of {context} against seq_cp",
                15,
                ratio(seconds, ["fs"], LLAMA),
                options,
            )


def _fork(one: Any, text: list[int], k: int, number: int) -> float:
    seconds: float = one.fork(text, k)
    return seconds


def target(report: Report, what: str, wanted: float, value: float | None, options: Options) -> None:
    """A ratio that was promised: at least `wanted`."""
    known = None if value is None or options.quick else value >= wanted
    why = (
        "no peer" if value is None else f"others took {share(report.tables[-1].rows[-1]['others'])}"
    )
    report.targets.append(Target(what, f">= {wanted}", value, known, why))


CHARTS = (
    Chart("prefill", ("tokens",)),
    Chart("one stream", ("context",)),
    Chart("8 branches over one", ("trunk",)),
    Chart("one of 8 forks", ("trunk",)),
)
