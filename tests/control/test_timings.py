"""Expected tool times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.timings import IdleTimes
from forkserve.errors import ConfigError


def test_default_until_something_was_seen() -> None:
    times = IdleTimes(0.25)
    assert times.expect("ls", 700.0) == 700.0
    times.observe("ls", 100.0)
    assert times.expect("ls", 700.0) == 100.0
    assert times.expect("cat", 700.0) == 700.0


@given(
    ms=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    quantile=st.floats(0, 1),
)
def test_the_quantile_is_numpys(ms: list[float], quantile: float) -> None:
    times = IdleTimes(quantile)
    for value in ms:
        times.observe("t", value)
    assert times.expect("t", 0.0) == pytest.approx(float(np.quantile(ms, quantile)))


def test_only_the_window_counts_and_tools_are_bounded() -> None:
    times = IdleTimes(0.5, window=3)
    for value in (1000.0, 1.0, 2.0, 3.0):
        times.observe("t", value)
    assert times.expect("t", 0.0) == 2.0
    for i in range(300):
        times.observe(f"tool{i}", 1.0)
    assert times.expect("t", -1.0) == -1.0
    assert len(times._times) == 256


@pytest.mark.parametrize("ms", [-1.0, math.nan, math.inf])
def test_impossible_times(ms: float) -> None:
    with pytest.raises(ConfigError, match="'t'"):
        IdleTimes(0.5).observe("t", ms)


@pytest.mark.parametrize(("quantile", "window"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_bad_arguments(quantile: float, window: int) -> None:
    with pytest.raises(ConfigError):
        IdleTimes(quantile, window)
