"""Sampling parameters under OpenAI's and vLLM's names, several replies, log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.langchain import ChatForkServe
from forkserve.adapters.sampling import SAMPLING, sampling_fields
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError

from .rules import cached

GIVEN: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 7,
    "logit_bias": {65: -5.0},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logprobs": True,
    "top_logprobs": 3,
    "stop_token_ids": [66, 67],
    "ignore_eos": True,
}


class Recorder(Engine):
    """Remembers how it was asked to sample."""

    def __init__(self) -> None:
        config = ForkServeConfig(page_size=4, capacity_pages=2048, prefix_index=False)
        super().__init__(MockBackend(config, vocab_size=512))
        self.params: list[SamplingParams] = []

    def start(self, *args: Any, **options: Any) -> Any:
        self.params.append(options["params"])
        return super().start(*args, **options)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.check()
    for session in made.sessions():
        made.close(session)
    assert made.stats().live_pages == 0
    made.shutdown()


def test_every_field_of_the_model_and_of_a_call_arrives(recorder: Recorder) -> None:
    assert GIVEN.keys() == SAMPLING.keys()
    ChatForkServe(engine=recorder, max_tokens=4, **GIVEN).invoke("hello")
    ChatForkServe(engine=recorder, max_tokens=4).invoke("hello", **GIVEN)
    first, second = recorder.params
    assert first == second
    for theirs, ours in SAMPLING.items():
        value, given = getattr(first, ours), GIVEN[theirs]
        expected = {"logit_bias": ((65, -5.0),), "stop_token_ids": (66, 67)}.get(theirs, given)
        assert value == expected, theirs
    ChatForkServe(engine=recorder, max_tokens=4, **GIVEN).invoke("hello", temperature=0.1)
    assert recorder.params[-1].temperature == 0.1
    assert recorder.params[-1].min_p == 0.05


def test_a_bias_by_json_has_text_for_ids() -> None:
    assert sampling_fields({"logit_bias": {"65": 1}})["logit_bias"] == {65: 1}
    assert sampling_fields({"top_k": None, "model": "x"}) == {}
    with pytest.raises(ConfigError, match="token ids as keys"):
        sampling_fields({"logit_bias": {"a": 1}})


def test_a_bias_decides(recorder: Recorder) -> None:
    reply = ChatForkServe(engine=recorder, max_tokens=5, logit_bias={90: 100.0}).invoke("hello")
    assert reply.content == "ZZZZZ"


def test_what_is_unknown_or_wrong_is_refused(recorder: Recorder) -> None:
    model = ChatForkServe(engine=recorder, max_tokens=4)
    with pytest.raises(ConfigError, match=r"unknown parameter 'temprature'.*mean 'temperature'"):
        model.invoke("hello", temprature=0.3)
    with pytest.raises(ConfigError, match="unknown parameter 'best_of'"):
        model.bind(best_of=3).invoke("hello")
    with pytest.raises(ConfigError, match=r"min_p=2.*\[0, 1\)"):
        model.invoke("hello", min_p=2)
    with pytest.raises(ConfigError, match="top_logprobs=2 needs logprobs"):
        model.invoke("hello", top_logprobs=2)
    with pytest.raises(ConfigError, match="n=0"):
        model.bind(n=0).invoke("hello")
    with pytest.raises(ValidationError):
        ChatForkServe(engine=recorder, temprature=0.3)  # type: ignore[call-arg]
    assert recorder.params == []
    assert not recorder.sessions()


def test_log_probabilities_in_openais_form(recorder: Recorder) -> None:
    model = ChatForkServe(engine=recorder, max_tokens=4, logprobs=True, top_logprobs=2)
    told = model.invoke("hello").response_metadata["logprobs"]["content"]
    assert len(told) == 4
    for one in told:
        assert one["logprob"] <= 0
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]
        assert [top["logprob"] for top in one["top_logprobs"]] == sorted(
            (top["logprob"] for top in one["top_logprobs"]), reverse=True
        )
        assert one["top_logprobs"][0]["token"] == one["token"]  # greedy
    whole = None
    for chunk in model.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.response_metadata["logprobs"]["content"] == told
    assert "logprobs" not in model.invoke("hello", logprobs=False, top_logprobs=0).response_metadata


@pytest.mark.parametrize("is_async", [False, True])
def test_several_replies_share_the_prompt_and_the_passes(
    recorder: Recorder, is_async: bool
) -> None:
    model = ChatForkServe(engine=recorder, max_tokens=6, temperature=1.0, seed=3, n=4)
    prompt = [HumanMessage("hello " * 20)]
    before = recorder.stats()
    if is_async:
        result = asyncio.run(model.agenerate([prompt]))
    else:
        result = model.generate([prompt])
    after = recorder.stats()
    replies = [one.message for one in result.generations[0]]  # type: ignore[union-attr]
    assert len(replies) == 4
    assert len({reply.content for reply in replies}) > 1
    assert len({params.seed for params in recorder.params}) == 4
    tokens = replies[0].usage_metadata["input_tokens"]
    rows = after.prefilled_tokens.committed - before.prefilled_tokens.committed
    assert tokens <= rows < 2 * tokens
    again = model.generate([prompt])
    assert [one.text for one in again.generations[0]] == [reply.text for reply in replies]
    assert len(recorder.sessions()) == 1


def test_any_of_several_replies_may_be_gone_on_with(recorder: Recorder) -> None:
    model = ChatForkServe(engine=recorder, max_tokens=6, temperature=1.0, seed=3, n=3)
    history: list[Any] = [HumanMessage("hello " * 20)]
    chosen = model.generate([history]).generations[0][2].message  # type: ignore[union-attr]
    history += [chosen, HumanMessage("and then?")]
    reply = model.invoke(history)
    assert cached(reply) > 100
    assert len(recorder.sessions()) == 1
    assert isinstance(reply.content, str)
    with pytest.raises(ConfigError, match="n=3: one reply at a time"):
        list(model.stream("hello"))


def test_several_replies_that_take_too_long() -> None:
    import time

    config = ForkServeConfig(page_size=4, capacity_pages=2048)
    backend = MockBackend(config, on_batch=lambda batch: time.sleep(0.02))
    with Engine(backend) as engine:
        model = ChatForkServe(engine=engine, n=2, timeout=0.05, ignore_eos=True, max_tokens=500)
        with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
            model.generate([[HumanMessage("hello")]])
        with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
            asyncio.run(model.agenerate([[HumanMessage("hello")]]))
        engine.check()
        assert engine.stats().queued == 0


def test_the_cache_key_holds_all_that_changes_a_reply(recorder: Recorder) -> None:
    plain = ChatForkServe(engine=recorder)._identifying_params
    for name, value in {**GIVEN, "n": 2}.items():
        assert ChatForkServe(engine=recorder, **{name: value})._identifying_params != plain
