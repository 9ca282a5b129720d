"""Jump-forward: tokens a constraint forces need no pass of their own; nothing else changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine
from forkserve.control import taking
from forkserve.engine.constraints import ChoiceConstraint
from forkserve.types import SamplingParams
from tests.waiting import wait_for

from .harness import assert_nothing_left, core, engine, mock
from .scenarios import PROMPT

EOS = 259


@dataclass(frozen=True)
class Maze:
    """Allows one id after most texts and several after some: a function of the text alone."""

    seed: int
    wide: int  # one text in so many leaves a choice
    dead: int = 0  # one text in so many leaves nothing

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        digest = hashlib.blake2b(repr((self.seed, list(generated))).encode()).digest()
        if self.dead and digest[0] % self.dead == 0 and generated:
            return ()
        count = 1 + 3 * (digest[1] % self.wide == 0)
        ids = {97 + b % 26 if b < 250 else EOS for b in digest[2 : 2 + count]}
        return sorted(ids)


@dataclass(frozen=True)
class Word:
    """One text and no other, again and again."""

    ids: tuple[int, ...]

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        return (self.ids[len(generated) % len(self.ids)],)


def slowly(monkey: pytest.MonkeyPatch) -> None:
    monkey.setattr(taking, "_JUMP", 0)


def outcome(eng: Engine, params: SamplingParams, limit: int) -> tuple[Any, ...]:
    s = eng.open(PROMPT).id
    generation = eng.start(s, limit, params=params)
    tokens = list(generation.result())
    after = eng.generate(s, 3)
    eng.check()
    history = eng.tokens(s)
    assert history == PROMPT + tokens + after
    assert_nothing_left(eng)
    return tokens, generation.text, generation.finish_reason, after, eng.stats().forward_passes


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([0, 0, 9]),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0, 2]),
    st.sampled_from([3, 64]),
    st.sampled_from([(), ("ab",), ("e",)]),
)
def test_the_same_as_one_pass_a_token(
    seed: int,
    wide: int,
    dead: int,
    limit: int,
    temperature: float,
    preempt: int,
    chunk: int,
    stop: tuple[str, ...],
) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        stop=stop,
        frequency_penalty=0.5,
        constraint=Maze(seed, wide, dead),
    )
    backend = {"force_preempt_every": preempt}
    with pytest.MonkeyPatch.context() as monkey:
        slowly(monkey)
        slow = outcome(engine(backend), params, limit)
    fast = outcome(engine(backend, prefill_chunk=chunk), params, limit)
    assert fast[:4] == slow[:4]
    if not preempt and chunk == 64:
        assert fast[4] <= slow[4]


def test_forced_tokens_share_a_pass() -> None:
    eng = engine()
    tokenizer = eng.backend.tokenizer
    text = '{"tool": "search", "query": "'
    choice = ChoiceConstraint(tokenizer, [text + "a", text + "b"])
    s = eng.open(PROMPT).id
    before = eng.stats()
    generation = eng.start(s, 99, params=SamplingParams(constraint=choice))
    assert generation.text == text, "known before any pass"
    assert generation.result()[:-1] == tokenizer.encode(text)
    after = eng.stats()
    assert after.forward_passes - before.forward_passes == 1
    assert after.decode_steps - before.decode_steps == 1
    assert after.forced_tokens == len(text)
    assert after.prefilled_tokens.committed == before.prefilled_tokens.committed + len(text)


def test_a_text_without_a_choice_needs_no_pass() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    before = eng.stats().forward_passes
    only = ChoiceConstraint(eng.backend.tokenizer, ["fixed"])
    generation = eng.start(s, 99, params=SamplingParams(constraint=only))
    assert (generation.text, generation.finish_reason) == ("fixed", "constraint")
    assert eng.stats().forward_passes == before
    assert not core(eng).tasks


def test_an_endless_constraint_does_not_hold_the_engine() -> None:
    eng = engine(background=True, capacity_pages=4096, page_size=16)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 900_000, params=SamplingParams(constraint=Word((65, 66, 67))))
    assert len(generation.tokens) <= taking._JUMP
    wait_for(lambda: len(generation.tokens) > 3 * taking._JUMP)
    generation.cancel()
    assert bytes(generation.tokens[:6]) == b"ABCABC"
    eng.shutdown()


def test_it_ends_at_the_context_and_at_the_limit() -> None:
    eng = engine({"max_context": 30})
    for limit, reason, count in ((5, "length", 5), (99, "context", 20)):
        s = eng.open(PROMPT).id
        generation = eng.start(s, limit, params=SamplingParams(constraint=Word((65,))))
        assert (len(generation.result()), generation.finish_reason) == (count, reason)


def test_logprobs_need_every_pass() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    params = SamplingParams(constraint=Word((65, 66)), logprobs=True)
    generation = eng.start(s, 6, params=params)
    assert len(generation.result()) == len(generation.logprobs) == 6
    assert eng.stats().forced_tokens == 0


def test_a_constraint_that_raises_in_the_middle_of_a_jump() -> None:
    class Breaks(Word):
        def allowed(self, generated: Sequence[int]) -> Sequence[int]:
            if len(generated) == 4:
                raise LookupError("broken")
            return super().allowed(generated)

    eng = engine()
    s = eng.open(PROMPT).id
    generation = eng.start(s, 9, params=SamplingParams(constraint=Breaks((65,))))
    with pytest.raises(LookupError, match="broken"):
        generation.result()
    assert eng.tokens(s) == PROMPT + [65] * 4
    assert_nothing_left(eng)


def test_a_cancel_keeps_what_was_forced() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    generation = eng.start(s, 9, params=SamplingParams(constraint=Maze(4, 2)))
    generation.cancel()
    history = eng.tokens(s)
    assert history == PROMPT + generation.tokens
    assert eng.generate(s, 3)
    assert mock(eng).info.eos_ids == (EOS,)
    assert_nothing_left(eng)
