"""Where a prompt and a decode step spend their time, beside what this machine could do.

The native pass times itself by kind of work (meter.h); planning and sampling are timed around their
calls; what is left of the wall time is the engine's loop and Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import models
from benchmarks.measure import Options, Report, Rounds, median, repeat, share
from benchmarks.speed import FREE, VARIANTS, Ours, Size
from forkserve.engine import sampling
from forkserve.engine.local import backend
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.engine.local.spec import ModelSpec
from forkserve.kernels.native import attention, library
from forkserve.kernels.native.attention import AttentionPlan
from forkserve.kernels.native.forward import PHASES, Forward
from forkserve.types import SampleSpec, SamplingParams

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / 32}  # a scale for 32 weights
PARTS = {
    "linear": "linear layers",
    "attention": "attention",
    "elementwise": "norms, rotation, activation",
    "write": "KV write",
    "head": "head",
    "wait": "threads waiting",
    "planning": "planning of the pass",
    "sampling": "sampling",
    "rest": "loop and Python",
}
DRAWS = {
    "greedy": SamplingParams(),
    "greedy, logprobs": SamplingParams(logprobs=True),
    "greedy, 5 top logprobs": SamplingParams(logprobs=True, top_logprobs=5),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "temperature 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature 0.8, top_k 40": SamplingParams(temperature=0.8, top_k=40),
    "temperature 0.8, min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
}
Seconds = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A prompt (k = 0), or steps of k branches over a trunk."""

    name: str
    length: int
    k: int
    steps: int = 1


@dataclass(frozen=True)
class Machine:
    """Measured ceilings: bytes and operations a second."""

    read: float
    copy: float
    cached: float  # copies within the caches of all threads
    rates: dict[str, float]  # of products, by the type of their operands

    @classmethod
    def measured(cls, quick: bool) -> Machine:
        read, copy = models.bandwidth(16 if quick else 256)
        cached = cached_copy() * torch.get_num_threads()
        size = 128 if quick else 2048
        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        rates = {name: product_rate(size, kind) for name, kind in kinds.items()}
        return cls(read * 1e9, copy * 1e9, cached, rates)


@dataclass
class Watch:
    """Seconds by part while `on`."""

    threads: int
    native: Any = None  # [threads, phases]
    spent: Seconds = field(default_factory=dict)

    def clear(self) -> None:
        self.native = np.zeros((self.threads, len(PHASES)))
        self.spent = {"planning": 0.0, "sampling": 0.0}

    def parts(self, wall: float, steps: int) -> Seconds:
        """Of one step.  Threads count by their mean."""
        found = dict(zip(PHASES, self.native.mean(0).tolist(), strict=True)) | self.spent
        found["rest"] = wall - sum(found.values())
        return {part: found[part] / steps for part in PARTS}

    @contextmanager
    def on(self) -> Iterator[None]:
        def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return call(*args)
                finally:
                    self.spent[part] += time.perf_counter() - begin

            return run

        forward = Forward.run

        def metered(this: Forward, *args: Any) -> Any:
            this.seconds = self.native
            return forward(this, *args)

        with ExitStack() as stack:
            for owner, name, part in (
                (attention, "gather", "planning"),
                (AttentionPlan, "build", "planning"),
                (backend, "sample", "sampling"),
                (backend, "logprobs", "sampling"),
            ):
                stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
            stack.enter_context(patch.object(Forward, "run", metered))
            yield


def run(options: Options) -> Report:
    report = Report(
        "profile", "where passes of SmolLM2 spend their time, beside the machine's limits"
    )
    if (reason := library.available()) is not None:
        report.notes.append(f"the native kernels time themselves, and they are not there: {reason}")
        return report
    quick = options.quick
    size = Size((48,), (32, 64), 2, 3, 2, 0.0) if quick else Size(prefill=(2048,), budget_s=30.0)
    with torch.inference_mode():
        machine = Machine.measured(quick)
        model: Any = models.tiny_llama() if quick else "smollm2"
        source = open_checkpoint(model)
        spec = source.spec
        source.close()
        for name, chosen in VARIANTS.items():
            one = Ours(model, size, chosen)
            try:
                variant(report, name, one, spec, machine, size)
            finally:
                one.close()
        draws(report, options, spec.vocab)
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in machine.rates.items())
    report.notes += [
        f"memory reads {machine.read / 1e9:.1f} GB/s and copies {machine.copy / 1e9:.1f}, "
        f"caches copy {machine.cached / 1e9:.1f}; products, GFLOP/s: {rates}",
        f"kernels for {library.load().isa}; int8 has products in float32 and KV in bfloat16",
    ]
    return report


def variant(
    report: Report, name: str, one: Ours, spec: ModelSpec, machine: Machine, size: Size
) -> None:
    table = report.table(
        f"{name}: ms of a prompt or of a step, of the mean thread",
        *("case", "part", "ms", "share", "limit", "limit/ms", "quiet rounds", "others"),
    )
    cases = [Case(f"prompt of {n:,}", n, 0) for n in size.prefill]
    first, *_, last = size.contexts
    cases += [Case(f"1 stream at {n:,}", n, 1, size.steps) for n in (first, last)]
    cases += [Case(f"k={size.k} over {n:,}", n, size.k, size.steps) for n in size.contexts[1:]]
    for case in cases:
        found = measure(one, case, spec.vocab, size)
        ms = {part: median([round[part] for round in found.values]) * 1e3 for part in PARTS}
        most = {part: limit * 1e3 for part, limit in limits(case, name, spec, machine).items()}
        rows = [(PARTS[part], ms[part], most.get(part)) for part in PARTS]
        whole = sum(ms.values())
        for part, took, least in [*rows, ("all", whole, sum(most.values()))]:
            table.add(
                *(case.name, part, took, round(took / whole, 4), least),
                *(None if least is None else least / took, found.quiet, share(found.others)),
            )


def measure(one: Ours, case: Case, vocab: int, size: Size) -> Rounds[Seconds]:
    """Seconds of a step by part, round by round."""
    text = models.text(case.length, vocab, case.length)
    watch = Watch(int(one.eng.backend.info.extra["threads"]))

    def once(_: int) -> Seconds:
        watch.clear()
        if not case.k:
            with watch.on():
                return watch.parts(one.prefill(text), 1)
        with one.branches(text, case.k) as targets, watch.on():
            begin = time.perf_counter()
            one.eng.generate_many(targets, case.steps, params=FREE)
            return watch.parts(time.perf_counter() - begin, case.steps)

    once(0)  # opens the trunk
    return repeat(once, size.rounds, size.budget_s)


def limits(case: Case, variant: str, spec: ModelSpec, machine: Machine) -> Seconds:
    """Seconds that the parts of one step take at least: the larger of memory's and arithmetic's."""
    rows = case.k or case.length
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = spec.layers * (spec.hidden * (2 * heads + 2 * kv) + 3 * spec.hidden * spec.ffn)
    head = spec.vocab * spec.hidden
    kv_bytes = spec.layers * 2 * kv * (4 if variant == "float32" else 2)
    if case.k:
        own = 1 + case.steps / 2  # rows of a branch, on average
        read, seen = case.length + case.k * own, case.k * (case.length + own)
    else:
        read, seen = case.length, case.length * (case.length + 1) / 2
    # Floats that norms, rotations and activations read and write for a row of a layer.
    touched = 4 * spec.hidden + 2 * (heads + kv) + 3 * spec.ffn
    rate = machine.rates["bfloat16" if variant == "bfloat16" else "float32"]

    def least(nbytes: float, operations: float) -> float:
        return max(nbytes / machine.read, operations / rate)

    width = WEIGHT_BYTES[variant]
    return {
        "linear": least(weights * width, 2 * weights * rows),
        "attention": least(kv_bytes * read, spec.layers * 4 * heads * seen),
        "elementwise": spec.layers * rows * touched * 4 / machine.cached,
        "write": 2 * kv_bytes * rows / machine.copy,
        "head": least(head * width, 2 * head * max(case.k, 1)),
    }


def draws(report: Report, options: Options, vocab: int) -> None:
    """What drawing a token costs, for rows of logits that look like a model's."""
    rows, rounds = (2, 3) if options.quick else (8, 200)
    logits = np.random.default_rng(0).gumbel(0, 2.5, (rows, vocab)).astype(np.float32)
    table = report.table(
        f"us to sample {rows} rows of {vocab:,} logits", "request", "us", "us a row"
    )
    for name, params in DRAWS.items():
        spec = SampleSpec(params, 1, 2, 3, 4)
        largest = [int(row.argmax()) for row in logits]  # the native head brings it
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for row, first in zip(logits, largest, strict=True):
                token = sampling.sample(row, spec, first)
                if params.logprobs:
                    sampling.logprobs(row, token, params.top_logprobs)
            times.append((time.perf_counter() - begin) * 1e6)
        us = median(times)
        table.add(name, us, us / rows)


def cached_copy() -> float:
    """Bytes a second that one thread reads and writes within its cache, the best of some."""
    a = np.ones(2**16, np.float32)
    b, best = np.empty_like(a), 0.0
    for _ in range(200):
        begin = time.perf_counter()
        np.copyto(b, a)
        best = max(best, 2 * a.nbytes / (time.perf_counter() - begin))
    return best


def product_rate(size: int, kind: torch.dtype) -> float:
    """Operations a second of torch's product of two square matrices, the best of some."""
    a = torch.randn(size, size).to(kind)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(a, a)
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best
