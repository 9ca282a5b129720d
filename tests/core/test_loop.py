"""The loop: in a thread of its own, in the caller's, with verbs arriving while a pass runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forkserve import Engine
from forkserve.clock import SystemClock
from forkserve.errors import BackendError
from forkserve.types import SamplingParams
from tests.waiting import HANGS_S, wait_for

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    loop,
    mock,
    node,
)
from .scenarios import OTHER, PROMPT, WRAP

LONG = [100 + i for i in range(40)]
BOTH = pytest.mark.parametrize("background", [False, True])


@pytest.fixture(params=["virtual", "system"])
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with a loop of its own, on either clock."""
    backend = {"clock": SystemClock()} if request.param == "system" else {}
    eng = engine(backend, background=True, capacity_pages=256)
    yield eng
    eng.shutdown()


# ---------------------------------------------------------------- background


def test_speculation_runs_while_the_caller_sleeps(running: Engine) -> None:
    s = running.open(PROMPT).id
    kid = running.fork(s, 1, "k", LONG)
    assert running.speculate(s, kid)
    wait_for(lambda: node(running, s, kid).speculated == len(LONG))  # nobody waits on the engine
    result = running.commit(s, 1, LONG)
    assert result.skipped_prefill == len(LONG)
    assert_same_as_cold(running, s)


def test_a_tail_is_computed_without_being_waited_for(running: Engine) -> None:
    s = running.open(PROMPT).id
    running.commit(s, 1, WRAP)
    wait_for(lambda: not core(running).tasks)
    assert node(running, s, running.tip(s)).kv_end == len(PROMPT) + len(WRAP)
    assert_same_as_cold(running, s)


def test_drain_slack_behind_a_commit(running: Engine) -> None:
    """Speculation under a tip whose own tail still waits for a companion must not wait for ever."""
    s = running.open(PROMPT).id
    running.commit(s, 1, WRAP)
    kid = running.fork(s, running.tip(s), "k", OTHER)
    assert running.speculate(s, kid)
    assert running.drain_slack() == len(OTHER)
    assert running.drain_slack() == 0


def test_many_threads_with_a_session_each(running: Engine) -> None:
    failures: list[BaseException] = []

    def agent(i: int) -> None:
        try:
            s = running.open([i, *PROMPT]).id
            for turn in range(5):
                tip = running.tip(s)
                kids = [running.fork(s, tip, "k", [turn, i, j]) for j in range(3)]
                running.speculate_set(s, dict.fromkeys(kids, 1.0))
                running.commit(s, tip, [turn, i, 1, 5])
                history = running.tokens(s)
                assert running.generate(s, 4) == cold(history, 4)
            running.close(s)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=agent, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert not failures, failures
    running.check()
    assert running.sessions() == []


def test_shutdown_is_clean_and_ends_what_runs() -> None:
    eng = engine({"clock": SystemClock()}, background=True, capacity_pages=1024)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 1_000_000 - 20)
    wait_for(lambda: len(generation.tokens) > 3)
    thread = loop(eng)._thread
    assert thread is not None
    eng.shutdown()
    assert not thread.is_alive()
    with pytest.raises(BackendError, match="shut down"):
        eng.generate(s, 1)
    assert generation.done
    assert core(eng).pool.live_pages == 0


def test_whoever_waits_hears_of_the_shutdown() -> None:
    eng = engine(background=True, capacity_pages=4096)
    s = eng.open(PROMPT).id
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            eng.generate(s, 1_000_000)
        except BaseException as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: len(eng.tokens(s)) > 20)
    eng.shutdown()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    assert not heard or isinstance(heard[0], BackendError)


def test_a_crash_of_the_loop_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine(background=True)
    s = eng.open(PROMPT).id

    def crash(*args: Any) -> None:
        raise KeyError("a bug in the loop")

    monkeypatch.setattr(loop(eng)._boarding, "depart", crash)
    with pytest.raises(BackendError, match="engine loop has failed"):
        eng.generate(s, 3)
    with pytest.raises(BackendError) as caught:
        eng.open(PROMPT)
    assert isinstance(caught.value.__cause__, KeyError)
    eng.shutdown()


def test_a_failing_pass_ends_its_works_only() -> None:
    eng = engine(background=True)
    s = eng.open(PROMPT).id
    mock(eng).fail_next()
    with pytest.raises(BackendError, match="told to fail"):
        eng.generate(s, 3)
    assert_same_as_cold(eng, s)
    eng.shutdown()


# ---------------------------------------------------------------- streaming


@BOTH
def test_stream_equals_generate(background: bool) -> None:
    eng = engine(background=background)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 12)
    assert list(generation) == cold(PROMPT, 12) == generation.tokens
    assert generation.finish_reason == "length"
    assert "".join(generation.pieces()) == generation.text
    eng.shutdown()


@BOTH
def test_leaving_a_stream_cancels_the_rest(background: bool) -> None:
    eng = engine(background=background, capacity_pages=512)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 100_000)
    seen = []
    for token in generation:
        seen.append(token)
        if len(seen) == 3:
            break
    del token
    generation._cancel(generation, True)
    assert generation.finish_reason == "cancelled"
    assert seen == cold(PROMPT, 3)
    history = eng.tokens(s)
    assert history == PROMPT + generation.tokens
    assert eng.generate(s, 2) == cold(history, 2)
    eng.shutdown()


def test_replies_stop_at_a_stop_string_and_at_the_end_token() -> None:
    eng = engine({"replies": ["Hello wor", "one STOP two", [65, 259, 66]]})
    s = eng.open("hi").id
    first = eng.start(s, 99)
    assert (first.result()[-1], first.text, first.finish_reason) == (259, "Hello wor", "eos")
    second = eng.start(s, 99, params=SamplingParams(stop=("STOP",)))
    second.result()
    assert (second.text, second.finish_reason) == ("one ", "stop")
    assert eng.start(s, 99).result() == [65, 259]
    eng.check()


# ---------------------------------------------------------------- hand-stepped


def test_hand_stepped_runs_are_equal_to_the_millisecond() -> None:
    def run() -> tuple[Any, ...]:
        eng = engine(seed=5, c_spec=8)
        names = [eng.open([i, *PROMPT]).id for i in range(3)]
        for s in names:
            kid = eng.fork(s, 1, "k", LONG)
            eng.speculate(s, kid)
        while eng.drain_slack():
            pass
        for s in names:
            eng.commit(s, 1, LONG[:13])
        out = eng.generate_many(names, 7, params=SamplingParams(temperature=1.0))
        return out, mock(eng).clock.now_ms(), eng.stats()

    assert run() == run()


def test_nothing_runs_while_nobody_drives() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    passes = eng.stats().forward_passes
    eng.speculate(s, eng.fork(s, 1, "k", WRAP))
    eng.start(s, 5)
    time.sleep(0.02)
    assert eng.stats().forward_passes == passes
    assert mock(eng).clock.now_ms() > 0


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_preempted_generations_say_the_same(every: int) -> None:
    """Preempt all the time: text, counts and finish reasons are those of the calm run."""
    eng = engine({"force_preempt_every": every})
    names = [eng.open([i, *PROMPT]).id for i in range(4)]
    cached = eng.stats().cached_tokens
    got = eng.generate_many(names, 8)
    assert got == [cold([i, *PROMPT], 8) for i in range(4)]
    assert eng.stats().decode_steps == 32
    assert eng.stats().cached_tokens == cached
    assert eng.stats().preemptions > 0
    eng.check()
    assert_nothing_left(eng)


def test_a_commit_waits_for_one_chunk_at_most() -> None:
    eng = engine(c_spec=4, capacity_pages=256)
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", [7] * 400)
    eng.speculate(s, kid)
    eng.drain_slack()
    ran = node(eng, s, kid).speculated
    assert 0 < ran <= 4
    eng.commit(s, 1, OTHER)
    assert_same_as_cold(eng, s)
    assert eng.stats().prefilled_tokens.speculative == ran
