"""Values that cross layers: enums, sampling parameters, and the batch a backend executes.

Nothing here holds state.  Tokens are ints, positions count from 0 on every path from the root.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forkserve.errors import ConfigError

__all__ = [
    "Batch",
    "BatchResult",
    "Constraint",
    "HitClass",
    "JobClass",
    "JoinPolicy",
    "ModelInfo",
    "NodeMode",
    "RowCopy",
    "SampleSpec",
    "SamplingParams",
    "Span",
    "Tokens",
    "Work",
    "WorkKind",
    "WorkResult",
    "derive_seed",
]

Tokens = Sequence[int]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class NodeMode(Enum):
    """Life of a node.  Dead never revives; only Commit nodes reach the sampler."""

    SPEC = "spec"
    COMMIT = "commit"
    IDLE = "idle"
    DEAD = "dead"


class JoinPolicy(Enum):
    """How `join` builds its body from the inputs."""

    ALL = "all"
    FIRST = "first"
    KOFN = "kofn"
    CONCAT = "concat"
    WINNER = "winner"
    SUMMARY = "summary"


class HitClass(Enum):
    """What a commit found: how much of the observed text had been speculated."""

    KNOWN_SUFFIX = "known_suffix"  # the match ends inside text the harness knew for certain
    RESIDUAL_PARTIAL = "residual_partial"  # a guess was right up to a point
    RESIDUAL_FULL = "residual_full"  # a guess covered the whole observation
    MISS = "miss"  # no child added a token: a new node was made


class WorkKind(IntEnum):
    """Certainty of a piece of speculation.  Known text goes before guesses."""

    KNOWN = 0
    RESIDUAL = 1


class JobClass(IntEnum):
    """Scheduling class.  The first three are committed work, SPEC takes what they leave."""

    DECODE = 0
    TAIL = 1
    ROOT = 2
    SPEC = 3


class Constraint(Protocol):
    """Restricts sampling: a choice list, a grammar, a schema."""

    def allowed(self, generated: Tokens) -> Sequence[int] | IntArray | None:
        """Ids that may follow `generated` (tokens sampled so far); None allows every id.

        An empty sequence means that nothing may follow: generation ends before sampling.
        Must be a pure function of `generated`.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.  The defaults are greedy.

    temperature: 0 is greedy.  top_k: 0 keeps all ids.  top_p: nucleus mass in (0, 1].
    min_p: drops ids below ``min_p * p_max``, in [0, 1).
    logit_bias: added to the logits of these ids, each in [-100, 100]; a mapping, kept as pairs.
    repetition_penalty: in [1e-6, 1e6]; logits of ids that stand anywhere on the path, prompt
    included, are divided by it where positive and multiplied where negative (as Hugging Face and
    vLLM do).
    presence_penalty, frequency_penalty: in [-2, 2]; taken off the logits of ids that were output,
    once, and once for each time (as OpenAI and vLLM do).
    output_start: the position from which on what stands counts as output; None is where the
    generation begins.  One that goes on with an earlier one's text (a fork in its middle, a resumed
    session) draws as that would have if it is given the place where that one began.
    seed: None derives one from the session (`derive_seed`); the draw of token i depends on the
    tokens before it, these parameters and (seed, position) alone, never on the batch.
    stop: strings that end the text and are not part of it.  stop_ids: ids that end it.
    ignore_eos: go on past the model's end token.  logprobs: also return each token's log p, of the
    raw distribution.  top_logprobs: those of the n likeliest ids as well, n up to 20.
    constraint: what may follow (`forkserve.engine.constraints`); asked after each token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    constraint: Constraint | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    output_start: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} must be a tuple of strings: stop=('...',)")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))  # hashable, in id order
        ids = self.stop_ids if isinstance(self.stop_ids, tuple) else (None,)
        for name, ok in (
            ("stop_ids", all(isinstance(i, Integral) for i in ids)),
            *((n, isinstance(getattr(self, n), _FLAG)) for n in ("ignore_eos", "logprobs")),
            *((n, isinstance(getattr(self, n), Integral)) for n in ("top_k", "top_logprobs")),
            *(
                (n, getattr(self, n) is None or isinstance(getattr(self, n), Integral))
                for n in ("seed", "output_start")
            ),
            *((n, isinstance(getattr(self, n), Real)) for n in _REALS),
            ("constraint", self.constraint is None or hasattr(self.constraint, "allowed")),
        ):
            if not ok:
                raise ConfigError(
                    f"SamplingParams.{name}={getattr(self, name)!r} is of the wrong type"
                )
        for name, ok, allowed in (
            ("temperature", 0.0 <= self.temperature < inf, "[0, inf)"),
            ("top_k", self.top_k >= 0, ">= 0, 0 keeps all"),
            ("top_p", 0.0 < self.top_p <= 1.0, "(0, 1]"),
            ("min_p", 0.0 <= self.min_p < 1.0, "[0, 1)"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("logit_bias", all(abs(b) <= 100 for _, b in self.biases), "[-100, 100]"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "[1e-6, 1e6]"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "[-2, 2]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "[-2, 2]"),
            ("output_start", (self.output_start or 0) >= 0, ">= 0"),
            ("top_logprobs", 0 <= self.top_logprobs <= _TOP_LOGPROBS, f"[0, {_TOP_LOGPROBS}]"),
        ):
            if not ok:
                value = getattr(self, name)
                raise ConfigError(f"SamplingParams.{name}={value!r} is out of range: {allowed}")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs in id order."""
        return self.logit_bias  # type: ignore[return-value]  # set so by __post_init__

    @property
    def counts_tokens(self) -> bool:
        """A penalty reads which tokens stand on the path."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


_REALS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_TOP_LOGPROBS = 20
_FLAG = (bool, np.bool_)


def _pairs(bias: object) -> tuple[tuple[int, float], ...]:
    """A logit bias as (id, bias) pairs in id order."""
    try:
        pairs = [*(bias.items() if isinstance(bias, Mapping) else bias)]  # type: ignore[misc]
        checked = {operator.index(i): float(b) for i, b in pairs}
    except (TypeError, ValueError):
        checked = None
    if checked is None or len(checked) < len(pairs):
        raise ConfigError(f"logit_bias={bias!r} must map token ids to numbers, each id once")
    return tuple(sorted(checked.items()))


GREEDY = SamplingParams()


@dataclass(slots=True)
class SampleSpec:
    """One draw: what to sample after a work's last token.

    seed and position fix the random number.  request and step name the generation and how many
    tokens it has already produced (a scripted mock replies by them).  allowed: ids permitted by a
    constraint, or None.  seen: ids that stand on the path, each once, and counts: how often each
    was output; both for penalties only (`forkserve.engine.counts`).
    """

    params: SamplingParams
    seed: int
    position: int
    request: int
    step: int
    allowed: Sequence[int] | IntArray | None = None
    seen: IntArray | None = None
    counts: IntArray | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the id of the largest logit is asked for."""
        params = self.params
        return not (
            params.temperature or params.logprobs or params.logit_bias or params.counts_tokens
        ) and (self.allowed is None)


@dataclass(slots=True)
class Span:
    """`length` consecutive KV rows, the first at absolute position `start`.

    Row i of the span (position start + i) is slot ``(offset + i) % P`` of page
    ``pages[(offset + i) // P]``.  `pages` may be longer than needed and must not be changed while a
    batch runs.  Two spans of one batch with equal `key` name the same rows from the same start
    (their lengths may differ): a backend reads them once for all works.

    Nobody changes a span.  It is not frozen, as every pass builds some for each work, and a frozen
    record takes three times as long to build; so with `SampleSpec`.
    """

    key: Hashable
    pages: Sequence[int]
    start: int
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy `rows` KV rows of every layer from one page to another (pages may not overlap)."""

    src_page: int
    src_row: int
    dst_page: int
    dst_row: int
    rows: int


@dataclass(slots=True)
class Work:
    """One node's share of a forward pass: run `tokens` at positions start, start+1, ...

    context: spans that tile positions [0, start) in order, rows already written.  For a model with
    a window (`ModelInfo`) they may begin later, at or before the first row that `tokens` see.
    write: where the new rows go (``write.start == start``, ``write.length == len(tokens)``), or
    None when the rows exist already and only the logits are wanted (the last token replayed).
    Attention among `tokens` is causal and uses the fresh rows.
    sample: draw one token after the last position.  logits: also return its logits row;
    all_logits: return a row for every token.
    """

    session: str
    node: int
    tokens: Tokens
    start: int
    context: tuple[Span, ...]
    write: Span | None
    sample: SampleSpec | None = None
    logits: bool = False
    all_logits: bool = False
    speculative: bool = False


@dataclass(slots=True)
class Batch:
    """One forward pass.  Row copies happen first, in order; then all works at once.

    No work reads rows that another work of the same batch writes.

    standing: page -> how many of its first slots hold rows that no work may write, if the backend
    asks for it (`debug`).
    """

    works: list[Work] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    standing: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class WorkResult:
    """token and logprob if a sample was asked; logits [V], or [n, V] for all_logits.

    top: (id, log p) of the likeliest ids, best first, if `top_logprobs` asks for them.
    """

    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: FloatArray | None = None


@dataclass(slots=True)
class BatchResult:
    """results[i] belongs to works[i].  elapsed_ms: time of the pass on the backend's clock."""

    results: list[WorkResult]
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the control plane must know about a model.

    kv_bytes_per_token: bytes of one KV row over all layers.  eos_ids: ids that end a generation.
    extra: what else is worth knowing.  One entry means something to control: "window", the rows
    that any layer sees at most, its own included, if every layer has a sliding window (0: not so).
    """

    name: str
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    kv_bytes_per_token: int
    device: str
    dtype: str
    extra: dict[str, Any] = field(default_factory=dict)


def derive_seed(seed: int, *path: int | str) -> int:
    """The seed of child `path` under `seed`: the first 8 bytes of blake2b over both, as an int.

    The same (seed, path) gives the same child seed in every process; two children differ.
    """
    text = "/".join([str(seed), *(repr(p) for p in path)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
