"""Engines whose model replies by what it is asked, and that are found empty afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from examples.game24 import player, scripted
from forkserve import Engine, ForkServeConfig
from forkserve.adapters.tot import State, Task
from tests.waiting import at_rest

Make = Callable[..., Engine]


@pytest.fixture(params=[False, True], ids=["stepped", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(background: bool) -> Iterator[Make]:
    """Make an engine: reply (a function of the prompt), **config."""
    made: list[Engine] = []

    def build(reply: Callable[[str], str] = player, **config: Any) -> Engine:
        eng = scripted(reply, ForkServeConfig(background=background, **config))
        made.append(eng)
        return eng

    yield build
    for eng in made:
        eng.check()
        empty(eng)
        eng.shutdown()


def empty(eng: Engine, sessions: Sequence[str] = ()) -> None:
    """Nothing is open but these sessions, and no page is held but by the prefix index."""
    at_rest(eng)
    stats = eng.stats()
    assert sorted(eng.sessions()) == sorted(sessions)
    if not sessions:
        assert (stats.live_pages - stats.index_pages, stats.nodes, stats.queued) == (0, 0, 0)


def bare(eng: Engine, session: str) -> None:
    """A session holds its main line, and no branch."""
    tree = eng.tree(session)
    assert set(tree.tips) == {0}
    line = [tree.tip, *tree.tip.ancestors()]
    assert set(tree.nodes) == {node.id for node in line}


class Letters(Task):
    """Words over a few letters; a model proposes letters, and says what a word is worth."""

    depth = 3

    def opening(self, problem: str) -> str:
        return f"Spell {problem}.\n"

    def trunk(self, role: str) -> str:
        return f"This is the {role} trunk, which is longer than a page of tokens.\n"

    def prompt(self, role: str, state: State) -> str:
        word = "".join(state.thoughts)
        return f"[{role} {state.problem} {word}]"

    def ballot(self, states: Sequence[State]) -> str:
        return "[vote " + " ".join("".join(state.thoughts) for state in states) + "]"


def speller(letters: str = "abc", worth: Callable[[str], object] = len) -> Callable[[str], str]:
    """A model for `Letters`."""

    def reply(prompt: str) -> str:
        role, *words = prompt.rpartition("[")[2].rstrip("]").split(" ")
        if role == "propose":
            return "\n".join(letters)
        if role == "vote":
            return str(max(range(len(words)), key=lambda i: worth(words[i])) + 1)  # type: ignore[arg-type, return-value]
        return str(worth(words[1]))

    return reply
