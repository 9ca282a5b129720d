"""Rotary position embedding: which frequencies a model turns its rows with.

Kinds by Hugging Face's names.  Two of them turn a sequence by its length, so that a row computed
early would differ from the same row computed late; here one engine has one table.  "dynamic" is
"default" up to the trained length, and no sequence is longer.  "longrope" has two lists of factors:
those for long sequences are taken where the engine's context exceeds the original one
(`Rope.within`), as vLLM and llama.cpp do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forkserve.errors import ModelError

__all__ = ["Rope", "Turns", "checked_rope"]

BLOCK = 1024  # positions of a table that are computed at a time


@dataclass(frozen=True, slots=True)
class Rope:
    """One table of rotations.  params: the kind's parameters, those left out at their defaults."""

    theta: float
    kind: str = "default"
    params: tuple[tuple[str, Any], ...] = ()

    def inv_freq(self, dim: int, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Frequencies [dim / 2] in radians a position.

        factors: divisors per frequency [dim / 2] that a file brings; they take the kind's place.
        """
        freq = 1.0 / self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if factors is not None:
            return freq / factors
        return _KINDS[self.kind].scale(freq, self.theta, dict(self.params))

    def within(self, context: int) -> Rope:
        """The table of an engine whose sequences have up to `context` positions."""
        if self.kind != "longrope":
            return self
        params = dict(self.params)
        unused = "short_factor" if context > params[_OLD] else "long_factor"
        return replace(self, params=tuple(p for p in self.params if p[0] != unused))

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by; 1 for all kinds but yarn and longrope."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        params = dict(self.params)
        given = params.get("attention_factor")
        if given is not None:
            return float(given)
        factor = float(params["factor"])
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(params[_OLD]))
        top, bottom = params.get("mscale"), params.get("mscale_all_dim")
        if top and bottom:
            return _temperature(factor, float(top)) / _temperature(factor, float(bottom))
        return _temperature(factor, 1.0)


class Turns:
    """cos and sin of positions, [context, ...] each, computed when they are first reached.

    The memory is reserved for the whole context and stays where it is, but the system lends only
    what has been written: a table of 131,072 positions costs what the longest sequence needs.
    """

    def __init__(self, cos: Any, sin: Any, rows: Callable[[int, int], tuple[Any, Any]]) -> None:
        """cos, sin: arrays or tensors, not filled yet.  rows: theirs of positions [begin, end)."""
        self.cos: Any = cos
        self.sin: Any = sin
        self.filled = 0
        self._rows = rows

    def reach(self, end: int) -> None:
        """Have the rows of positions [0, end).  Whole blocks: no bit depends on when they came."""
        while self.filled < min(end, len(self.cos)):
            begin, stop = self.filled, min(self.filled + BLOCK, len(self.cos))
            self.cos[begin:stop], self.sin[begin:stop] = self._rows(begin, stop)
            self.filled = stop


def checked_rope(theta: float, given: Mapping[str, Any], where: str) -> Rope:
    """A table from a file's parameters ("rope_type" or "type" names the kind)."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            f"{where}: rotary scaling '{kind}' is not supported; {', '.join(_KINDS)} are"
        )
    known = _KINDS[kind]
    missing = [key for key in known.needs if given.get(key) is None]
    if missing:
        raise ModelError(f"{where}: rotary scaling '{kind}' lacks {', '.join(missing)}")
    partial = given.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise ModelError(
            f"{where}: partial_rotary_factor {partial} is not supported; whole heads are rotated"
        )
    keys = [*known.needs, *(key for key in known.takes if given.get(key) is not None)]
    return Rope(float(theta), kind, tuple((key, _frozen(given[key])) for key in keys))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class _Kind:
    scale: Callable[[torch.Tensor, float, Mapping[str, Any]], torch.Tensor]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def _same(freq: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> torch.Tensor:
    return freq


def _linear(freq: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> torch.Tensor:
    return freq / float(rope["factor"])


def _llama3(freq: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wave = 2 * math.pi / freq
    blend = ((old / wave - low) / (high - low)).clamp(0.0, 1.0)
    return freq * (blend + (1 - blend) / factor)


def _yarn(freq: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (Peng et al., 2023): frequencies that turn often over the original context are kept,
    those that hardly turn are slowed by `factor`, with a linear ramp over the indices between."""
    half, old = freq.numel(), float(rope["original_max_position_embeddings"])

    def index(turns: float) -> float:
        """The (fractional) index of the frequency that makes `turns` over the old context."""
        return half * math.log(old / (turns * 2 * math.pi)) / math.log(theta)

    low = index(float(rope.get("beta_fast") or 32.0))
    high = index(float(rope.get("beta_slow") or 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freq / float(rope["factor"]) * slowed + freq * (1 - slowed)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(freq: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> torch.Tensor:
    """LongRoPE (Ding et al., 2024): every frequency has a divisor of its own."""
    factors = torch.tensor(rope.get("short_factor") or rope["long_factor"], dtype=torch.float32)
    if factors.shape != freq.shape:
        raise ValueError(f"{factors.numel()} rotary factors for {freq.numel()} frequencies")
    return freq / factors


_OLD = "original_max_position_embeddings"
_KINDS = {
    "default": _Kind(_same),
    "linear": _Kind(_linear, ("factor",)),
    "dynamic": _Kind(_same),  # up to max_position_embeddings [transformers, modeling_rope_utils]
    "llama3": _Kind(_llama3, ("factor", _OLD, "low_freq_factor", "high_freq_factor")),
    "yarn": _Kind(
        _yarn,
        ("factor", _OLD),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": _Kind(
        _longrope, ("factor", _OLD, "short_factor", "long_factor"), ("attention_factor",)
    ),
}
