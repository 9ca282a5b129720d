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
from benchmarks.measure import Options, Report, Rounds, Table, median, repeat, share
from benchmarks.speed import FREE, VARIANTS, Ours, Size
from forkserve.engine import sampling
from forkserve.engine.local import backend
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.engine.local.spec import ModelSpec
from forkserve.kernels.native import attention, library
from forkserve.kernels.native.attention import AttentionPlan
from forkserve.kernels.native.forward import PHASES, Forward
from forkserve.types import SampleSpec, SamplingParams

_SCALED = 1 + 2 / 32  # a scale for 32 weights
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": _SCALED, "w8a16": _SCALED}
# w8a16 multiplies in bytes at twice the rate, but an activation is two.
PRODUCTS = {"bfloat16": "bfloat16", "w8a16": "bfloat16"}
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


@dataclass
class Machine:
    """Bytes and operations a second: the best of all that were measured, between the cases."""

    quick: bool
    read: float = 0.0
    copy: float = 0.0
    cached: float = 0.0  # copies within the caches of all threads
    rates: dict[str, float] = field(default_factory=dict)  # of products, by type of operands

    def measure(self) -> None:
        numbers, size = (2**18, 128) if self.quick else (2**25, 1024)
        a, b = torch.ones(numbers), torch.ones(numbers)
        self.read = max(self.read, rate(lambda: torch.dot(a, b), 2 * a.nbytes))
        self.copy = max(self.copy, rate(lambda: a.copy_(b), 2 * a.nbytes))
        small = np.ones(2**16, np.float32)
        other, threads = small.copy(), torch.get_num_threads()
        one = rate(lambda: np.copyto(other, small), 2 * small.nbytes, 100)
        self.cached = max(self.cached, one * threads)
        for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            x = torch.randn(size, size).to(kind)
            found = rate(lambda x=x: torch.mm(x, x), 2 * size**3)  # type: ignore[misc]
            self.rates[name] = max(self.rates.get(name, 0.0), found)


def rate(call: Callable[[], object], amount: float, rounds: int = 5) -> float:
    """Of `amount` a second, the best of some."""
    best = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        best = max(best, amount / (time.perf_counter() - begin))
    return best


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
    model: Any = models.tiny_llama() if quick else "smollm2"
    source = open_checkpoint(model)
    spec = source.spec
    source.close()
    machine, found = Machine(quick), {}
    with torch.inference_mode():
        for name, chosen in VARIANTS.items():
            one = Ours(model, size, chosen)
            try:
                for case in cases(size):
                    machine.measure()
                    found[name, case] = measure(one, case, spec.vocab, size)
            finally:
                one.close()
    for name in VARIANTS:
        table = report.table(
            f"{name}: ms of a prompt or of a step, of the mean thread",
            *("case", "part", "ms", "share", "limit", "limit/ms", "quiet rounds", "others"),
        )
        for case in cases(size):
            most = limits(case, name, spec, machine)
            add(table, case, found[name, case], most)
    draws(report, options, spec.vocab)
    rates = ", ".join(f"{name} {best / 1e9:,.0f}" for name, best in machine.rates.items())
    report.notes += [
        f"memory reads {machine.read / 1e9:.1f} GB/s and copies {machine.copy / 1e9:.1f}, "
        f"caches copy {machine.cached / 1e9:.1f}; products, GFLOP/s: {rates}",
        f"kernels for {library.load().isa}; int8 has products in float32 and KV in bfloat16; "
        "w8a16 multiplies pairs of bytes where bfloat16 does a number",
    ]
    return report


def cases(size: Size) -> list[Case]:
    first, *_, last = size.contexts
    return [
        *(Case(f"prompt of {n:,}", n, 0) for n in size.prefill),
        *(Case(f"1 stream at {n:,}", n, 1, size.steps) for n in (first, last)),
        *(Case(f"k={size.k} over {n:,}", n, size.k, size.steps) for n in size.contexts[1:]),
    ]


def add(table: Table, case: Case, found: Rounds[Seconds], most: Seconds) -> None:
    """Parts of a case and all of it together, beside their limits."""
    took = {part: median([one[part] for one in found.values]) for part in PARTS}
    whole = sum(took.values())
    rows = [(name, took[part], most.get(part)) for part, name in PARTS.items()]
    for name, seconds, least in [*rows, ("all", whole, sum(most.values()))]:
        limit = None if least is None else least * 1e3
        table.add(
            *(case.name, name, seconds * 1e3, round(seconds / whole, 4), limit),
            *(None if least is None else least / seconds, found.quiet, share(found.others)),
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
    products = machine.rates[PRODUCTS.get(variant, "float32")]

    def least(nbytes: float, operations: float) -> float:
        return max(nbytes / machine.read, operations / products)

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
