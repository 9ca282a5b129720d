"""Where the text of a search lives: branches of sessions, and how much of them is computed."""

from __future__ import annotations

import threading
from typing import Any

from forkserve.adapters.tot.task import Reader, Role, Task
from forkserve.api import Engine
from forkserve.errors import ConfigError, SessionError
from forkserve.session import Branch, Session
from forkserve.types import Tokens
from forkserve.warming import ready

__all__ = ["Place", "Trunks"]

_claiming = threading.Lock()  # trunks are shared by searches in several threads


class Place:
    """A piece of text on the engine: the main line of a session, or a branch that leaves it.

    ::

        position   0 ........ begin ........ ready ........ length
        parent     [------------]
        place                   [--- rows -----|-- pending --]

    stem: it holds what several branches have in common and nothing else, so it goes with the last
    of them.  ready: rows before it are computed, or are about to be for a request that has begun.
    gone: it was dropped, or is part of the main line now.
    """

    def __init__(self, branch: Branch, length: int, rows: int, parent: Place | None = None) -> None:
        self.branch = branch
        self.parent = parent
        self.length = length
        self.begin: int = parent.length if parent is not None else 0
        self.ready = rows
        self.stem = False
        self.gone = False
        self._children = 0

    @classmethod
    def of(cls, session: Session) -> Place:
        """The main line of a session, from where it ends now."""
        tip = session.engine.tree(session.id).tip
        return cls(session.tip, tip.length, ready(tip))

    @property
    def session(self) -> Session:
        """The session that it is a part of."""
        return self.branch.session

    def fork(self, text: str | Tokens, *, stem: bool = False) -> Place:
        """A branch that leaves its end, with some text on it."""
        encode = self.session.engine.backend.tokenizer.encode
        ids = encode(text) if isinstance(text, str) else list(text)
        child = Place(self.branch.fork("", ids), self.length + len(ids), self.length, self)
        child.stem = stem
        self._children += 1
        return child

    def fan(self, text: str | Tokens, count: int) -> list[Place]:
        """`count` branches that begin with the same text, which is computed once."""
        if count == 1 or not len(text):
            return [self.fork(text) for _ in range(count)]
        stem = self.fork(text, stem=True)
        return [stem.fork(()) for _ in range(count)]

    def claim(self) -> int:
        """Rows to compute before it can be sampled at; they count as computed from now on."""
        rows, upto, at = 0, self.length, self
        with _claiming:
            while True:
                rows += max(0, upto - at.ready)
                at.ready = max(at.ready, upto)
                if at.parent is None:
                    return rows
                upto, at = at.begin, at.parent

    def grew(self, tokens: int) -> None:
        """The model wrote so many tokens at its end; the row of the last one is pending."""
        if tokens:
            self.length += tokens
            self.ready = self.length - 1

    def drop(self) -> None:
        """Abort it with all below it, and a stem that it leaves without a branch.  Idempotent."""
        if self.gone:
            return
        self.gone = True
        if not self.session.closed:
            self.branch.abort()
        above = self.parent
        if above is not None:
            above._children -= 1
            if above.stem and not above._children:
                above.drop()

    def adopt(self) -> None:
        """Make it, and what is above it, the main line of its session.  May wait."""
        self.branch.promote()
        at: Place | None = self
        while at is not None:
            at.gone = True
            at = at.parent


class Trunks:
    """The fixed few-shot texts of a task, one session for each role, kept for many searches.

    ::

        with Trunks(engine, task) as trunks:
            for puzzle in puzzles:
                tot_bfs(engine, task, puzzle, mode="template", trunks=trunks)

    Evaluations are kept with them: a prompt that was evaluated before is not asked again.
    **session: options of `Engine.open`.  A trunk opens when it is first needed, and all close with
    `close`.  Searches in several threads and tasks may share them.
    """

    def __init__(self, engine: Engine, task: Task, **session: Any) -> None:
        self.engine = engine
        self.task = task
        self.values: dict[object, tuple[float | None, ...]] = {}
        self._options = session
        self._places: dict[Role, Place] = {}
        self._lock = threading.Lock()
        self._closed = False

    def place(self, role: Role) -> Place:
        """The trunk of a role.  Raises SessionError once they are closed."""
        with self._lock:
            if self._closed:
                raise SessionError("these trunks are closed; make new ones")
            if role not in self._places:
                text = Reader(self.task).trunk(role)
                self._places[role] = Place.of(self.engine.session(text, **self._options))
            return self._places[role]

    def check(self, engine: Engine, task: Task) -> None:
        """Raise ConfigError unless they were made for this engine and this task."""
        if self.engine is not engine or self.task is not task:
            raise ConfigError("these trunks were made for another engine or another task")

    def close(self) -> None:
        """Close their sessions.  Idempotent."""
        with self._lock:
            self._closed = True
            for place in self._places.values():
                place.session.close()
            self._places.clear()

    def __enter__(self) -> Trunks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Trunks:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
