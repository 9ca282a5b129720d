"""Two callers at the same place: one order or the other, and never something in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forkserve import Engine
from forkserve.errors import BackendError, ConfigError, SessionError
from forkserve.tree.rows import reserve, settle
from forkserve.types import Batch, JobClass, SamplingParams
from tests.waiting import HANGS_S, wait_for

from .harness import assert_nothing_left, assert_same_as_cold, cold, core, engine, loop, mock
from .scenarios import OTHER, PROMPT

GO_ON = SamplingParams(ignore_eos=True)


def at_pass(number: int, act: Callable[[], object]) -> Callable[[Batch], None]:
    """A backend's hook that does something once, inside a pass."""
    seen = 0

    def hook(_: Batch) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            act()

    return hook


def test_an_open_that_fails_leaves_the_one_that_took_its_name() -> None:
    def act() -> None:
        eng.close("a")
        eng.open(OTHER, session="a", prefill=False)

    eng: Engine = engine({"on_batch": at_pass(1, act)})
    with pytest.raises(SessionError, match="closed meanwhile"):
        eng.open(PROMPT, session="a")
    assert eng.tokens("a") == OTHER
    assert_same_as_cold(eng, "a")
    assert_nothing_left(eng)


def test_a_question_is_answered_where_it_was_asked() -> None:
    """Also if a generation on the same node shares its pass, and draws before the answer."""
    texts = {"a": [3, 4], "b": [5]}
    alone = engine()
    want = alone.choice_mass(alone.open(PROMPT).id, 1, texts)
    eng: Engine = engine(max_batch_tokens=len(PROMPT))
    s = eng.open(PROMPT, prefill=False).id
    got: dict[str, float] = {}
    asked = threading.Event()
    run_until, ensure = eng._loop.run_until, core(eng).ensure

    def began(*args: object, **options: object) -> object:
        task = ensure(*args, **options)  # type: ignore[arg-type]
        if options.get("probe"):
            asked.set()
        return task

    core(eng).ensure = began  # type: ignore[assignment, method-assign]

    def wait(done: Callable[[], bool]) -> None:
        if not asked.is_set():
            return run_until(done)
        eng._loop.run_until = run_until  # type: ignore[method-assign]
        running.append(eng.start(s, 4, params=GO_ON))
        run_until(done)

    running: list[object] = []
    eng._loop.run_until = wait  # type: ignore[method-assign]
    got = eng.choice_mass(s, 1, texts)
    assert got == want
    assert running[0].result() == cold(PROMPT, 4, GO_ON)  # type: ignore[attr-defined]
    assert_nothing_left(eng)


def test_questions_of_two_threads_are_answered_in_turn() -> None:
    eng = engine(background=True)
    s = eng.open(PROMPT).id
    texts = [{"a": [3, n], "b": [5]} for n in range(12)]
    want = [eng.choice_mass(s, 1, t) for t in texts]
    got: list[object] = [None] * len(texts)

    def ask(n: int) -> None:
        try:
            got[n] = eng.choice_mass(s, 1, texts[n])
        except Exception as error:
            got[n] = error

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert got == want
    eng.check()
    eng.shutdown()


def test_a_commit_that_waits_for_a_pass_is_refused_when_the_engine_is_shut_down() -> None:
    """Also if the shutdown comes between the end of the pass and its own turn.

    A store has all by then that it is to keep.
    """
    begun, go_on = threading.Event(), threading.Event()

    def hook(_: Batch) -> None:
        begun.set()
        assert go_on.wait(HANGS_S)

    eng = engine(background=True)
    s = eng.open(PROMPT).id
    kid = eng.attempt(s, eng.fork(s, 1, "k", OTHER))
    mock(eng)._on_batch = hook
    land = loop(eng)._landing.land

    def last(*args: Any) -> Any:
        loop(eng)._stop = True  # as `shutdown` does, which has the lock next
        return land(*args)

    loop(eng)._landing.land = last  # type: ignore[method-assign]
    eng.start(s, 40, node=kid, params=GO_ON)
    assert begun.wait(HANGS_S)
    got: list[object] = []

    def commit() -> None:
        try:
            got.append(eng.commit(s, 1, [1, 2]))
        except BackendError as error:
            got.append(str(error))

    thread = threading.Thread(target=commit)
    thread.start()
    wait_for(lambda: core(eng).waiting > 0)
    go_on.set()
    thread.join(HANGS_S)
    assert got == ["the engine is shut down"]
    eng.shutdown()


class Zigzag:
    """A constraint that depends on all that was generated: odd sums allow other ids than even."""

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        return range(60 + sum(generated) % 2 * 20, 75 + sum(generated) % 2 * 20)


SAYING = [
    SamplingParams(ignore_eos=True, logprobs=True, top_logprobs=3),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, ignore_eos=True, logprobs=True),
    SamplingParams(temperature=1.1, seed=6, repetition_penalty=1.3, frequency_penalty=0.7),
    SamplingParams(temperature=0.7, min_p=0.01, constraint=Zigzag(), logprobs=True),
    SamplingParams(constraint=Zigzag(), stop=("DE", "RS"), presence_penalty=1.0),
]


@pytest.mark.parametrize("every", [0, 1, 2, 5])
@pytest.mark.parametrize("chunk", [3, 64])
def test_whoever_is_stopped_says_the_same_and_says_it_once(every: int, chunk: int) -> None:
    """Pre-emption and a full pool: tokens, log-probabilities, reasons and the streamed text."""

    def said(eng: Engine) -> list[object]:
        names = [eng.open([50 + i, 51, 52, 53 + i], session=f"n{i}").id for i in range(len(SAYING))]
        running = [eng.start(s, 24, params=p) for s, p in zip(names, SAYING, strict=True)]
        told: list[object] = []
        for generation in running:
            pieces = list(generation.pieces())
            assert "".join(pieces) == generation.text
            told.append(
                (
                    generation.tokens,
                    generation.logprobs,
                    generation.top_logprobs,
                    generation.finish_reason,
                    generation.text,
                )
            )
        assert_nothing_left(eng)
        return told

    hard = engine({"force_preempt_every": every}, capacity_pages=12, prefill_chunk=chunk)
    assert said(hard) == said(engine())
    assert hard.stats().preemptions > 0


def test_nothing_is_asked_of_a_constraint_that_has_nothing_to_constrain() -> None:
    class Broken:
        def allowed(self, generated: Sequence[int]) -> None:
            raise ValueError("no")

    eng = engine()
    s = eng.open(PROMPT).id
    assert eng.generate(s, 0, params=SamplingParams(constraint=Broken())) == []
    with pytest.raises(ValueError, match="no"):
        eng.generate(s, 1, params=SamplingParams(constraint=Broken()))
    assert eng.tokens(s) == PROMPT
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_node_is_speculated_on_once() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", OTHER)
    with pytest.raises(ConfigError, match="twice"):
        eng.speculate_set(s, [kid, kid])
    assert eng.speculate_set(s, []) == {}
    assert core(eng).planner.ledger.total == 0
    assert eng.speculate_set(s, [kid])[kid].tokens == len(OTHER)
    assert_nothing_left(eng)


def test_speculation_with_nothing_left_to_run_ends_when_it_is_queued_again() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", OTHER)
    eng.speculate(s, kid)
    waiting = core(eng).tasks[s, kid]
    waiting.held = True
    held = reserve(eng.tree(s), eng.tree(s).get(kid), len(PROMPT), len(OTHER))
    settle(eng.tree(s), held)  # as if another path had brought them
    with core(eng).lock:
        core(eng).requeue(waiting)
    assert waiting.done
    assert not core(eng).tasks
    assert core(eng).planner.ledger.total == 0
    assert_nothing_left(eng)


def test_rows_of_a_batch_on_its_way_are_left_alone() -> None:
    """What a pass writes stays on its table while somebody else makes room."""

    def act() -> None:
        with core(eng).lock:
            free = core(eng).pool.free_pages
            assert core(eng).writing
            core(eng).make_room(free + 2)
            held.append(eng.tree(s).get(kid).kv_end)

    held: list[int] = []
    eng: Engine = engine(capacity_pages=16, prefix_index=False, c_spec=8)
    s = eng.open(PROMPT).id
    idle = eng.open(range(200, 220)).id
    kid = eng.fork(s, 1, "k", [50] * 16)
    with core(eng).lock:
        task = core(eng).new_task(eng.tree(s), eng.tree(s).get(kid), JobClass.SPEC)
        core(eng).submit(task)
    mock(eng)._on_batch = at_pass(1, act)
    while eng.drain_slack():
        eng.check()
    assert held
    assert eng.tree(s).get(kid).kv_end == len(PROMPT) + 16
    assert eng.tree(idle).root.kv_end < 20
    assert_same_as_cold(eng, s)
    assert_same_as_cold(eng, idle)
    assert_nothing_left(eng)
