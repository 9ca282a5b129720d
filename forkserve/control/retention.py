"""How long an idle residual keeps its KV, and what goes first when pages run out.

Pure functions.  Dropping KV never drops tokens: an expired committed leaf is prefilled again.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf

from forkserve.config import ForkServeConfig
from forkserve.errors import ConfigError
from forkserve.types import NodeMode

__all__ = ["EvictRank", "evict_key", "evict_rank", "expected_ms", "relative_idleness", "ttl_s"]

_PAGE_S = 0.05  # s of life that each page of a residual adds: a big one costs more to bring back


class EvictRank(IntEnum):
    """Order of eviction, highest first out.  SPINE pages are mapped by live children: they stay."""

    SPINE = 0
    COMMIT_LEAF = 1
    IDLE_LEAF = 2
    SPEC_LEAF = 3


_LEAF_RANK = {
    NodeMode.COMMIT: EvictRank.COMMIT_LEAF,
    NodeMode.IDLE: EvictRank.IDLE_LEAF,
    NodeMode.SPEC: EvictRank.SPEC_LEAF,
}


def ttl_s(
    t_tool_s: float,
    reload_s: float,
    queue_s: float,
    progress_p: float,
    pages: int,
    config: ForkServeConfig,
) -> float:
    """Seconds that an idle residual keeps its KV [tau].

    tau = min(tau_max, max(ttl_min, alpha * t_tool + beta * (reload + queue) / p + 0.05 * pages)):
    the expected tool time, and what losing the KV would cost (recompute or reload, and waiting for
    a slot to do it) over the probability that the branch goes on.  All times in s.
    """
    if not min(t_tool_s, reload_s, queue_s, pages) >= 0 or not 0 < progress_p <= 1:
        raise ConfigError(
            f"TTL of t_tool={t_tool_s} s, reload={reload_s} s, queue={queue_s} s, pages={pages}, "
            f"p={progress_p}: times and pages must be >= 0 and p in (0, 1]"
        )
    wanted = (
        config.ttl_alpha * t_tool_s
        + config.ttl_beta * (reload_s + queue_s) / progress_p
        + _PAGE_S * pages
    )
    return min(config.ttl_max_s, max(config.ttl_min_s, wanted))


def relative_idleness(node_s: float, session_s: float) -> float:
    """Time since the node decoded over time since its session did [iota]; inf for an active one."""
    if session_s <= 0:
        return inf if node_s > 0 else 1.0
    return node_s / session_s


def evict_rank(mode: NodeMode, live_children: int) -> EvictRank:
    """Class of a node.  Whatever its mode, a node with live children carries their trunk."""
    if mode is NodeMode.DEAD:
        raise ConfigError("a dead node has no pages to evict")
    return EvictRank.SPINE if live_children else _LEAF_RANK[mode]


def evict_key(
    mode: NodeMode, live_children: int, node_s: float, session_s: float
) -> tuple[int, float]:
    """Sort key, smallest first out: by `EvictRank`, then the relatively most idle."""
    return -evict_rank(mode, live_children), -relative_idleness(node_s, session_s)


def expected_ms(recompute_ms: float, idle_ms: float) -> float:
    """What dropping rows is likely to cost, per ms: less for those that nobody asked for in long.

    recompute_ms: time to bring them back.  A node that was idle for t ms is taken to be needed
    again in about another t ms.
    """
    return recompute_ms / (idle_ms + 1.0)
