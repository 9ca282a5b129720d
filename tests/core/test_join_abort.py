"""How branches end: join, abort, cascade, lazy abort."""

from __future__ import annotations

import pytest

from forkserve.types import NodeMode

from . import scenarios
from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    engine,
    modes,
    node,
    refs,
    snapshot,
    warm,
)
from .scenarios import PROMPT

LONG = [100 + i for i in range(12)]


# ---------------------------------------------------------------- join


@pytest.mark.parametrize(
    ("policy", "options", "text", "dead"),
    [
        ("all", {}, [60, 61, 70, 80], ()),
        ("all", {"blend": [1, 2]}, [1, 2], ()),
        ("all", {"scaffold": [3]}, [3, 60, 61, 70, 80], ()),
        ("concat", {}, [60, 61, 70, 80], ()),
        ("first", {}, [60, 61], (3, 4)),
        ("first", {"scaffold": [3]}, [3, 60, 61], (3, 4)),
        ("winner", {"k": 1}, [70], (2, 4)),
        ("winner", {"k": 2, "scaffold": [3]}, [3, 80], (2, 3)),
        ("kofn", {"k": 2}, [60, 61, 70], (4,)),
        ("kofn", {"k": 1, "blend": [9]}, [9], (3, 4)),
        ("summary", {"blend": [9, 8], "scaffold": [3]}, [3, 9, 8], ()),
    ],
)
def test_join_policies(
    policy: str, options: dict[str, object], text: list[int], dead: tuple[int, ...]
) -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kids = [eng.fork(s, 1, "x", body) for body in ([60, 61], [70], [80])]
    warm(eng, s, *kids)
    result = eng.join(s, kids, policy, **options)  # type: ignore[arg-type]
    assert set(result.aborted) == set(dead)
    assert eng.tokens(s) == PROMPT + text
    assert eng.tip(s) == result.node
    for kid in set(kids) - set(dead) - {result.node}:
        assert modes(eng, s)[kid] is NodeMode.SPEC
    assert node(eng, s, 1).generation == 1
    eng.check()
    assert_same_as_cold(eng, s, 5)
    assert_nothing_left(eng)


def test_join_reuses_what_it_shares() -> None:
    scenarios.joins()


def test_join_names_every_dead_node_once() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    top = eng.fork(s, 1, "a", [50])
    below, last = eng.fork(s, top, "b", [51]), eng.fork(s, 1, "c", [52])
    result = eng.join(s, [last, top, below], "kofn", k=1, parent=1, scaffold=[3])
    assert sorted(result.aborted) == [top, below]


# ---------------------------------------------------------------- abort


def test_cascade_stops_where_something_lives() -> None:
    """Root with live A, B and a branch C of depth 2 whose four leaves die."""
    eng = engine()
    s = eng.open(PROMPT).id
    a, b, c = (eng.fork(s, 1, x, [i]) for i, x in enumerate("ABC"))
    c1, c2 = (eng.fork(s, c, x, [9]) for x in ("C1", "C2"))
    leaves = [eng.fork(s, parent, "leaf", [7]) for parent in (c1, c1, c2, c2)]
    for leaf in leaves[:3]:
        eng.abort(s, leaf)
    assert set(modes(eng, s)) == {1, a, b, c, c2, leaves[3]}
    eng.abort(s, leaves[3])
    assert set(modes(eng, s)) == {1, a, b}


def test_cascade_can_be_turned_off_and_stops_at_attempts() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    top = eng.fork(s, 1, "a", [1])
    eng.abort(s, eng.fork(s, top, "b", [2]), cascade=False)
    assert top in modes(eng, s)
    eng.attempt(s, top)
    eng.abort(s, eng.fork(s, top, "b", [2]))
    assert top in modes(eng, s)


def test_lazy_abort_touches_no_page_until_drained() -> None:
    states = []
    for lazy in (True, False):
        eng = engine()
        s = eng.open(PROMPT).id
        kid = eng.fork(s, 1, "k", LONG)
        warm(eng, s, kid)
        before = refs(eng)
        freed = eng.abort(s, kid, lazy=lazy)
        if lazy:
            assert freed == 0
            assert refs(eng) == before
            eng.check()
            freed = eng.drain_aborts()
        assert freed == 4
        states.append(refs(eng))
    assert states[0] == states[1]


def test_abort_of_a_dead_node_does_nothing() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", LONG)
    eng.abort(s, kid)
    before = snapshot(eng, s)
    assert eng.abort(s, kid) == 0
    assert snapshot(eng, s) == before


def test_a_line_goes_back_to_its_nearest_live_node() -> None:
    """Aborting the middle of an attempt's chain leaves the attempt usable."""
    eng = engine()
    s = eng.open(PROMPT).id
    top = eng.fork(s, 1, "a", [60])
    eng.attempt(s, top)
    middle = eng.commit(s, top, [61]).winner
    eng.commit(s, middle, [62])
    eng.abort(s, middle)
    assert {n.id for n in eng.tree(s).tips.values()} == {1, top}
    assert eng.generate(s, 3, node=top) == cold([*PROMPT, 60], 3)
