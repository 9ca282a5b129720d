"""Choose a token from logits.  Shared by every backend; numpy only.

The random number of a draw is a function of (seed, position), and what penalties read is a function
of the tokens before it; nothing depends on the batch, or on how the path came to be.  So a fork, a
pre-emption or a replay draws the same token.
"""

from __future__ import annotations

import hashlib
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError
from forkserve.types import SampleSpec, SamplingParams

__all__ = ["logprobs", "sample", "uniform"]

FloatArray = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]
_COLUMNS = 1024


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of draw `position` under `seed`: 53 bits of blake2b of both."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample(logits: FloatArray, spec: SampleSpec, largest: int | None = None) -> int:
    """The token for logits [V].  largest: the lowest id of the largest logit, if known.

    temperature 0 takes the largest logit, the lowest id among equals.  Before that the logits are
    adjusted: logit_bias, then repetition, frequency and presence penalty, in vLLM's order.
    Otherwise, in this order: adjusted logits, the ids that `spec.allowed` permits, temperature,
    top_k, top_p, min_p, then the inverse of the cumulative distribution in id order.
    """
    ids = _allowed(spec, logits.size)
    adjusted = _adjusted(logits, spec)
    values = adjusted if ids is None else adjusted[ids]
    if largest is not None and values is logits:
        first = largest
    else:
        first = int(values.argmax())
    top = float(values[first])  # argmax gives a NaN precedence
    if not isfinite(top):
        raise BackendError(f"no logit is finite at position {spec.position} (largest: {top})")
    choice = first if spec.params.temperature == 0 else _draw(values, top, spec)
    return choice if ids is None else int(ids[choice])


def logprobs(
    logits: FloatArray, token: int, count: int = 0
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log p of a token, and (id, log p) of the `count` likeliest ids, best first.

    Of the raw distribution: nothing adjusted, no temperature, no filter.  Of equal ids the lower
    one comes first.
    """
    top = float(logits.max())
    above = logits.astype(np.float64)
    above -= top
    whole = top + np.log(np.exp(above, out=above).sum())
    best: tuple[tuple[int, float], ...] = ()
    if (count := min(count, logits.size)) > 0:
        ids = np.flatnonzero(logits >= _reached(logits, count))
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        best = tuple((int(i), float(logits[i] - whole)) for i in ids)
    return float(logits[token] - whole), best


def _reached(values: npt.NDArray[Any], count: int) -> Any:
    """A value that `count` of `values` reach and few more: at most the count-th largest."""
    if count <= _COLUMNS <= values.size:  # the largest of each column are as many different ids
        rows = values.size // _COLUMNS
        values = values[: rows * _COLUMNS].reshape(rows, _COLUMNS).max(0)
    return np.partition(values, -count)[-count]


def _adjusted(logits: FloatArray, spec: SampleSpec) -> FloatArray:
    """The logits with bias and penalties; the row itself when there are none."""
    params = spec.params
    if not params.logit_bias and not params.counts_tokens:
        return logits
    out = logits.copy()
    if params.biases:
        ids, bias = zip(*params.biases, strict=True)
        out[list(ids)] += np.asarray(bias, np.float32)
    if params.counts_tokens:
        if spec.seen is None or spec.counts is None:
            raise BackendError(f"no token counts came with a penalty at position {spec.position}")
        seen, factor = out[spec.seen], np.float32(params.repetition_penalty)
        seen = np.where(seen > 0, seen / factor, seen * factor)
        seen -= np.float32(params.frequency_penalty) * spec.counts.astype(np.float32)
        seen -= np.float32(params.presence_penalty) * (spec.counts > 0)
        out[spec.seen] = seen
    return out


def _allowed(spec: SampleSpec, vocab: int) -> _Ids | None:
    """The permitted ids in ascending order, or None for all."""
    if spec.allowed is None:
        return None
    ids = np.asarray(spec.allowed, dtype=np.int64)
    if ids.size > 1 and not (ids[1:] > ids[:-1]).all():
        ids = np.unique(ids)
    if ids.size == 0 or ids[0] < 0 or ids[-1] >= vocab:
        raise BackendError(
            f"{ids.size} ids are allowed at position {spec.position}; "
            f"at least one is needed, all within 0..{vocab - 1}"
        )
    return ids


def _draw(values: FloatArray, top: float, spec: SampleSpec) -> int:
    """Index of a draw from softmax(values / temperature), filtered.  top: the largest value."""
    params = spec.params
    weights = values.astype(np.float64)
    weights -= top  # first: a tiny temperature must not overflow
    if params.temperature != 1.0:
        with np.errstate(over="ignore"):
            weights /= params.temperature
    np.exp(weights, out=weights)
    kept = _filter(weights, params)
    if kept is not None:
        weights = weights[kept]
    cumulative = np.cumsum(weights)
    point = uniform(spec.seed, spec.position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, point, side="right"))
    index = min(index, weights.size - 1)
    return index if kept is None else int(kept[index])


def _filter(weights: _Doubles, params: SamplingParams) -> _Ids | None:
    """Indices that top_k, top_p and min_p keep, ascending; None keeps all.

    Of equal weights the lower id ranks first.  The most likely id always stays.
    """
    kept: _Ids | None = None
    if 0 < params.top_k < weights.size:
        kept = _top_k(weights, params.top_k)
    if params.top_p < 1.0:
        chosen = _top_p(weights if kept is None else weights[kept], params.top_p)
        kept = chosen if kept is None else kept[chosen]
    if params.min_p > 0.0:  # the largest weight is 1
        if kept is None:
            return np.flatnonzero(weights >= params.min_p)
        kept = kept[weights[kept] >= params.min_p]
    return kept


def _top_k(weights: _Doubles, k: int) -> _Ids:
    likely = weights[weights >= _reached(weights, k)]
    return _likeliest(weights, k, np.partition(likely, -k)[-k])


def _top_p(weights: _Doubles, p: float) -> _Ids:
    """The likeliest ids, until those before one have the mass p.

    Only weights that may be among theirs are put in order.  All below `least` have less than half
    of the mass that may be left out, short of what sums of so many may be off by: the others reach
    p without them.
    """
    size, total = weights.size, weights.sum()
    least = ((1 - p) / 2 - np.finfo(np.float64).eps * size) * total / size
    ordered = np.sort(weights[weights >= least])[::-1]
    count = int(np.count_nonzero(np.cumsum(ordered) - ordered < p * total))
    return _likeliest(weights, count, ordered[count - 1])


def _likeliest(weights: _Doubles, count: int, least: float) -> _Ids:
    """The `count` likeliest indices, ascending.  least: the smallest weight among theirs."""
    kept = np.flatnonzero(weights >= least)
    if kept.size > count:  # of equal ones the lowest ids stay
        kept = np.delete(kept, np.flatnonzero(weights[kept] == least)[count - kept.size :])
    return kept
