"""Every committed token against an engine that never forked, speculated or shared anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import expm1

import numpy as np
import numpy.typing as npt

from forkserve.api import Engine
from forkserve.cli.report import Identity
from forkserve.engine.mock import MockBackend
from forkserve.engine.protocol import Backend
from forkserve.engine.sampling import sample, uniform
from forkserve.types import Batch, SampleSpec, SamplingParams, Span, Work

__all__ = ["TOLERANCE", "Committed", "check_cold", "check_exact"]

# Logits by which a committed token may fall short of the cold choice, per dtype: the room that
# two orders of summation need.  Native kernels have one order, and no room.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.5}


# Tokens of one pass of the cold prefill: progress is told after each.
_PASS = 512

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Committed:
    """One generation that became committed text: `tokens` at position `start`."""

    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: SamplingParams
    seed: int


def check_exact(
    backend: MockBackend,
    history: Sequence[int],
    committed: Sequence[Committed],
    tell: Tell = len,
) -> Identity:
    """On the mock: a fresh one answers each prompt alone, and all must be bit-equal.

    The replies are scripted, so what is compared besides the tokens is the log-probability that
    the model computed at each of them: a function of every KV row it read.
    """
    found = Identity(method="a fresh mock answered each prompt alone, log-probabilities included")
    pages = -(-len(history) // backend.config.page_size) + 1
    config = backend.config.replace(
        background=False, prefix_index=False, capacity_pages=pages, shuffle_pages=False
    )
    for number, one in enumerate(committed, 1):
        tell(_again(number, committed))
        cold = MockBackend(config, vocab_size=backend.info.vocab_size)
        with Engine(cold) as engine:
            session = engine.open(history[: one.start], seed=one.seed)
            cold.script(one.tokens)
            again = engine.start(
                session.id, len(one.tokens), params=replace(one.params, seed=one.seed)
            )
            tokens = again.result()
        pairs = list(zip(tokens, again.logprobs, strict=True))
        found.answers += 1
        for at, expected in enumerate(zip(one.tokens, one.logprobs, strict=True)):
            found.checked += 1
            same = at < len(pairs) and pairs[at] == expected
            found.equal += same
            found.different += not same
    return found


def check_cold(
    backend: Backend,
    history: Sequence[int],
    committed: Sequence[Committed],
    tell: Tell = len,
) -> Identity:
    """On a real model: one cold pass over the whole conversation, then the logits of each answer.

    The engine must be shut down: the backend's pages are used from the first one on, as if by an
    engine that has only ever seen this one sequence.
    """
    found = Identity(
        tolerance=0.0
        if backend.info.extra.get("exact")
        else TOLERANCE.get(backend.info.dtype, max(TOLERANCE.values())),
        method="one cold prefill of the whole conversation, each token teacher-forced",
    )
    pages = range(-(-len(history) // backend.config.page_size))
    chunk = max(min(backend.config.max_batch_tokens, _PASS), 1)
    for begin in range(0, len(history), chunk):
        end = min(begin + chunk, len(history))
        tell(f"reading the conversation again on a cold engine: {end:,} of {len(history):,} tokens")
        context = (Span("cold", pages, 0, begin),) if begin else ()
        write = Span("cold", pages, begin, end - begin, begin)
        backend.execute(Batch([Work("cold", 1, history[begin:end], begin, context, write)]))
    for number, one in enumerate(committed, 1):
        tell(_again(number, committed))
        found.answers += 1
        for token, logits, spec in _replayed(backend, history, one, pages):
            _judge(found, token, logits, spec)
    return found


def _again(number: int, committed: Sequence[Committed]) -> str:
    return f"computing every answer again on a cold engine: {number} of {len(committed)}"


def _replayed(
    backend: Backend, history: Sequence[int], one: Committed, pages: Sequence[int]
) -> list[tuple[int, npt.NDArray[np.float32], SampleSpec]]:
    """Each token with the cold logits before it and the draw that was asked for."""
    begin, count = one.start - 1, len(one.tokens)
    context = (Span("cold", pages, 0, begin),) if begin else ()
    rows = history[begin : begin + count]
    work = Work("cold", 1, rows, begin, context, None, all_logits=True)
    logits = backend.execute(Batch([work])).results[0].logits
    assert logits is not None
    constraint = one.params.constraint
    out = []
    for step, token in enumerate(one.tokens):
        allowed = constraint.allowed(one.tokens[:step]) if constraint is not None else None
        spec = SampleSpec(one.params, one.seed, one.start + step, 0, step, allowed)
        out.append((token, logits[step], spec))
    return out


def _judge(found: Identity, token: int, logits: npt.NDArray[np.float32], spec: SampleSpec) -> None:
    """Count one token as equal, a near-tie, or different."""
    found.checked += 1
    choice = sample(logits, spec)
    if choice == token:
        found.equal += 1
        return
    if spec.params.temperature == 0:
        gap = float(logits[choice] - logits[token])
        near = gap <= found.tolerance and (spec.allowed is None or token in spec.allowed)
    else:
        gap, near = _draw_gap(logits, token, spec, found.tolerance)
    found.worst = max(found.worst, gap)
    found.near_ties += near
    found.different += not near


def _draw_gap(
    logits: npt.NDArray[np.float32], token: int, spec: SampleSpec, tolerance: float
) -> tuple[float, bool]:
    """How far the draw lay from the token's share of the cumulative distribution, in logits.

    Logits that differ by at most d move a border of the distribution by at most exp(2 d / T) - 1.
    """
    temperature = spec.params.temperature
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    cumulative = np.cumsum(weights) / weights.sum()
    point = uniform(spec.seed, spec.position)
    low = cumulative[token - 1] if token else 0.0
    away = max(low - point, point - cumulative[token], 0.0)
    gap = float(np.log1p(away) * temperature / 2)
    return gap, away <= expm1(2 * tolerance / temperature)
