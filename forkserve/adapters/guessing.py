"""The branches of a run while its tools run: the known suffix, the recovery, a guess.

::

    decoded --at--[ known suffix ]--[ result 1 and on, up to result 2 ]--...
                                 |              (as results come in)
                                 +--[ "Error: " ]
                                 +--[ guess of a stable output ]
"""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.adapters.events import Speculated
from forkserve.adapters.templates import Known
from forkserve.api import Engine
from forkserve.errors import ForkServeError
from forkserve.types import NodeMode

__all__ = ["ERROR_BRANCH", "GUESS_BRANCH", "Guesser"]

ERROR_BRANCH = "err"
GUESS_BRANCH = "guess"


class Guesser:
    """Forks of one turn.  Speculation is optional: what the engine refuses is noted, not raised.

    known: tokens of the known suffix so far.  withheld: of those left out for what they hide.
    refused: reasons, as the planner words them.  base: the node that holds the decoded text; by
    default the tip of the session.
    """

    def __init__(self, engine: Engine, session: str, turn: int, base: int | None = None) -> None:
        self.known = 0
        self.withheld = 0
        self.refused: list[str] = []
        self._engine = engine
        self._session = session
        self._turn = turn
        self._base = base
        self._forked: list[int] = []
        self._node: int | None = None  # end of the known branch
        self._at = 0
        self._tokens: tuple[int, ...] = ()  # on it, from `_at`

    def wrap(self, known: Known, branch: str, pause_ms: float) -> list[Speculated]:
        """The known suffix, or more of it now that another result has come."""
        self.withheld = known.withheld
        if known.drift:
            self.refused.append("template_drift")
        if not known.tokens:
            return []
        if self._node is not None and not self._extends(known):
            self.drop()
        node, events = self._fork(known, branch, 1.0, pause_ms)
        if node is not None:
            self._node, self._at, self._tokens = node, known.at, known.tokens
            self.known = len(known.tokens)
        return events

    def recovery(self, known: Known, p: float, pause_ms: float) -> list[Speculated]:
        """The beginning of an error observation, beside what follows a result."""
        if self._node is None:
            return []
        return self._fork(known, ERROR_BRANCH, p, pause_ms)[1]

    def guess(self, tool: str, p: float, pause_ms: float) -> list[Speculated]:
        """How the tool's output began before, after the known suffix; nothing if not learned."""
        if self._node is None:
            return []
        node = self._new(self._node, None, GUESS_BRANCH, ())
        if node is None:
            return []
        event = self._speculate(node, GUESS_BRANCH, 0, p, pause_ms, tool)
        if not event.admitted:
            self._abort(node)
            return []
        return [event]

    def drop(self) -> None:
        """Abort all branches of the turn that nobody has committed.  Idempotent."""
        forked, self._forked = self._forked, []
        self._node, self._tokens = None, ()
        nodes = self._engine.tree(self._session).nodes
        for node in forked:
            if node in nodes and nodes[node].mode is NodeMode.SPEC:
                self._abort(node)

    def speculated(self) -> int:
        """Rows computed on the speculative branches of the session."""
        nodes = list(self._engine.tree(self._session).nodes.values())
        return sum(node.speculated for node in nodes if node.mode is NodeMode.SPEC)

    # ---------------------------------------------------------------- helpers

    def _extends(self, known: Known) -> bool:
        return known.at == self._at and known.tokens[: len(self._tokens)] == self._tokens

    def _fork(
        self, known: Known, branch: str, p: float, pause_ms: float
    ) -> tuple[int | None, list[Speculated]]:
        """A branch with what a suffix adds to the known one, or from the decoded text."""
        parent, at, tokens = None, known.at, known.tokens
        if self._node is not None and self._extends(known):
            parent, tokens = self._node, known.tokens[len(self._tokens) :]
        if not tokens:
            return None, []
        node = self._new(parent, at if parent is None else None, branch, tokens)
        if node is None:
            return None, []
        return node, [self._speculate(node, branch, len(tokens), p, pause_ms, None)]

    def _new(
        self, parent: int | None, at: int | None, branch: str, tokens: Sequence[int]
    ) -> int | None:
        engine, session = self._engine, self._session
        try:
            base = parent if parent is not None else self._base
            base = engine.tip(session) if base is None else base
            node = engine.fork(session, base, branch, tokens, at=at)
        except ForkServeError as error:
            self.refused.append(type(error).__name__)
            return None
        self._forked.append(node)
        return node

    def _speculate(
        self, node: int, branch: str, fresh: int, p: float, pause_ms: float, tool: str | None
    ) -> Speculated:
        engine, session = self._engine, self._session
        at = engine.tree(session).get(node).alias_len
        try:
            got = engine.speculate(session, node, priority=p, t_idle_ms=pause_ms, tool=tool)
        except ForkServeError as error:
            self.refused.append(type(error).__name__)
            return Speculated(self._turn, branch, at, fresh, 0, (type(error).__name__,))
        reasons = tuple(refusal.reason for refusal in got.refused)
        self.refused += reasons
        return Speculated(self._turn, branch, at, fresh, got.tokens, reasons)

    def _abort(self, node: int) -> None:
        try:
            self._engine.abort(self._session, node, cascade=False)
        except ForkServeError as error:
            self.refused.append(type(error).__name__)
