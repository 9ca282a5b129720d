"""The frame table: pages in flight with k branches over one trunk, and after the losers went.

Real forks and real prefills on the mock, counted in the pool; pages of 16 tokens.
"""

from __future__ import annotations

import pytest

from forkserve import Engine

from .harness import assert_nothing_left, cold, core, engine, node

P = 16
# L, k, l, tail, pages in flight
TABLE = [
    (2048, 4, 64, "auto", 144),
    (4096, 8, 128, "auto", 320),
    (2050, 4, 48, "auto", 141),
    (2050, 4, 48, "freeze", 141),
    (2050, 4, 48, "pack", 145),  # the parent's tail page counted
    (8192, 8, 32, "auto", 528),
    (1024, 6, 4, "auto", 70),
    (16384, 4, 256, "auto", 1088),
]


def fan_out(length: int, k: int, suffix: int, tail: str) -> tuple[Engine, list[int]]:
    """A trunk of `length` tokens with `k` prefilled branches of different text."""
    eng = engine(page_size=P, capacity_pages=4096, branch_cap=max(k, 6), tail=tail)
    handle = eng.open([i % 900 for i in range(length)], session="s")
    trunk = -(-length // P)
    assert eng.stats().live_pages == trunk
    kids = [
        eng.fork("s", handle.tip, f"b{i}", [(7 * i + j) % 1000 for j in range(suffix)])
        for i in range(k)
    ]
    assert eng.stats().live_pages == trunk, "a fork touched pages"
    got = eng.speculate_set("s", dict.fromkeys(kids, 1.0))
    assert [s.tokens for s in got.values()] == [suffix] * k
    while eng.drain_slack():
        pass
    eng.check()
    return eng, kids


@pytest.mark.parametrize(("length", "k", "suffix", "tail", "pages"), TABLE)
def test_pages_in_flight(length: int, k: int, suffix: int, tail: str, pages: int) -> None:
    eng, kids = fan_out(length, k, suffix, tail)
    stats = eng.stats()
    assert stats.live_pages == pages
    packed = (length % P) * k if tail == "pack" else 0
    assert stats.live_rows == length + k * suffix + packed
    assert stats.prefilled_tokens.speculative == k * suffix
    assert stats.speculative_pages == pages - -(-length // P)
    assert all(node(eng, "s", kid).speculated == suffix for kid in kids)


@pytest.mark.parametrize(("length", "k", "suffix", "tail", "pages"), TABLE)
def test_losers_leave_trunk_and_winner(
    length: int, k: int, suffix: int, tail: str, pages: int
) -> None:
    eng, kids = fan_out(length, k, suffix, tail)
    trunk = -(-length // P)
    own = (pages - trunk) // k
    freed = [eng.abort("s", kid) for kid in kids[1:]]
    assert freed == [own] * (k - 1)
    assert eng.stats().live_pages == trunk + own
    eng.check()
    winner = eng.tokens("s", kids[0])
    result = eng.commit("s", 1, winner[length:])
    assert (result.winner, result.tail, result.skipped_prefill) == (kids[0], 0, suffix)
    # A packed winner holds the rows of the trunk's last page as well: that page goes now.
    assert eng.stats().live_pages == trunk + own - (tail == "pack" and length % P > 0)
    eng.check()
    if length <= 2100:
        assert eng.generate("s", 2) == _cold_long(winner)
    assert_nothing_left(eng)


def _cold_long(prompt: list[int]) -> list[int]:
    eng = engine(page_size=64, capacity_pages=64, prefix_index=False)
    return eng.generate(eng.open(prompt).id, 2)


@pytest.mark.parametrize(("length", "k", "suffix", "tail", "pages"), TABLE[:3])
def test_commit_alone_frees_the_losers(
    length: int, k: int, suffix: int, tail: str, pages: int
) -> None:
    eng, kids = fan_out(length, k, suffix, tail)
    observed = eng.tokens("s", kids[1])[length:]
    result = eng.commit("s", 1, observed)
    assert set(result.aborted) == {kids[0], *kids[2:]}
    assert eng.stats().live_pages == -(-length // P) + (pages - -(-length // P)) // k
    assert eng.stats().prefilled_tokens.wasted == (k - 1) * suffix


def test_cold_reference_has_the_same_rows() -> None:
    """A clone of every branch would cost k times the trunk: the table is a real saving."""
    eng = engine(page_size=P, capacity_pages=4096, prefix_index=False)
    for i in range(4):
        eng.open([i % 900 for i in range(2048)] + [i] * 64)
    assert eng.stats().live_pages == 4 * (2048 + 64) // P
    assert core(eng).pool.capacity == 4096
    assert cold([1, 2], 1) == cold([1, 2], 1)


def test_rows_that_a_commit_cut_off_are_not_counted() -> None:
    """Also where somebody else, such as a store, still holds the page."""
    eng = engine(page_size=4, capacity_pages=64, prefix_index=False)
    eng.open([1, 2, 3, 4], session="s")
    kid = eng.fork("s", 1, "k", [11, 12, 13, 14, 15, 16, 17])
    eng.speculate("s", kid)
    while eng.drain_slack():
        pass
    assert eng.stats().live_rows == 4 + 7
    pool, (first, second) = core(eng).pool, node(eng, "s", kid).segments[-1].pages
    pool.pin([first, second])
    result = eng.commit("s", 1, [11, 12, 13, 14, 15])
    assert result.skipped_prefill == 5
    pool.unpin([first, second])
    assert eng.stats().live_rows == 4 + 5
    assert_nothing_left(eng)
