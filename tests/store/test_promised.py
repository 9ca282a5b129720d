"""What a verb has promised is in the store, also if the end of session or engine overtakes it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine
from forkserve.errors import BackendError, ForkServeError, SessionError
from forkserve.types import SamplingParams
from tests.waiting import HANGS_S, wait_for

from .engines import engine

PROMPT = [65, 66, 67]


def after(target: Any, name: str, act: Callable[[], None]) -> None:
    """Do something once, right after a method has run."""
    real = getattr(target, name)

    def method(*args: Any, **options: Any) -> Any:
        setattr(target, name, real)
        out = real(*args, **options)
        act()
        return out

    setattr(target, name, method)


def resumed(folder: Path, session: str = "a") -> list[int]:
    with engine(folder) as eng:
        eng.resume(session)
        return eng.tokens(session)


def refused(error: type[ForkServeError], *verbs: Callable[[], object]) -> None:
    for verb in verbs:
        with pytest.raises(error):
            verb()


def test_nothing_is_promised_once_a_session_being_closed_was_written(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    guess = eng.fork("a", 1, "k", [1])
    running = eng.start("a", 40, params=SamplingParams(ignore_eos=True))
    eng._loop.run_until(lambda: len(running.tokens) > 2)
    said = list(running.tokens)

    def act() -> None:
        assert running.done
        refused(
            SessionError,
            lambda: eng.fork("a", 1),
            lambda: eng.commit("a", 1, [7]),
            lambda: eng.append("a", 1, [7]),
            lambda: eng.attempt("a", guess),
            lambda: eng.generate("a", 1),
            lambda: eng.open(PROMPT, session="a"),
        )

    after(eng._journal, "sync", act)
    eng.close("a")
    with pytest.raises(SessionError, match="closed meanwhile"):
        running.result()
    assert eng.open(PROMPT, session="b").id == "b"
    eng.shutdown()
    assert resumed(tmp_path) == PROMPT + said


def test_a_session_that_was_brought_back_meanwhile_stays_open(tmp_path: Path) -> None:
    """Two threads close it, and the quicker one resumes it at once."""
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")

    def act() -> None:
        eng.close("a")
        eng.resume("a")

    after(eng._journal, "sync", act)
    eng.close("a")
    assert eng.sessions() == ["a"]
    eng.commit("a", 1, [7])
    eng.shutdown()
    assert resumed(tmp_path) == [*PROMPT, 7]


def test_a_commit_that_waits_for_a_pass_meets_a_session_being_closed(tmp_path: Path) -> None:
    """It had found the session open, and has its turn between the last write and the end."""
    inside, go_on = threading.Event(), threading.Event()

    def hook(_: object) -> None:
        inside.set()
        assert go_on.wait(HANGS_S)

    eng = engine(tmp_path, background=True)
    eng.open(PROMPT, session="a")
    kid = eng.attempt("a", eng.fork("a", 1, "k", [8, 9]))
    eng.backend._on_batch = hook  # type: ignore[attr-defined]
    eng.start("a", 5, node=kid)
    assert inside.wait(HANGS_S)
    got: list[object] = []

    def commit() -> None:
        try:
            got.append(eng.commit("a", 1, [7, 7]))
        except SessionError as error:
            got.append(str(error))

    waiting = threading.Thread(target=commit)
    waiting.start()
    wait_for(lambda: eng._core.waiting)

    def let_go() -> None:
        go_on.set()
        waiting.join(HANGS_S)

    after(eng._journal, "sync", let_go)
    eng.close("a")
    assert got == ["session 'a' was closed meanwhile"]
    eng.shutdown()
    assert resumed(tmp_path) == PROMPT


def test_nothing_is_promised_once_a_shutdown_has_written(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    guess = eng.fork("a", 1, "k", [1])

    def act() -> None:
        refused(
            BackendError,
            lambda: eng.commit("a", 1, [7]),
            lambda: eng.append("a", 1, [7]),
            lambda: eng.attempt("a", guess),
            lambda: eng.generate("a", 1),
        )

    after(eng._journal, "close", act)
    eng.shutdown()
    assert resumed(tmp_path) == PROMPT


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_verbs_that_race_the_end(tmp_path: Path, background: bool, seed: int) -> None:
    eng = engine(tmp_path, background=background)
    names = ["a", "b"]
    for name in names:
        eng.open(PROMPT, session=name)
    promised: list[tuple[str, int, tuple[int, ...]]] = []
    begun = threading.Event()

    def client(number: int) -> None:
        draw = random.Random(10 * seed + number)
        for turn in range(60):
            if turn == 5:
                begun.set()
            name, text = draw.choice(names), [draw.randrange(300) for _ in range(3)]
            try:
                tip = eng.tip(name)
                if draw.random() < 0.6:
                    promised.append((name, eng.commit(name, tip, text).winner, tuple(text)))
                else:
                    eng.append(name, tip, text)
                    promised.append((name, tip, tuple(text)))
            except ForkServeError:
                continue

    clients = [threading.Thread(target=client, args=(n,)) for n in range(2)]
    for thread in clients:
        thread.start()
    assert begun.wait(HANGS_S)
    eng.close("b")
    eng.shutdown()
    for thread in clients:
        thread.join(HANGS_S)
    with engine(tmp_path) as again:
        for name in names:
            again.resume(name)
        for name, node, text in promised:
            own = tuple(again.tree(name).get(node).tokens)
            assert any(own[i : i + 3] == text for i in range(len(own))), (name, node, text)


def test_an_engine_that_was_shut_down_twice_at_once(tmp_path: Path) -> None:
    eng = engine(tmp_path, background=True)
    eng.open(PROMPT, session="a")
    eng.commit("a", 1, [1, 2, 3])
    threads = [threading.Thread(target=Engine.shutdown, args=(eng,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert resumed(tmp_path) == [*PROMPT, 1, 2, 3]
