"""Penalties, logit bias and logprobs: against formulas written out, and whatever the route."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.engine.counts import PathCounts
from forkserve.engine.sampling import logprobs, sample
from forkserve.errors import BackendError, ConfigError
from forkserve.types import SampleSpec, SamplingParams

V = 40
PROMPT = [3, 4, 5, 3, 7, 300, 301]
# Of few ids, so that tokens come again and penalties have something to do.
FEW = {
    "logit_bias": dict.fromkeys(range(20), 40.0),
    "repetition_penalty": 1.2,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "ignore_eos": True,
}


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, V).astype(np.float32)


def spec(path: list[int], start: int, **params: Any) -> SampleSpec:
    seen, counts = PathCounts(path, start).arrays()
    return SampleSpec(SamplingParams(**params), 1, len(path), 0, 0, None, seen, counts)


def engine(**backend: Any) -> Engine:
    return Engine(MockBackend(ForkServeConfig(page_size=4, capacity_pages=256), **backend))


def written_out(row: np.ndarray, path: list[int], start: int, p: SamplingParams) -> np.ndarray:
    """Bias and penalties one id after the other, as their definitions say."""
    out = row.astype(np.float64)
    for i, bias in p.biases:
        out[i] += bias
    for i in set(path):  # prompt and output
        out[i] = out[i] / p.repetition_penalty if out[i] > 0 else out[i] * p.repetition_penalty
    for i, times in Counter(path[start:]).items():  # output alone
        out[i] -= p.frequency_penalty * times + p.presence_penalty
    return out


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=30),
    st.integers(0, 30),
    st.sampled_from([0.5, 1.0, 1.3, 5.0]),
    st.floats(-2, 2, width=16),
    st.floats(-2, 2, width=16),
    st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=16), max_size=4),
)
def test_greedy_takes_the_largest_after_the_formulas(
    world: int,
    path: list[int],
    start: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    row, start = logits(world), min(start, len(path))
    one = spec(
        path,
        start,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    before = row.copy()
    token = sample(row, one)
    expected = written_out(row, path, start, one.params)
    assert expected[token] == pytest.approx(expected.max(), abs=1e-4)
    assert (row == before).all(), "the backend's row was changed"
    p = np.exp(row.astype(np.float64) - row.max())
    assert logprobs(row, token)[0] == pytest.approx(float(np.log(p[token] / p.sum())))


def test_each_penalty_alone() -> None:
    row = np.array([2.0, 1.9, -1.0, 0.0], np.float32)
    path = [0, 0, 2]
    for start, params, token in (
        (3, {"repetition_penalty": 1.2}, 1),  # the prompt counts
        (3, {"presence_penalty": 2.0}, 0),  # the prompt does not
        (3, {"frequency_penalty": 2.0}, 0),
        (0, {"presence_penalty": 0.2}, 1),
        (0, {"frequency_penalty": 0.04}, 0),  # 2 * 0.04 is less than 0.1
        (0, {"frequency_penalty": 0.06}, 1),
        (0, {"logit_bias": {3: 2.5}}, 3),
        (0, {"logit_bias": {0: -100, 1: -100}}, 3),
    ):
        assert sample(row, spec(path, start, **params)) == token, params


@settings(max_examples=60)
@given(st.lists(st.integers(0, 500), max_size=300), st.integers(0, 300))
def test_counts_grow_as_if_built_at_once(path: list[int], cut: int) -> None:
    cut = min(cut, len(path))
    grown = PathCounts(path[:cut], cut)
    for token in path[cut:]:
        grown.push(token)
    for one in (grown, PathCounts(path, cut)):
        ids, counts = one.arrays()
        assert len(set(ids.tolist())) == len(ids)
        assert set(ids.tolist()) == set(path)
        assert {i: c for i, c in zip(ids.tolist(), counts.tolist(), strict=True) if c} == Counter(
            path[cut:]
        )


def test_a_penalty_without_counts_is_an_error() -> None:
    bare = SampleSpec(SamplingParams(presence_penalty=1), 0, 5, 0, 0)
    with pytest.raises(BackendError, match="no token counts"):
        sample(logits(0), bare)


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_same_tokens_whatever_the_route(temperature: float) -> None:
    """Calm, pre-empted, in two calls, forked in the middle: the same path, the same draws."""
    start = len(PROMPT)
    params = SamplingParams(temperature=temperature, seed=11, **FEW)
    on = SamplingParams(temperature=temperature, seed=11, output_start=start, **FEW)
    eng = engine()
    calm = eng.generate(eng.open(PROMPT).id, 30, params=params)
    assert len(set(calm)) < len(calm)
    free = SamplingParams(temperature=temperature, seed=11, logit_bias=FEW["logit_bias"])
    assert eng.generate(eng.open(PROMPT).id, 30, params=free) != calm
    for every in (1, 3):
        hard = engine(force_preempt_every=every)
        assert hard.generate(hard.open(PROMPT).id, 30, params=params) == calm
    for cut in (1, 13, 29):
        s = eng.open(PROMPT).id
        first = eng.generate(s, cut, params=params)
        assert first + eng.generate(s, 30 - cut, params=on) == calm
        fork = eng.fork(s, 1, "again", at=start + cut)
        eng.attempt(s, fork)
        assert first + eng.generate(s, 30 - cut, node=fork, params=on) == calm
    eng.check()


def test_output_start_changes_what_counts_as_output() -> None:
    eng = engine()
    params = dict(FEW, repetition_penalty=1.0, presence_penalty=2.0)
    prompt = [*range(10)]
    some = eng.generate(eng.open(prompt).id, 5, params=SamplingParams(**params))
    other = eng.generate(eng.open(prompt).id, 5, params=SamplingParams(**params, output_start=0))
    assert set(some) & set(prompt)
    assert set(other).isdisjoint(prompt)


def test_what_the_engine_refuses() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    size = eng.backend.info.vocab_size
    for params, match in (
        ({"logit_bias": {size: 1.0}}, f"id {size}; the vocabulary has {size} ids"),
        ({"logit_bias": {-1: 1.0}}, "id -1"),
        ({"stop_ids": (3, size)}, f"stop_ids names id {size}; the vocabulary has {size} ids"),
        ({"stop_ids": (-1,)}, "stop_ids names id -1"),
        ({"output_start": len(PROMPT) + 1}, "beyond the 7 tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            eng.generate(s, 1, params=SamplingParams(**params))
    assert eng.tokens(s) == PROMPT


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},  # nothing, in float32
        {"repetition_penalty": 1e300},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: float("nan")}},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1},
        {"output_start": -1},
    ],
)
def test_out_of_range(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(ConfigError, match=rf"{name}=.* is out of range: [\[(>]"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": 3},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": [(1, 2.0), (1, 3.0)]},
        {"logit_bias": None},
        {"repetition_penalty": "1"},
        {"top_logprobs": 1.5},
        {"output_start": 1.5},
        {"top_logprobs": 2},
    ],
)
def test_of_the_wrong_kind(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"wrong type|must map|needs logprobs"):
        SamplingParams(**values)


def test_a_bias_is_hashable_and_in_order() -> None:
    one = SamplingParams(logit_bias={5: 1, 2: -3.5})
    assert one.logit_bias == ((2, -3.5), (5, 1.0))
    assert one == SamplingParams(logit_bias=((5, 1.0), (2, -3.5)))
    assert len({one, SamplingParams(logit_bias={2: -3.5, 5: 1.0})}) == 1


def test_plain_is_what_a_fast_path_may_serve() -> None:
    for params in (
        {"temperature": 0.1},
        {"logprobs": True},
        {"presence_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
    ):
        assert not SampleSpec(SamplingParams(**params), 0, 0, 0, 0).plain
    assert not SampleSpec(SamplingParams(), 0, 0, 0, 0, [1]).plain
    assert SampleSpec(SamplingParams(top_k=3, seed=4, stop=("x",)), 0, 0, 0, 0).plain


# ---------------------------------------------------------------- logprobs


@settings(max_examples=40)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.integers(0, 14),
    st.sampled_from([1, 100, 1000]),
)
def test_top_logprobs_in_order(values: list[int], count: int, repeated: int) -> None:
    values = values * repeated
    row = np.array(values, np.float32)
    _, got = logprobs(row, 0, count)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert [i for i, _ in got] == order
    p = np.exp(row.astype(np.float64))
    assert [lp for _, lp in got] == pytest.approx([float(np.log(p[i] / p.sum())) for i in order])


def test_a_reply_has_them_for_every_token() -> None:
    eng = engine(replies=["abc"])
    with eng.session(PROMPT) as s:
        scripted = s.generate(9, logprobs=True, top_logprobs=3)
        assert scripted.text == "abc"
        reply = s.generate(5, logprobs=True, top_logprobs=3, ignore_eos=True)
        none = s.generate(2, ignore_eos=True)
    assert (none.logprobs, none.top_logprobs) == ((), ())
    for one in (scripted, reply):
        assert len(one.logprobs) == len(one.top_logprobs) == len(one.tokens)
        for token, logprob, top in zip(one.tokens, one.logprobs, one.top_logprobs, strict=True):
            assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
            assert dict(top).get(token, logprob) == logprob <= top[0][1]
    for token, top in zip(reply.tokens, reply.top_logprobs, strict=True):
        assert token == top[0][0]  # greedy
