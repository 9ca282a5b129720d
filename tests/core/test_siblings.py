"""Many branches of one place: what a call costs, what the cap counts, and what is given back."""

from __future__ import annotations

import cProfile
import threading

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError

from .harness import assert_nothing_left, assert_same_as_cold, core, engine, node, warm
from .scenarios import PROMPT

P = 4


def calls(eng: Engine, s: str, kid: int) -> int:
    """Function calls that one `speculate` takes."""
    profile = cProfile.Profile()
    profile.enable()
    eng.speculate(s, kid)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("speculated", [False, True])
def test_a_speculate_call_costs_the_same_for_every_sibling(speculated: bool) -> None:
    config = ForkServeConfig(branch_cap=2000, max_queue=4000, capacity_pages=4000)
    eng = Engine(MockBackend(config))
    s = eng.open(PROMPT).id
    cost = []
    for i in range(600):
        kid = eng.fork(s, 1, "k", [i % 250] * 5)
        if speculated or i in (20, 599):
            cost.append(calls(eng, s, kid))
    assert cost[-1] <= 1.2 * cost[20 if speculated else 0]


def test_the_cap_counts_who_speculates_now() -> None:
    """Not who did: aborted, evicted, committed and adopted branches make room."""
    eng = engine(branch_cap=3, capacity_pages=128)
    s = eng.open(PROMPT).id
    kids = [eng.fork(s, 1, "k", [i] * 5) for i in range(9)]
    admitted = [bool(eng.speculate(s, kid)) for kid in kids[:5]]
    assert admitted == [True] * 3 + [False] * 2
    assert eng.speculate(s, kids[0]).tokens == 5, "again is no other branch"
    while eng.drain_slack():
        pass
    assert not eng.speculate(s, kids[5])
    eng.abort(s, kids[0])
    assert eng.speculate(s, kids[5])
    assert not eng.speculate(s, kids[6])
    with core(eng).lock:
        core(eng).drop_rows(eng.tree(s), node(eng, s, kids[1]))
    assert eng.speculate(s, kids[6])
    assert not eng.speculate(s, kids[7])
    eng.attempt(s, kids[2])
    assert eng.speculate(s, kids[7])
    assert not eng.speculate(s, kids[8])
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("rest", range(P))
@pytest.mark.parametrize("first", ["promote", "abort"])
@pytest.mark.parametrize("tail", ["pack", "freeze", "auto"])
def test_the_chosen_branch_keeps_no_page_too_many(rest: int, first: str, tail: str) -> None:
    """Promote and abort in either order leave what a session of that text alone would hold."""
    eng = engine(capacity_pages=128, tail=tail, prefix_index=False)
    s = eng.open([*range(8 + rest)]).id
    kids = [eng.attempt(s, eng.fork(s, 1, "k", [90 + i] * 5)) for i in range(3)]
    eng.generate_many([(s, kid) for kid in kids], 4)
    if first == "promote":
        eng.promote(s, kids[1])
    for kid in (kids[0], kids[2]):
        eng.abort(s, kid)
    if first == "abort":
        eng.promote(s, kids[1])
    eng.check()
    rows = node(eng, s, kids[1]).kv_end
    spare = 1 if tail != "pack" and rest else 0  # a shared tail page stays until upkeep
    assert -(-rows // P) <= eng.stats().live_pages <= -(-rows // P) + spare
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_text_that_a_parent_added_since_is_not_given_back() -> None:
    eng = engine(capacity_pages=128)
    s = eng.open(PROMPT).id
    kid, other = eng.fork(s, 1, "k", [1, 2, 3]), eng.fork(s, 1, "o", [4])
    warm(eng, s, kid, other)
    eng.generate(s, 6)
    rows = node(eng, s, 1).kv_end
    eng.promote(s, kid)
    eng.abort(s, other)
    assert node(eng, s, 1).kv_end == rows
    assert_same_as_cold(eng, s)
    eng.check()


@pytest.mark.parametrize("pages", [10**12, 10**18])
def test_a_pool_that_no_machine_holds(pages: int) -> None:
    with pytest.raises(ConfigError, match=rf"capacity_pages={pages} of 16 tokens need .* GiB"):
        MockBackend(ForkServeConfig(capacity_pages=pages))


def test_who_holds_the_lock() -> None:
    state = core(engine())
    seen: list[bool] = []
    assert not state.owned()
    with state.lock:
        assert state.owned()
        thread = threading.Thread(target=lambda: seen.append(state.owned()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not state.owned()
