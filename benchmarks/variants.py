"""Execution variants of the bundled engine: how near to float32 they are, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import models
from benchmarks.measure import Options, Report, Target, median
from benchmarks.plot import Chart
from forkserve.config import ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.engine.local.runner import VARIANTS
from forkserve.kernels.native import library
from forkserve.types import Batch, SampleSpec, SamplingParams, Span, Work

Floats = npt.NDArray[np.float32]
ROOT = Path(__file__).resolve().parents[1]
AGREEMENT = 0.97  # what variants with 8-bit weights must reach
TEXTS = ("docs/architecture.md", "docs/store.md", "README.md", "CONTRIBUTING.md")


@dataclass
class Size:
    length: int = 512  # positions of each text
    prefill: int = 512
    contexts: tuple[int, ...] = (128, 2048)
    rounds: int = 7


def run(options: Options) -> Report:
    report = Report("variants", "execution variants beside float32, SmolLM2")
    size = Size(48, 32, (32,), 2) if options.quick else Size()
    model: Any = models.tiny_llama() if options.quick else "smollm2"
    speeds = [f"decode at {context}, tokens/s" for context in size.contexts]
    table = report.table(
        f"{len(TEXTS) * size.length} positions of real text",
        *("variant", "kernels", "top-1 agreement", "KL, nats", "KV bytes/token"),
        *("prefill, tokens/s", *speeds),
    )
    exact: list[Floats] = []
    native = library.available() is None
    for variant in VARIANTS if native else VARIANTS[:2]:
        backend = LocalBackend(ForkServeConfig(capacity_pages=256), model, dtype=variant)
        found = [logits(backend, text, size.length) for text in TEXTS]
        exact = exact or found
        same, divergence = compare(exact, found)
        table.add(
            *(variant, str(backend.info.extra["kernels"]), round(same, 4), round(divergence, 5)),
            *(backend.info.kv_bytes_per_token, round(prefill(backend, size), 1)),
            *(round(decode(backend, context, size), 1) for context in size.contexts),
        )
        if variant in ("int8", "w8a16"):
            met = None if options.quick else same >= AGREEMENT
            report.targets.append(
                Target(f"{variant}: top-1 agreement with float32", f">= {AGREEMENT}", same, met)
            )
        backend.close()
    report.notes.append("KL is of the variant's distribution from float32's, mean over positions")
    return report


def logits(backend: LocalBackend, name: str, length: int) -> Floats:
    """Rows [length, V] over a page of the documentation, from its first heading on."""
    tokens = backend.tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))[:length]
    work = Work("", 0, tokens, 0, (), None, all_logits=True)
    rows = backend.execute(Batch([work])).results[0].logits
    assert rows is not None
    return rows


def compare(exact: list[Floats], found: list[Floats]) -> tuple[float, float]:
    """(share of equal first choices, mean divergence in nats), over all positions."""
    equal, divergence = [], []
    for want, got in zip(exact, found, strict=True):
        equal.append(want.argmax(1) == got.argmax(1))
        p, q = log_softmax(want), log_softmax(got)
        divergence.append((np.exp(p) * (p - q)).sum(1))
    return float(np.concatenate(equal).mean()), float(np.concatenate(divergence).mean())


def log_softmax(rows: Floats) -> npt.NDArray[np.float64]:
    above = rows.astype(np.float64) - rows.max(1, keepdims=True)
    out: npt.NDArray[np.float64] = above - np.log(np.exp(above).sum(1, keepdims=True))
    return out


def prefill(backend: LocalBackend, size: Size) -> float:
    """Tokens a second of one pass over a prompt."""
    tokens = models.text(size.prefill, backend.info.vocab_size, 1)
    write = Span("trunk", range(256), 0, len(tokens))
    return len(tokens) / timed(backend, Work("", 0, tokens, 0, (), write, logits=True), size)


def decode(backend: LocalBackend, context: int, size: Size) -> float:
    """Tokens a second of single passes over one row behind `context` rows."""
    trunk = models.text(context, backend.info.vocab_size, 2)
    whole = Span("trunk", range(255), 0, context)
    backend.execute(Batch([Work("", 0, trunk, 0, (), whole)]))
    spec = SampleSpec(SamplingParams(), 0, context, 0, 0)
    work = Work("", 0, [7], context, (whole,), Span("tip", [255], context, 1), sample=spec)
    return 1 / timed(backend, work, size)


def timed(backend: LocalBackend, work: Work, size: Size) -> float:
    """Seconds of a pass, the median of some."""
    spans = []
    for _ in range(size.rounds):
        begin = time.perf_counter()
        backend.execute(Batch([work]))
        spans.append(time.perf_counter() - begin)
    return median(spans)


CHARTS = (Chart("2048 positions", ("variant",), ("prefill", "decode at 128", "decode at 2048")),)
