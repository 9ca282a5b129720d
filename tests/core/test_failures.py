"""Work that is refused or fails: admission, the backend, other threads, the end of the engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forkserve import Engine, errors
from forkserve.errors import (
    AdmissionRefused,
    BackendError,
    ForkServeError,
    MissingExtra,
    NodeError,
    OutOfPages,
    SessionError,
)
from forkserve.types import SamplingParams
from tests.waiting import HANGS_S

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    mock,
    refs,
    snapshot,
)
from .scenarios import OTHER, PROMPT, WRAP


@pytest.fixture
def eng() -> Engine:
    """A session 's' with a guess (2) and an attempt (3)."""
    eng = engine({"max_context": 40})
    s = eng.open(PROMPT, session="s").id
    eng.fork(s, 1, "guess", WRAP)
    eng.attempt(s, eng.fork(s, 1, "attempt", OTHER))
    return eng


# ---------------------------------------------------------------- admission


def test_strict_speculation_says_why(eng: Engine) -> None:
    for options, reason in (
        ({"t_idle_ms": 0.0}, "idle_horizon"),
        ({"priority": 0.0}, "not_worth"),
    ):
        pages = refs(eng)
        with pytest.raises(AdmissionRefused, match=reason) as caught:
            eng.speculate("s", 2, strict=True, **options)
        assert caught.value.reason == reason
        assert refs(eng) == pages
        assert core(eng).planner.ledger.total == 0
    while eng.speculate("s", 2):
        eng.drain_slack()
    with pytest.raises(AdmissionRefused, match="empty"):
        eng.speculate("s", 2, strict=True)


def test_a_full_queue_refuses_speculation_and_changes_nothing() -> None:
    eng = engine(max_queue=1)
    s = eng.open(PROMPT).id
    kids = [eng.fork(s, 1, "k", WRAP) for _ in range(2)]
    assert eng.speculate(s, kids[0])
    before, promised = snapshot(eng, s), core(eng).planner.ledger.total
    got = eng.speculate(s, kids[1], guess=OTHER, q=0.9)
    assert (got.tokens, [r.reason for r in got.refused]) == (0, ["queue_full"])
    with pytest.raises(AdmissionRefused, match="queue_full"):
        eng.speculate(s, kids[1], strict=True)
    assert snapshot(eng, s) == before
    assert core(eng).planner.ledger.total == promised
    eng.check()


def test_a_full_queue_refuses_new_work_whole() -> None:
    eng = engine(max_queue=1)
    names = [eng.open([i, 1, 2]).id for i in range(3)]
    running = eng.start(names[0], 5)
    with pytest.raises(AdmissionRefused, match="queue_full"):
        eng.start(names[1], 5)
    with pytest.raises(AdmissionRefused, match="queue_full"):
        eng.open(PROMPT)
    assert len(eng.sessions()) == 3
    eng.commit(names[2], 1, WRAP)  # never refused: its tail is computed when it is needed
    assert eng.tokens(names[2]) == [2, 1, 2, *WRAP]
    assert running.result() == cold([0, 1, 2], 5)
    for s in names:
        assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


# ---------------------------------------------------------------- the backend


@pytest.mark.parametrize("error", [None, ValueError("no"), OutOfPages(1, 0, 4)])
def test_failing_backend(error: Exception | None) -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", WRAP)
    eng.speculate(s, kid)
    before = refs(eng)
    mock(eng).fail_next(error)
    with pytest.raises(OutOfPages if isinstance(error, OutOfPages) else BackendError) as caught:
        eng.generate(s, 3)
    if isinstance(error, ValueError):
        assert caught.value.__cause__ is error
    assert refs(eng) == before
    assert eng.tokens(s) == PROMPT
    assert not [t for t in core(eng).tasks.values() if t.generation_handle]
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_failing_open_leaves_no_session() -> None:
    eng = engine()
    mock(eng).fail_next()
    with pytest.raises(BackendError, match="told to fail"):
        eng.open(PROMPT, session="s")
    assert eng.sessions() == []
    assert_same_as_cold(eng, eng.open(PROMPT, session="s").id)
    assert_nothing_left(eng)


def test_a_constraint_that_raises_hurts_only_its_own_generation() -> None:
    class Broken:
        def allowed(self, generated: Any) -> Any:
            if generated:
                raise LookupError("broken constraint")
            return range(9)

    for background in (False, True):
        eng = engine(background=background)
        one, two = eng.open(PROMPT).id, eng.open([5, 6]).id
        other = eng.start(two, 6)
        with pytest.raises(LookupError, match="broken constraint"):
            eng.generate(one, 3, params=SamplingParams(constraint=Broken()))
        assert other.result() == cold([5, 6], 6)
        assert_same_as_cold(eng, one)
        eng.shutdown()


# ---------------------------------------------------------------- threads and the end


def test_one_generation_per_node(eng: Engine) -> None:
    running = eng.start("s", 5)
    for verb in (
        lambda: eng.generate("s", 1),
        lambda: eng.commit("s", 1, [1]),
        lambda: eng.append("s", 1, [1]),
        lambda: eng.join("s", [2]),
        lambda: eng.mark_idle("s", 1, 1.0),
        lambda: eng.promote("s", 2),
    ):
        with pytest.raises(SessionError, match="a generation is running on node 1"):
            verb()
    assert running.result() == cold(PROMPT, 5)


def test_a_commit_does_not_cut_a_running_attempt(eng: Engine) -> None:
    running = eng.start("s", 5, node=3)
    with pytest.raises(SessionError, match="a generation is running on node 3"):
        eng.commit("s", 1, [*OTHER, 1])
    with pytest.raises(SessionError, match="a generation is running on node 3"):
        eng.promote("s", eng.fork("s", 3, "below", [1]))
    assert running.result() == cold(PROMPT + OTHER, 5)
    assert eng.commit("s", 1, [*OTHER, *running.tokens]).winner == 3


def test_two_threads_on_one_session() -> None:
    """One generates, the other may not on the same node; verbs take turns behind the pass."""
    entered, leave = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        if not entered.is_set():
            entered.set()
            assert leave.wait(HANGS_S)

    eng = engine({"on_batch": hold}, background=True)
    s = eng.open(PROMPT, prefill=False).id
    kid, other = eng.fork(s, 1, "k", WRAP), eng.fork(s, 1, "o", OTHER)
    running = eng.start(s, 3)
    assert entered.wait(HANGS_S)
    caught: list[BaseException] = []

    def attempt(verb: Callable[[], object]) -> None:
        try:
            verb()
        except BaseException as error:
            caught.append(error)

    late = threading.Thread(target=attempt, args=(lambda: eng.generate(s, 1),))
    late.start()
    late.join(HANGS_S)
    assert [type(error) for error in caught] == [SessionError]
    running.cancel()
    turns = [lambda: eng.commit(s, 1, WRAP), lambda: eng.promote(s, other)]
    threads = [threading.Thread(target=attempt, args=(verb,)) for verb in turns]
    for thread in threads:
        thread.start()
    leave.set()
    for thread in threads:
        thread.join(HANGS_S)
    # Whichever came first; the commit aborts `other`, or finds that node 1 is no tip any more.
    assert [type(error) for error in caught[1:]] == [NodeError]
    assert eng.tip(s) in {kid, other}
    assert_same_as_cold(eng, s)
    eng.shutdown()


def test_use_after_shutdown() -> None:
    for background in (False, True):
        eng = engine(background=background)
        s = eng.open(PROMPT).id
        eng.shutdown()
        eng.shutdown()
        with pytest.raises(BackendError, match="shut down"):
            eng.open(PROMPT)
        for verb in (
            lambda e, s: e.generate(s, 1),
            lambda e, s: e.commit(s, 1, [1]),
            lambda e, s: e.fork(s, 1),
        ):
            with pytest.raises((BackendError, SessionError)):
                verb(eng, s)
        assert core(eng).pool.live_pages == 0


def test_missing_extra_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from forkserve.engine.constraints import _guidance

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[engine\]") as caught:
        _guidance()
    assert isinstance(caught.value, ImportError)


def test_every_error_has_one_root() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), ForkServeError)
