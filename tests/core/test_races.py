"""Two callers at the same place: one order or the other, and never something in between."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from forkserve import Engine
from forkserve.errors import SessionError
from forkserve.types import Batch, JobClass, SamplingParams

from .harness import assert_nothing_left, assert_same_as_cold, cold, core, engine, mock
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
        thread.join(30)
    assert got == want
    eng.check()
    eng.shutdown()


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
