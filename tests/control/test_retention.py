"""TTL formula and order of eviction."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.config import ForkServeConfig
from forkserve.control.retention import (
    EvictRank,
    evict_key,
    evict_rank,
    relative_idleness,
    ttl_s,
)
from forkserve.errors import ConfigError
from forkserve.types import NodeMode

CONFIG = ForkServeConfig()  # alpha 1.2, beta 1.0, min 0.05 s, max 8 s


@pytest.mark.parametrize(
    ("t_tool", "reload", "queue", "p", "pages", "tau"),
    [
        (1.0, 0.0, 0.0, 1.0, 0, 1.2),
        (1.0, 0.3, 0.1, 1.0, 0, 1.6),
        (1.0, 0.3, 0.1, 0.5, 0, 2.0),
        (1.0, 0.3, 0.1, 0.5, 10, 2.5),
        (0.0, 0.0, 0.0, 1.0, 0, 0.05),  # floor
        (0.0, 0.0, 0.0, 1.0, 3, 0.15),
        (60.0, 0.0, 0.0, 1.0, 0, 8.0),  # cap
        (0.0, 1.0, 0.0, 0.001, 0, 8.0),
        (math.inf, 0.0, 0.0, 1.0, 0, 8.0),
    ],
)
def test_ttl_table(
    t_tool: float, reload: float, queue: float, p: float, pages: int, tau: float
) -> None:
    assert ttl_s(t_tool, reload, queue, p, pages, CONFIG) == pytest.approx(tau)


@pytest.mark.parametrize(
    "values",
    [(-1, 0, 0, 1, 0), (0, -1, 0, 1, 0), (0, 0, -1, 1, 0), (0, 0, 0, 0, 0), (0, 0, 0, 2, 0),
     (0, 0, 0, 1, -1)],
)  # fmt: skip
def test_bad_ttl_arguments(values: tuple[float, float, float, float, int]) -> None:
    with pytest.raises(ConfigError, match="TTL"):
        ttl_s(*values, CONFIG)


@given(
    t=st.floats(0, 1e6), r=st.floats(0, 1e6), q=st.floats(0, 1e6), p=st.floats(0.01, 1),
    pages=st.integers(0, 10**6), floor=st.floats(0, 20),
)  # fmt: skip
def test_ttl_stays_within_its_bounds(
    t: float, r: float, q: float, p: float, pages: int, floor: float
) -> None:
    config = CONFIG.replace(ttl_min_s=floor)
    tau = ttl_s(t, r, q, p, pages, config)
    assert min(floor, config.ttl_max_s) <= tau <= config.ttl_max_s


def test_rank_of_leaves_and_of_trunks() -> None:
    assert evict_rank(NodeMode.SPEC, 0) is EvictRank.SPEC_LEAF
    assert evict_rank(NodeMode.IDLE, 0) is EvictRank.IDLE_LEAF
    assert evict_rank(NodeMode.COMMIT, 0) is EvictRank.COMMIT_LEAF
    for mode in (NodeMode.SPEC, NodeMode.IDLE, NodeMode.COMMIT):
        assert evict_rank(mode, 1) is EvictRank.SPINE
    with pytest.raises(ConfigError, match="dead"):
        evict_rank(NodeMode.DEAD, 0)


def test_speculation_goes_first_and_the_most_idle_of_equals() -> None:
    nodes = {
        "spine": (NodeMode.COMMIT, 2, 100.0, 1.0),
        "commit": (NodeMode.COMMIT, 0, 100.0, 1.0),
        "idle-fresh": (NodeMode.IDLE, 0, 3.0, 2.0),
        "idle-stale": (NodeMode.IDLE, 0, 9.0, 2.0),
        "spec": (NodeMode.SPEC, 0, 0.0, 2.0),
    }
    order = sorted(nodes, key=lambda name: evict_key(*nodes[name]))
    assert order == ["spec", "idle-stale", "idle-fresh", "commit", "spine"]


def test_relative_idleness() -> None:
    assert relative_idleness(6.0, 2.0) == 3.0
    assert relative_idleness(2.0, 2.0) == 1.0
    assert relative_idleness(1.0, 0.0) == math.inf
    assert relative_idleness(0.0, 0.0) == 1.0
