"""The prefix index: what `open` gets by reference, and what must never be shared."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import assert_nothing_left, assert_same_as_cold, core, engine, node, tick
from .scenarios import PROMPT, WRAP

P = 4


def test_a_published_prefix_is_taken_by_reference() -> None:
    scenarios.prefix_sharing()


def test_equal_pages_are_folded_into_one_frame() -> None:
    scenarios.deduped()


def test_entries_leave_with_their_pages() -> None:
    scenarios.entries_leave()


def test_a_frozen_spine_is_realigned_then_published() -> None:
    scenarios.realigned()


@pytest.mark.parametrize("length", range(1, 4 * P + 2))
def test_one_token_is_always_left(length: int) -> None:
    eng = engine()
    prompt = [*range(length)]
    eng.open(prompt)
    for _ in range(4):  # the third identical request has been wrong elsewhere
        again = eng.open(prompt)
        assert again.cached_tokens == (length - 1) // P * P
        assert_same_as_cold(eng, again.id)
        eng.close(again.id)


@pytest.mark.parametrize("same", [0, 1, P - 1, P, P + 1, 2 * P, 2 * P + 1])
def test_only_whole_equal_pages_are_shared(same: int) -> None:
    eng = engine()
    first = [*range(3 * P)]
    eng.open(first)
    other = eng.open(first[:same] + [900] * (3 * P - same))
    assert other.cached_tokens == same // P * P
    assert_same_as_cold(eng, other.id)
    eng.check()


@pytest.mark.parametrize(
    ("one", "two", "shares"),
    [
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"tenant": "a", "salt": "x"}, {"tenant": "b", "salt": "x"}, True),
        ({"salt": "x"}, {"salt": "y"}, False),
        ({"salt": ""}, {"salt": "default"}, False),
        ({}, {"salt": "default"}, True),
    ],
)
def test_salts_never_share(one: dict[str, str], two: dict[str, str], shares: bool) -> None:
    eng = engine()
    first = eng.open(PROMPT, **one)
    eng.commit(first.id, 1, WRAP)
    assert_same_as_cold(eng, first.id)
    second = eng.open(PROMPT, **two)
    assert bool(second.cached_tokens) is shares
    # On the commit path too: equal text of another salt keeps a frame of its own.
    eng.commit(second.id, 1, WRAP)
    assert_same_as_cold(eng, second.id)
    pages = [
        {p for n in eng.tree(h.id) for g in n.segments for p in g.pages} for h in (first, second)
    ]
    assert bool(pages[0] & pages[1]) is shares
    assert_nothing_left(eng)


def test_commits_are_published_and_guesses_are_not() -> None:
    eng = engine(tail="pack")
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", [50 + i for i in range(10)])
    eng.speculate(s, kid)
    while eng.drain_slack():
        eng.check()
    guess = eng.tokens(s, kid)
    assert eng.open(guess).cached_tokens == 8  # the trunk's pages only
    eng.commit(s, 1, guess[len(PROMPT) :])
    assert eng.open([*guess, 1]).cached_tokens == 20
    eng.check()


def test_attempts_are_not_published_until_adopted() -> None:
    eng = engine(tail="pack")
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", WRAP)
    eng.attempt(s, kid)
    answer = eng.generate(s, 6, node=kid)
    text = [*PROMPT, *WRAP, *answer]
    assert eng.open(text).cached_tokens == 8
    eng.promote(s, kid)
    assert eng.open(text).cached_tokens == 20


def test_least_recently_used_goes_first() -> None:
    eng = engine(capacity_pages=12)
    for first in (0, 100, 200):
        eng.close(eng.open(range(first, first + 9)).id)
    eng.close(eng.open(range(9)).id)  # used again: 100.. is the oldest now
    assert eng.stats().index_pages == 6
    eng.close(eng.open(range(300, 332)).id)
    hits = {
        first: eng.open(range(first, first + 9), prefill=False).cached_tokens for first in (100, 0)
    }
    assert hits[100] < hits[0] or hits[100] == hits[0] == 0
    eng.check()


def test_pressure_evicts_cached_pages_from_the_end_of_a_chain() -> None:
    eng = engine(capacity_pages=8)
    eng.close(eng.open(range(4 * P + 1)).id)
    eng.close(eng.open(range(500, 500 + 5 * P)).id)
    left = eng.open(range(4 * P + 1), prefill=False).cached_tokens
    assert 0 < left < 4 * P
    eng.check()


def test_an_evicted_root_takes_what_the_index_still_holds() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    with core(eng).lock:
        core(eng).drop_rows(eng.tree(s), node(eng, s, 1))
    before = eng.stats().prefilled_tokens.committed
    assert_same_as_cold(eng, s)
    assert eng.stats().prefilled_tokens.committed - before <= len(PROMPT) - 8


def test_turned_off_it_holds_nothing() -> None:
    eng = engine(prefix_index=False)
    eng.close(eng.open(PROMPT).id)
    assert eng.stats().live_pages == 0
    assert eng.open(PROMPT).cached_tokens == 0


def test_upkeep_needs_no_complete_tip() -> None:
    """After a generation the last token has no row yet: that must not stop realignment."""
    eng = engine(tail="freeze")
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", WRAP)
    eng.speculate(s, kid)
    while eng.drain_slack():
        pass
    eng.commit(s, 1, WRAP)
    eng.generate(s, 6)
    for _ in range(2):
        tick(eng)
    assert eng.open([*eng.tokens(s), 1]).cached_tokens == 20
    eng.check()
