"""The page ledger: what was promised, to the page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.ledger import Ledger
from forkserve.errors import ConfigError


def test_promises_add_up_and_leave_by_settling() -> None:
    ledger = Ledger()
    ledger.reserve("a", 1, 10)
    ledger.reserve("a", 1, 2)
    ledger.reserve("b", 1, 5)
    assert (ledger.total, ledger.held("a", 1), ledger.held("b", 1)) == (17, 12, 5)
    assert ledger.settle("a", 1, 4) == 8
    assert ledger.total == 13
    assert ledger.release("a", 1) == 8
    assert ledger.release("a", 1) == 0
    assert (ledger.total, ledger.held("a", 1), ledger.held("b", 1)) == (5, 0, 5)


def test_more_pages_than_promised_do_not_make_it_negative() -> None:
    ledger = Ledger()
    ledger.reserve("a", 1, 2)
    ledger.reserve("a", 2, 3)
    assert ledger.settle("a", 1, 9) == 0
    assert ledger.settle("a", 7, 9) == 0
    assert ledger.total == 3


def test_a_session_is_forgotten_whole() -> None:
    ledger = Ledger()
    ledger.reserve("a", 1, 2)
    ledger.reserve("a", 2, 3)
    ledger.reserve("b", 2, 4)
    assert ledger.release_session("a") == 5
    assert ledger.release_session("a") == 0
    assert ledger.total == 4


def test_negative_pages_are_an_error() -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError):
        ledger.reserve("a", 1, -1)
    with pytest.raises(ConfigError):
        ledger.settle("a", 1, -1)


STEP = st.tuples(
    st.sampled_from(["reserve", "settle", "release", "release_session"]),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.integers(0, 5),
)


@given(st.lists(STEP, max_size=40))
def test_the_ledger_is_a_sum_that_never_goes_below_zero(
    steps: list[tuple[str, str, int, int]],
) -> None:
    ledger, model = Ledger(), dict[tuple[str, int], int]()
    for verb, session, node, pages in steps:
        key = session, node
        if verb == "reserve":
            ledger.reserve(session, node, pages)
            model[key] = model.get(key, 0) + pages
        elif verb == "settle":
            model[key] = max(0, model.get(key, 0) - pages)
            assert ledger.settle(session, node, pages) == model[key]
        elif verb == "release":
            assert ledger.release(session, node) == model.pop(key, 0)
        else:
            gone = [k for k in model if k[0] == session]
            assert ledger.release_session(session) == sum(model.pop(k) for k in gone)
        assert ledger.total == sum(model.values()) >= 0
        assert all(ledger.held(*k) == pages for k, pages in model.items())
    # Nothing is kept of nodes that hold nothing.
    assert sum(len(nodes) for nodes in ledger._held.values()) == sum(v > 0 for v in model.values())
