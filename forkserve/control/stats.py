"""Counters of an engine, and the frozen record that `Engine.stats` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from forkserve.types import HitClass

__all__ = ["Counters", "EngineStats", "PrefilledTokens"]


@dataclass(frozen=True, slots=True)
class PrefilledTokens:
    """Rows computed, by what they were for.

    committed: as committed work.  speculative: ahead of an observation.  wasted: the part of
    speculative whose branch was aborted, cut off, or evicted.
    """

    committed: int
    speculative: int
    wasted: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot.  Pages are frames of the pool; rows are KV rows in them that some table lists.

    shared_pages: with more than one reference.  speculative_pages: on tables of speculative nodes.
    index_pages: held by the prefix index alone.  cached_tokens: rows that `open` took from it.
    hits: commits by class.  decode_steps: tokens sampled.  forced_tokens: those that a constraint
    left no choice about, which needed no pass of their own.  forward_passes: batches with a work.
    failed_passes: batches that the backend failed, whether or not their works were tried again.
    recomputed_tokens: rows computed again after an eviction or pre-emption (part of prefilled).
    """

    live_pages: int
    shared_pages: int
    speculative_pages: int
    index_pages: int
    free_pages: int
    capacity_pages: int
    live_rows: int
    sessions: int
    nodes: int
    queued: int
    prefilled_tokens: PrefilledTokens
    cached_tokens: int
    forks: int
    speculates: int
    commits: int
    joins: int
    aborts: int
    hits: Mapping[str, int]
    refusals: Mapping[str, int]
    decode_steps: int
    forced_tokens: int
    forward_passes: int
    failed_passes: int
    copied_rows: int
    evicted_nodes: int
    preemptions: int
    expired_nodes: int
    tbt_misses: int


@dataclass(slots=True)
class Counters:
    """The running totals behind `EngineStats`."""

    committed: int = 0
    speculative: int = 0
    wasted: int = 0
    cached_tokens: int = 0
    forks: int = 0
    speculates: int = 0
    commits: int = 0
    joins: int = 0
    aborts: int = 0
    decode_steps: int = 0
    forced_tokens: int = 0
    forward_passes: int = 0
    failed_passes: int = 0
    copied_rows: int = 0
    evicted_nodes: int = 0
    preemptions: int = 0
    expired_nodes: int = 0
    tbt_misses: int = 0
    hits: Counter[HitClass] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
