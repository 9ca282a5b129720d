"""Arguments that make no sense, to sessions and branches: a typed error, and nothing half done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from inspect import iscoroutine
from typing import Any

import numpy as np
import pytest

from forkserve import Branch, Engine, Session
from forkserve.errors import ConfigError, ContextOverflow, ForkServeError

Make = Callable[..., Engine]
WRONG: list[Any] = [
    *(-1, 10**30, 1.5, float("nan"), True, None, "x", b"ab", object()),
    *([], [1], [None], {}, {"a": 1}, np.int32(-5), np.array([1, 2]), np.array([])),
]
MANY = {"max_tokens": 2, "params": None}
TALK = {"branches": None, **MANY}
FORK = {"name": "x", "text": [1]}
# Of each method the right arguments; `branches` stands for some.
OF_A_SESSION: dict[str, dict[str, Any]] = {
    "fork": FORK,
    "attempts": {"n": 2, **FORK},
    "append": {"text": [1]},
    "commit": {"observed": [1], "full": False, "branch": None},
    "acommit": {"observed": [1], "full": False, "branch": None},
    "join": {"branches": None, "policy": "kofn", "scaffold": (), "blend": None, "k": 1},
    "ajoin": {"branches": None, "policy": "kofn", "k": 1},
    "branch": {"node": 1},
    **dict.fromkeys(("generate", "agenerate", "stream", "astream"), MANY),
    **dict.fromkeys(("generate_many", "agenerate_many"), TALK),
}
OF_A_BRANCH: dict[str, dict[str, Any]] = {
    "fork": FORK,
    "attempts": {"n": 2, **FORK},
    "append": {"text": [1]},
    "commit": {"observed": [1], "full": False},
    "acommit": {"observed": [1], "full": False},
    "abort": {"lazy": None, "cascade": False},
    "speculate": {"priority": 1.0, "t_idle_ms": None, "tool": None, "guess": (), "q": 0.0},
    **dict.fromkeys(("generate", "agenerate", "stream", "astream"), MANY),
}


def made(make: Make) -> tuple[Session, Branch]:
    """A session with a guess."""
    s = make(max_context=48).session([1, 2, 3, 4])
    return s, s.fork("guess", [5, 6])


def ended(out: Any) -> None:
    """Go through what a method gives back."""

    async def all_of(stream: AsyncIterator[str]) -> None:
        async for _ in stream:
            pass

    if iscoroutine(out):
        asyncio.run(out)
    elif isinstance(out, AsyncIterator):
        asyncio.run(all_of(out))
    elif isinstance(out, Iterator):
        list(out)


def state(s: Session) -> list[Any]:
    tree = s.engine.tree(s.id)
    return [(n.id, tree.tokens(n).tolist(), n.mode, n.line, n.known) for n in tree] + [
        tree.next_line
    ]


@pytest.mark.parametrize(
    ("face", "method"),
    [
        *(("session", m) for m in OF_A_SESSION),
        *(("branch", m) for m in OF_A_BRANCH),
    ],
)
def test_every_method(make: Make, face: str, method: str) -> None:
    right = (OF_A_SESSION if face == "session" else OF_A_BRANCH)[method]
    for name in right:
        s, guess = made(make)
        for value in WRONG:
            given = {k: [guess] if k == "branches" else v for k, v in right.items()}
            given[name] = value
            before = state(s)
            try:
                ended(getattr(s if face == "session" else guess, method)(**given))
            except ForkServeError:
                assert state(s) == before, (method, name, value)
            else:
                s.engine.check()
                s, guess = made(make)


def test_a_branch_that_cannot_speak_stays_a_guess(eng: Engine) -> None:
    """It would be an attempt else, and the next one draw from another seed."""
    with eng.session([1, 2, 3]) as s:
        guess = s.fork("guess", [4])
        for wrong, error in (
            ({"max_tokens": -1}, ConfigError),
            ({"stop_ids": (10**9,)}, ConfigError),
            ({"logit_bias": {10**9: 1.0}}, ConfigError),
        ):
            with pytest.raises(error):
                guess.generate(**wrong)  # type: ignore[arg-type]
            assert guess.mode.value == "spec"
        assert eng.tree(s.id).next_line == 1


def test_a_branch_without_room_to_speak_stays_a_guess(make: Make) -> None:
    eng = make(max_context=8)
    with eng.session([1, 2, 3]) as s:
        guess = s.fork("guess", [4] * 5)
        with pytest.raises(ContextOverflow):
            guess.generate(1)
        assert guess.mode.value == "spec"
        assert guess.generate(0).finish_reason == "length"


def test_what_is_no_branch(eng: Engine) -> None:
    with eng.session([1, 2, 3]) as s:
        for wrong in ("x", 5, None, s):
            with pytest.raises(ConfigError, match="is no Branch"):
                s.generate_many([wrong])  # type: ignore[list-item]
            with pytest.raises(ConfigError, match="is no Branch"):
                s.join([wrong])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="branches=5 must be a sequence"):
            s.generate_many(5)  # type: ignore[arg-type]


def test_more_attempts_than_anybody_can_want(eng: Engine) -> None:
    with eng.session([1, 2, 3]) as s:
        for wrong in (0, -1, 10**30):
            with pytest.raises(ConfigError, match="ask for 1 to 65536"):
                s.attempts(wrong)
        assert len(eng.tree(s.id).nodes) == 1
