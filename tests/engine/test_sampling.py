"""The sampler every backend shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve.engine.sampling import logprobs, sample, uniform
from forkserve.errors import BackendError
from forkserve.types import SampleSpec, SamplingParams

V = 40


def logits(seed: int = 0, size: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def spec(seed: int = 0, position: int = 0, allowed: object = None, **params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, position, 0, 0, allowed)  # type: ignore[arg-type]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def draws(x: np.ndarray, count: int = 400, **params: object) -> list[int]:
    return [sample(x, spec(7, i, **params)) for i in range(count)]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    x = np.zeros(9, np.float32)
    x[[3, 5, 8]] = 2.0
    assert sample(x, spec()) == 3
    assert sample(x, spec(allowed=[8, 5, 0])) == 5


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(-(2**70), 2**70), st.integers(0, 10**9))
def test_a_draw_is_a_function_of_seed_and_position(world: int, seed: int, position: int) -> None:
    x = logits(world)
    one = spec(seed, position, temperature=0.8, top_p=0.9)
    token = sample(x, one)
    sample(logits(world + 1), spec(seed + 1, position, temperature=1.0))  # history does not matter
    assert sample(x.copy(), one) == token
    assert 0.0 <= uniform(seed, position) < 1.0


def test_seeds_and_positions_differ() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert abs(np.mean(list(numbers)) - 0.5) < 0.02


def test_frequencies_follow_the_distribution() -> None:
    x = logits(3, 6)
    for temperature in (0.5, 1.0, 2.0):
        counts = np.bincount(draws(x, 4000, temperature=temperature), minlength=6) / 4000
        np.testing.assert_allclose(counts, softmax(x / temperature), atol=0.03)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, V + 5), st.floats(0.05, 1.0), st.floats(0.0, 0.95))
def test_filters(world: int, top_k: int, top_p: float, min_p: float) -> None:
    x = logits(world)
    p = softmax(x)
    order = np.argsort(-x, kind="stable")
    kept = order[:top_k]
    share = p[kept] / p[kept].sum()
    kept = kept[np.cumsum(share) - share < top_p + 1e-9]
    kept = set(kept[p[kept] >= min_p * p.max() * (1 - 1e-9)].tolist())
    seen = set(draws(x, 60, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    assert seen <= kept
    assert int(x.argmax()) in kept


def test_top_k_cuts_equal_logits_by_id() -> None:
    x = np.array([0, 1, 1, 1, 2], np.float32)
    assert set(draws(x, 200, temperature=1.0, top_k=3)) == {1, 2, 4}


def written_out(x: np.ndarray, temperature: float, k: int, p: float, point: float) -> int:
    """A filtered draw by putting the whole vocabulary in order, in the sampler's arithmetic."""
    weights = np.exp((x.astype(np.float64) - x.max()) / temperature)
    order = np.argsort(-weights, kind="stable")[: k or x.size]
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.sort(order[before < p * weights[np.sort(order)].sum()])
    cumulative = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(cumulative, point * cumulative[-1], side="right")])


@pytest.mark.parametrize("size", [1023, 1024, 1025, 9000])
@pytest.mark.parametrize("levels", [0, 5], ids=["all differ", "many are equal"])
def test_a_large_vocabulary_is_cut_as_if_it_were_sorted(size: int, levels: int) -> None:
    x = logits(size, size)
    x = np.round(x / 2 * levels) if levels else x
    for k in (0, 1, 7, 1024, size - 1):
        for p in (1.0, 1 - 1e-12, 0.999, 0.9, 0.3):
            for temperature in (0.02, 1.0, 3.0):
                i = int(size + 7 * k + 100 * p)
                one = spec(3, i, temperature=temperature, top_k=k, top_p=p)
                wanted = written_out(x, temperature, k, p, uniform(3, i))
                assert sample(x, one) == wanted, (k, p, temperature)


def test_tiny_top_p_is_greedy() -> None:
    x = logits(5)
    assert set(draws(x, 50, temperature=1.0, top_p=1e-6)) == {int(x.argmax())}


@given(st.sets(st.integers(0, V - 1), min_size=1))
def test_only_allowed_ids(allowed: set[int]) -> None:
    x = logits(9)
    drawn = {
        sample(x, spec(1, i, [*allowed], temperature=1.5, top_k=3, top_p=0.9)) for i in range(10)
    }
    assert drawn <= allowed
    assert sample(x, spec(allowed=[*allowed])) == max(allowed, key=lambda i: (x[i], -i))


def test_logprob_is_of_the_raw_distribution() -> None:
    x = logits(2)
    for params in ({}, {"temperature": 0.3, "top_k": 2}):
        token = sample(x, spec(0, 4, **params))
        assert logprobs(x, token)[0] == pytest.approx(float(np.log(softmax(x)[token])))


def test_masked_logits_are_never_drawn() -> None:
    x = np.full(V, -np.inf, np.float32)
    x[[4, 7]] = 0.0
    assert set(draws(x, 50, temperature=1.0)) == {4, 7}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    x = logits()
    x[3] = bad
    with pytest.raises(BackendError, match="finite"):
        sample(x, spec(temperature=1.0))


@pytest.mark.parametrize("allowed", [[], [-1], [V]])
def test_impossible_allowed_ids_are_an_error(allowed: list[int]) -> None:
    with pytest.raises(BackendError, match="allowed"):
        sample(logits(), spec(allowed=allowed))
