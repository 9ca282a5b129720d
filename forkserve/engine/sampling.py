"""Choose a token from logits.  Shared by every backend; numpy only.

The random number of a draw is a function of (seed, position) and of nothing else: not of the
batch, not of what was drawn before.  So a fork, a pre-emption or a replay draws the same token.
"""

from __future__ import annotations

import hashlib
from math import isfinite

import numpy as np
import numpy.typing as npt

from forkserve.errors import BackendError
from forkserve.types import SampleSpec, SamplingParams

__all__ = ["sample", "uniform"]

FloatArray = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of draw `position` under `seed`: 53 bits of blake2b of both."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample(
    logits: FloatArray, spec: SampleSpec, largest: int | None = None
) -> tuple[int, float | None]:
    """(token, log p) for logits [V].  largest: the lowest id of the largest logit, if known.

    temperature 0 takes the largest logit, the lowest id among equals.  Otherwise, in this order:
    the ids that `spec.allowed` permits, temperature, top_k, top_p, min_p, then the inverse of the
    cumulative distribution in id order.  log p is of the raw distribution (no temperature, no
    filter), if `params.logprobs` asks for it.
    """
    params = spec.params
    ids = _allowed(spec, logits.size)
    values = logits if ids is None else logits[ids]
    first = largest if largest is not None and ids is None else int(values.argmax())
    top = float(values[first])  # argmax gives a NaN precedence
    if not isfinite(top):
        raise BackendError(f"no logit is finite at position {spec.position} (largest: {top})")
    choice = first if params.temperature == 0 else _draw(values, spec)
    token = choice if ids is None else int(ids[choice])
    return token, _log_p(logits, token) if params.logprobs else None


def _allowed(spec: SampleSpec, vocab: int) -> _Ids | None:
    """The permitted ids in ascending order, or None for all."""
    if spec.allowed is None:
        return None
    ids = np.unique(np.asarray(spec.allowed, dtype=np.int64))
    if ids.size == 0 or ids[0] < 0 or ids[-1] >= vocab:
        raise BackendError(
            f"{ids.size} ids are allowed at position {spec.position}; "
            f"at least one is needed, all within 0..{vocab - 1}"
        )
    return ids


def _draw(values: FloatArray, spec: SampleSpec) -> int:
    """Index of a draw from softmax(values / temperature), filtered."""
    params = spec.params
    above = values.astype(np.float64) - values.max()  # first: a tiny temperature must not overflow
    with np.errstate(over="ignore"):
        weights = np.exp(above / params.temperature)
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
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return None
    kept: _Ids = np.arange(weights.size)
    if 0 < params.top_k < weights.size:
        kth = np.partition(weights, -params.top_k)[-params.top_k]
        kept = np.flatnonzero(weights >= kth)
        if kept.size > params.top_k:  # equal weights at the border: the lowest ids stay
            above = kept[weights[kept] > kth]
            equal = kept[weights[kept] == kth][: params.top_k - above.size]
            kept = np.sort(np.concatenate([above, equal]))
    if params.top_p < 1.0:
        order = kept[np.argsort(-weights[kept], kind="stable")]
        before = np.cumsum(weights[order]) - weights[order]
        kept = np.sort(order[before < params.top_p * weights[kept].sum()])
    if params.min_p > 0.0:
        kept = kept[weights[kept] >= params.min_p]  # the largest weight is 1
    return kept


def _log_p(logits: FloatArray, token: int) -> float:
    values = logits.astype(np.float64)
    top = values.max()
    return float(values[token] - top - np.log(np.exp(values - top).sum()))
