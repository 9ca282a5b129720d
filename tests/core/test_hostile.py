"""What a hostile or unlucky caller does: it ends in a typed error, and only for that caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.engine import MockBackend
from forkserve.errors import BackendError, ConfigError, OutOfPages, SessionError
from forkserve.types import Batch
from tests.waiting import HANGS_S

PROMPT = [1, 2, 3, 4, 5, 6, 7]
BOTH = pytest.mark.parametrize("background", [False, True])


def engine(background: bool = False, **settings: Any) -> Engine:
    return Engine(MockBackend(ForkServeConfig(background=background, page_size=4, **settings)))


def cold(tokens: Sequence[int], count: int) -> list[int]:
    with Engine(MockBackend(ForkServeConfig())) as eng:
        return eng.generate(eng.open(tokens).id, count)


class Caller:
    """A constraint that does something to the engine, or raises."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def allowed(self, generated: Sequence[int]) -> None:
        if len(generated) == 2:
            self.act()


@pytest.mark.parametrize("wrong", ["", "a/../b\n", "\x1b[31m", "\0", "a" * 513])
def test_a_session_id_that_no_list_can_show_is_refused(wrong: str) -> None:
    with engine() as eng:
        with pytest.raises(
            ConfigError, match=r"session=.* is no id: 1 to 512 printable characters"
        ):
            eng.open(PROMPT, session=wrong)
        with pytest.raises(ConfigError, match="is no id"):
            eng.session(PROMPT, session=wrong)
        assert eng.open(PROMPT).id == "s1", "nothing was opened"
        assert eng.open(PROMPT, session="users/7 é").id == "users/7 é"


def test_sampling_params_of_the_wrong_type() -> None:
    for wrong in (
        {"stop": (1,)},
        {"stop": None},
        {"stop_ids": 5},
        {"top_k": 1.5},
        {"temperature": "x"},
        {"constraint": 5},
    ):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@BOTH
def test_arguments_of_the_wrong_type_leave_everything_usable(background: bool) -> None:
    with engine(background) as eng:
        a, b = eng.open(PROMPT).id, eng.open(PROMPT[::-1]).id
        for call in (
            lambda: eng.generate(a, 1.5),  # type: ignore[arg-type]
            lambda: eng.generate(a, float("nan")),  # type: ignore[arg-type]
            lambda: eng.generate(a, 3, params=None),  # type: ignore[arg-type]
            lambda: eng.fork(a, 1, "x", [9], at=2.5),  # type: ignore[arg-type]
            lambda: eng.fork(a, 1, "x", "\ud800"),
            lambda: eng.open(PROMPT, tenant=None),  # type: ignore[arg-type]
            lambda: eng.generate_many("ab"),
        ):
            with pytest.raises(ConfigError):
                call()
        assert eng.generate(a, 3) == cold(PROMPT, 3)
        assert eng.generate(b, 3) == cold(PROMPT[::-1], 3)
        eng.check()


@BOTH
def test_a_callback_that_waits_for_the_engine(background: bool) -> None:
    with engine(background) as eng:
        a, b = eng.open(PROMPT).id, eng.open(PROMPT[::-1]).id
        rule = Caller(lambda: eng.generate(b, 2))
        with pytest.raises(SessionError, match="inside an engine step"):
            eng.generate(a, 5, params=SamplingParams(constraint=rule))
        assert len(eng.generate(b, 2)) == 2


@BOTH
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_callback_that_raises_ends_its_own_generation(
    background: bool, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    with engine(background) as eng:
        a, b = eng.open(PROMPT).id, eng.open(PROMPT[::-1]).id
        with pytest.raises(error):
            eng.generate(a, 5, params=SamplingParams(constraint=Caller(fail)))
        assert len(eng.generate(b, 2)) == 2
        assert len(eng.generate(a, 2)) == 2


def test_a_constraint_outside_the_vocabulary_fails_alone() -> None:
    class Wild:
        def allowed(self, generated: Sequence[int]) -> list[Any]:
            return [5] if len(generated) < 2 else [10**6]

    with engine() as eng:
        a, b = eng.open(PROMPT).id, eng.open(PROMPT[::-1]).id
        good = eng.start(b, 4)
        bad = eng.start(a, 4, params=SamplingParams(constraint=Wild()))
        assert good.result() == cold(PROMPT[::-1], 4)
        with pytest.raises(ConfigError, match="vocabulary"):
            bad.result()


@BOTH
def test_an_interrupt_at_any_place_leaves_the_session_usable(background: bool) -> None:
    with engine(background) as eng:
        a = eng.open(PROMPT).id
        waits = eng._loop.run_until
        for stage in range(3):
            calls = count()

            def interrupted(done: Any, stage: int = stage, calls: Any = calls) -> None:
                if next(calls) >= stage:
                    raise KeyboardInterrupt
                waits(done)

            eng._loop.run_until = interrupted  # type: ignore[method-assign]
            try:
                with pytest.raises(KeyboardInterrupt):
                    list(eng.start(a, 50))
                with pytest.raises(KeyboardInterrupt):
                    eng.generate(a, 50)
            finally:
                eng._loop.run_until = waits  # type: ignore[method-assign]
            assert len(eng.generate(a, 2)) == 2
        eng.check()


@pytest.mark.parametrize("place", ["depart", "land"])
def test_an_interrupt_inside_a_step(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as eng:
        a = eng.open(PROMPT).id
        part = eng._loop._boarding if place == "depart" else eng._loop._landing
        real = getattr(part, place)

        def interrupted(*args: Any) -> Any:
            if place == "depart":
                real(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(part, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            eng.generate(a, 5)
        monkeypatch.undo()
        eng.check()
        eng.commit(a, eng.tip(a), [9, 9])
        assert eng.generate(a, 2) == cold(eng.tokens(a)[:-2], 2)


def test_one_engine_for_one_backend() -> None:
    backend = MockBackend()
    first = Engine(backend)
    with pytest.raises(ConfigError, match="already serves an engine"):
        Engine(backend)
    first.shutdown()
    Engine(backend).shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_is_told() -> None:
    with engine() as eng:
        eng._loop._pid += 1  # as a child of this process would see it
        with pytest.raises(BackendError, match="belongs to process"):
            eng.open(PROMPT)
        eng._loop._pid -= 1


def test_what_can_never_fit_evicts_nobody() -> None:
    with engine(capacity_pages=10) as eng:
        a = eng.open(PROMPT).id
        with pytest.raises(OutOfPages):
            eng.open([2] * 400)
        assert eng.stats().evicted_nodes == 0
        assert eng.sessions() == [a]


def test_failed_opens_change_no_seed_and_names_never_collide() -> None:
    params = SamplingParams(temperature=1.0)
    outputs = []
    for fail in (False, True):
        with engine(seed=3) as eng:
            eng.open(PROMPT, session="s2")
            if fail:
                with pytest.raises(SessionError):
                    eng.open(PROMPT, session="s2")
            outputs.append(eng.generate(eng.open(PROMPT).id, 6, params=params))
    assert outputs[0] == outputs[1]


def test_pages_of_an_aborted_branch_stay_while_the_pass_writes_them() -> None:
    """Nobody may be given a page that the running batch is still going to write."""
    inside, go = threading.Event(), threading.Event()

    def gate(batch: Batch) -> None:
        if any(work.speculative for work in batch.works):
            inside.set()
            go.wait(HANGS_S)

    config = ForkServeConfig(background=True, page_size=4, capacity_pages=64)
    with Engine(MockBackend(config, on_batch=gate)) as eng:
        a = eng.open(PROMPT).id
        kid = eng.fork(a, 1, "x", [5] * 40)
        eng.speculate(a, kid)
        assert inside.wait(HANGS_S)
        held = eng.stats().live_pages
        eng.abort(a, kid)
        assert eng.stats().live_pages == held
        go.set()
        eng.generate(a, 1)
        eng.check()
        assert eng.stats().live_pages < held


def test_a_dropped_engine_ends_its_thread() -> None:
    eng = engine(background=True)
    thread = eng._loop._thread
    assert thread is not None
    del eng
    thread.join(HANGS_S)
    assert not thread.is_alive()
