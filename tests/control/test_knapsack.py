"""Greedy and exact against brute force."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.knapsack import Item, exact, greedy


def feasible(
    items: list[Item], chosen: tuple[int, ...], pages: int, start: float, rooms: dict[str, int]
) -> bool:
    """True if the items, run in this order, keep pages, deadlines and group limits."""
    now, used, groups = start, 0, dict(rooms)
    for i in chosen:
        now += items[i].ms
        used += items[i].pages
        group = items[i].group
        if group in groups:
            groups[group] -= 1
            if groups[group] < 0:
                return False
        if now > items[i].deadline_ms or used > pages:
            return False
    return True


def worth(items: list[Item], chosen: tuple[int, ...]) -> float:
    return sum(items[i].net for i in chosen)


def brute(items: list[Item], pages: int, start: float, rooms: dict[str, int]) -> float:
    subsets = (c for n in range(len(items) + 1) for c in combinations(range(len(items)), n))
    return max(worth(items, c) for c in subsets if feasible(items, c, pages, start, rooms))


def some_items(
    deadline: st.SearchStrategy[float], most_pages: int = 12
) -> st.SearchStrategy[list[Item]]:
    item = st.builds(
        Item,
        gain=st.integers(0, 100).map(float),
        cost=st.integers(0, 40).map(float),
        pages=st.integers(0, most_pages),
        ms=st.integers(0, 30).map(float),
        deadline_ms=deadline,
        group=st.sampled_from([None, "a", "b"]),
    )
    return st.lists(item, max_size=8)


ROOMS = st.fixed_dictionaries({}, optional={"a": st.integers(0, 3), "b": st.integers(0, 3)})


@given(
    items=some_items(st.sampled_from([20.0, 45.0, inf])),
    pages=st.integers(0, 30),
    start=st.integers(0, 10).map(float),
    rooms=ROOMS,
)
def test_exact_is_brute_force(
    items: list[Item], pages: int, start: float, rooms: dict[str, int]
) -> None:
    chosen = exact(items, pages, start, rooms)
    assert list(chosen) == sorted(set(chosen))
    assert feasible(items, chosen, pages, start, rooms)
    assert worth(items, chosen) == brute(items, pages, start, rooms)


@given(
    items=some_items(st.sampled_from([20.0, 45.0, inf])),
    pages=st.integers(0, 30),
    start=st.integers(0, 10).map(float),
    rooms=ROOMS,
)
def test_greedy_keeps_every_limit_and_takes_something_if_it_can(
    items: list[Item], pages: int, start: float, rooms: dict[str, int]
) -> None:
    chosen = greedy(items, pages, start, rooms)
    assert len(set(chosen)) == len(chosen)
    assert feasible(items, chosen, pages, start, rooms)
    assert (worth(items, chosen) > 0) == (brute(items, pages, start, rooms) > 0)


@given(items=some_items(st.just(inf)), pages=st.integers(0, 30))
def test_greedy_reaches_half_when_pages_are_scarce(items: list[Item], pages: int) -> None:
    assert worth(items, greedy(items, pages)) >= brute(items, pages, 0.0, {}) / 2


@given(items=some_items(st.just(60.0), most_pages=0))
def test_greedy_reaches_half_when_time_is_scarce(items: list[Item]) -> None:
    assert worth(items, greedy(items, 0)) >= brute(items, 0, 0.0, {}) / 2


@given(items=some_items(st.just(60.0)), pages=st.integers(0, 30))
def test_greedy_reaches_a_quarter_when_both_are_scarce(items: list[Item], pages: int) -> None:
    assert worth(items, greedy(items, pages)) >= brute(items, pages, 0.0, {}) / 4


def test_the_single_best_item_guards_greedy() -> None:
    # Either way of counting density puts the crumb first, and it shuts the loaf out.
    items = [Item(20.0, 0.1, 1, 0.0), Item(99.0, 9.0, 10, 0.0)]
    assert greedy(items, 10) == (1,)
    assert exact(items, 10) == (1,)


def test_items_that_cost_more_than_they_gain_stay_out() -> None:
    items = [Item(1.0, 1.0, 0, 0.0), Item(1.0, 2.0, 0, 0.0)]
    assert greedy(items, 10) == exact(items, 10) == ()


def test_density_is_gain_per_cost_then_per_ms() -> None:
    assert Item(6.0, 2.0, 0, 3.0).density == (3.0, 2.0)
    assert Item(6.0, 0.0, 0, 3.0).density == (inf, 2.0)
    assert Item(6.0, 0.0, 0, 0.0).density == (inf, inf)


def test_a_dozen_tight_items_stay_cheap() -> None:
    items = [Item(10.0 + i % 5, 1.0, 3 + i % 4, 5.0, 40.0) for i in range(12)]
    assert worth(items, exact(items, 20)) == pytest.approx(brute(items, 20, 0.0, {}))
