"""Verbs that arrive while a pass runs: abort, close, cancel, fork, commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from forkserve.errors import SessionError
from forkserve.types import Batch
from tests.waiting import HANGS_S, wait_for

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    node,
)
from .scenarios import OTHER, PROMPT, WRAP

LONG = [100 + i for i in range(40)]
BOTH = pytest.mark.parametrize("background", [False, True])


class Gate:
    """Holds a chosen pass of the mock until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.armed = False

    def __call__(self, batch: Batch) -> None:
        if self.armed:
            self.armed = False
            self.entered.set()
            assert self.leave.wait(HANGS_S)

    def during(self, begin: Callable[[], Any], act: Callable[[], Any]) -> None:
        """Let `begin` start a pass in another thread and do `act` while it runs."""
        self.entered.clear()
        self.leave.clear()
        self.armed = True
        failures: list[BaseException] = []

        def body() -> None:
            try:
                begin()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        assert self.entered.wait(HANGS_S)
        try:
            act()
        finally:
            self.leave.set()
            thread.join(HANGS_S)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


# ---------------------------------------------------------------- verbs during a pass


@BOTH
def test_verbs_while_a_pass_runs(background: bool) -> None:
    gate = Gate()
    eng = engine({"on_batch": gate}, background=background)
    s, other = eng.open(PROMPT).id, eng.open([7, 8]).id
    out: list[int] = []

    def act() -> None:
        kid = eng.fork(s, 1, "k", WRAP)
        eng.abort(s, eng.fork(s, 1, "gone"))
        eng.attempt(s, eng.fork(s, 1, "a", OTHER))
        eng.commit(other, 1, [9])
        assert eng.speculate(s, kid).node == kid

    gate.during(lambda: out.extend(eng.generate(s, 5)), act)
    assert out == cold(PROMPT, 5)
    assert eng.generate(s, 3, node=4) == cold(PROMPT + OTHER, 3)
    assert_same_as_cold(eng, other)
    assert_same_as_cold(eng, s)
    eng.shutdown()


@BOTH
@pytest.mark.parametrize("lazy", [False, True])
def test_abort_while_its_chunk_is_in_flight(background: bool, lazy: bool) -> None:
    gate = Gate()
    eng = engine({"on_batch": gate}, background=background, c_spec=8)
    s = eng.open(PROMPT).id
    pages = eng.stats().live_pages
    kid = eng.fork(s, 1, "k", LONG)

    def begin() -> None:
        eng.speculate(s, kid)
        eng.drain_slack()

    def act() -> None:
        eng.abort(s, kid, lazy=lazy)
        if lazy:
            eng.drain_aborts()

    gate.during(begin, act)
    wait_for(lambda: not core(eng).in_flight)
    eng.check()
    assert eng.stats().live_pages == pages
    assert core(eng).planner.ledger.total == 0
    assert_same_as_cold(eng, s)
    eng.shutdown()


@BOTH
def test_fork_inside_the_rows_in_flight(background: bool) -> None:
    """A child that leaves the path among rows which are being written sees them, sealed."""
    gate = Gate()
    eng = engine({"on_batch": gate}, background=background)
    s = eng.open(PROMPT).id
    eng.append(s, 1, WRAP)
    kids: list[int] = []
    out: list[int] = []
    gate.during(
        lambda: out.extend(eng.generate(s, 3)),
        lambda: kids.append(eng.fork(s, 1, "k", OTHER, at=13)),
    )
    eng.check()
    assert out == cold(PROMPT + WRAP, 3)
    eng.attempt(s, kids[0])
    assert eng.generate(s, 3, node=kids[0]) == cold([*PROMPT, *WRAP[:3], *OTHER], 3)
    assert_same_as_cold(eng, s)
    eng.shutdown()


@pytest.mark.parametrize("chunks", range(6))
def test_abort_at_every_chunk_boundary(chunks: int) -> None:
    eng = engine(c_spec=8)
    s = eng.open(PROMPT).id
    before = list(core(eng).pool.refs)
    kid = eng.fork(s, 1, "k", LONG)
    eng.speculate(s, kid)
    for _ in range(chunks):
        eng.drain_slack()
    assert node(eng, s, kid).speculated == min(8 * chunks, len(LONG))
    eng.abort(s, kid)
    assert core(eng).pool.refs == before
    assert eng.drain_slack() == 0
    assert core(eng).planner.ledger.total == 0
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@BOTH
def test_close_while_a_pass_runs(background: bool) -> None:
    gate = Gate()
    eng = engine({"on_batch": gate}, background=background)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 9)
    with pytest.raises(SessionError, match="closed"):
        gate.during(generation.result, lambda: eng.close(s))
    assert generation.done
    eng.check()
    assert_same_as_cold(eng, eng.open(PROMPT).id)
    eng.shutdown()


@BOTH
@pytest.mark.parametrize("last", [False, True])
def test_abort_or_cancel_beats_the_token_in_flight(background: bool, last: bool) -> None:
    for act in ("abort", "cancel"):
        gate = Gate()
        eng = engine({"on_batch": gate}, background=background)
        s = eng.open(PROMPT).id
        kid = eng.fork(s, 1, "k", WRAP)
        eng.attempt(s, kid)
        eng.generate(s, 1, node=kid)  # its rows are there: the next pass is the first token
        generation = eng.start(s, 1 if last else 9, node=kid)
        begin = generation.result
        if act == "abort":
            gate.during(begin, lambda e=eng, s=s, k=kid: e.abort(s, k))
            assert len(eng.tree(s).nodes) == 1
        else:
            gate.during(begin, generation.cancel)
            assert len(eng.tokens(s, kid)) == len(PROMPT) + len(WRAP) + 1
        assert (generation.tokens, generation.finish_reason) == ([], "cancelled")
        eng.check()
        assert_same_as_cold(eng, s)
        eng.shutdown()


@BOTH
def test_commit_waits_for_the_pass_in_flight(background: bool) -> None:
    gate = Gate()
    eng = engine({"on_batch": gate}, background=background, c_spec=8)
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", LONG)
    committed = threading.Event()
    results: list[Any] = []

    def begin() -> None:
        eng.speculate(s, kid)
        eng.drain_slack()

    def commit() -> None:
        results.append(eng.commit(s, 1, LONG[:20]))
        committed.set()

    thread = threading.Thread(target=commit)

    def act() -> None:
        thread.start()
        assert not committed.wait(0.05)

    gate.during(begin, act)
    thread.join(HANGS_S)
    assert results[0].skipped_prefill >= 8  # the chunk that was running counts
    assert_same_as_cold(eng, s)
    eng.shutdown()
