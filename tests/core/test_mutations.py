"""Would the tests notice?  Every planted fault must make one of the fixed scenarios fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import scenarios
from .faults import FAULTS, forged_digests
from .harness import only_for_now


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda s: s.__name__)
def test_scenario_passes_without_a_fault(scenario: Callable[[], None]) -> None:
    scenario()


# Not those that count hits: a collision turns them into misses.
SHARING = (scenarios.prefix_sharing, scenarios.entries_leave)


@pytest.mark.parametrize(
    "scenario", [s for s in scenarios.ALL if s not in SHARING], ids=lambda s: s.__name__
)
def test_colliding_digests_are_harmless(scenario: Callable[[], None]) -> None:
    """The collisions share no more pages, but no wrong one either."""
    with forged_digests():
        scenario()


@pytest.fixture(scope="module")
def sound() -> None:
    """The scenarios ran without a fault, so the right answers are known."""
    for scenario in scenarios.ALL:
        scenario()


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str) -> None:
    noticed = []
    with only_for_now(), FAULTS[name]():
        for scenario in scenarios.ALL:
            try:
                scenario()
            except Exception as error:  # any failure counts: that is the point
                noticed.append((scenario.__name__, type(error).__name__))
                break
    assert noticed, f"no scenario notices that {name}"
    for scenario in scenarios.ALL[:3]:
        scenario()  # the patch is gone
