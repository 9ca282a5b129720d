"""A branch of a session as an object; see `forkserve.session`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkserve.control.commit import CommitResult
from forkserve.control.generation import Generation
from forkserve.control.lines import require_known
from forkserve.control.speculation import Speculation
from forkserve.errors import ConfigError, NodeError
from forkserve.reply import Speaker
from forkserve.tree.node import Node
from forkserve.tree.tree import committed as on_a_line
from forkserve.types import NodeMode, SamplingParams, Tokens
from forkserve.values import flag, string, whole

if TYPE_CHECKING:
    from forkserve.session import Session

__all__ = ["Branch"]

_ATTEMPTS = 65_536  # of one call


class Branch(Speaker):
    """A way on from some point of a session.

    It follows what is committed to it: `tip` is the node at its end, as `SessionHandle.tip` is
    that of a session; `id` names its first node for good.  (`parent` is the exception: it names
    one node and stays there, so that forking it goes another way.)

    A branch is born *speculative*: a guess, or text that is known to come.  `generate` makes it an
    *attempt*, which runs for real beside the main line.  `commit` chooses it: it becomes part of
    the line that it left.

    Leaving it as a context manager aborts it unless it is part of its parent's line by then.
    Aborted, or having lost a commit, it is dead: `alive` is false and every verb raises NodeError.
    """

    def __init__(self, session: Session, node: int, *, pinned: bool = False) -> None:
        self.session = session
        self.id = node
        self.name = session._open().get(node).branch
        self.engine = session.engine
        self._dropped = session._dropped
        self._pinned = pinned

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive and not self.committed:
            self.abort()

    async def __aenter__(self) -> Branch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def __repr__(self) -> str:
        return f"Branch({self.session.id!r}, {self.id}, {self.name!r}, {self.mode.value})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Branch) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, bool]:
        return id(self.session), self.id, self._pinned

    # ---------------------------------------------------------------- looking in

    @property
    def alive(self) -> bool:
        """False once it was aborted, lost a commit, or its session was closed."""
        return not self.session.closed and self.id in self.session._tree.nodes

    @property
    def mode(self) -> NodeMode:
        """Of its tip: SPEC, COMMIT (an attempt, or committed), IDLE, or DEAD."""
        return self._last().mode if self.alive else NodeMode.DEAD

    @property
    def committed(self) -> bool:
        """Whether it is part of its parent's line (the root is part of the main line)."""
        node = self._first()
        return on_a_line(node) and (node.parent is None or node.parent.line == node.line)

    @property
    def tip(self) -> int:
        """Node at its end."""
        return self._last().id

    @property
    def parent(self) -> Branch | None:
        """The node that it left, pinned; None for the root."""
        above = self._first().parent
        return Branch(self.session, above.id, pinned=True) if above is not None else None

    @property
    def children(self) -> list[Branch]:
        """The live branches that leave its tip, oldest first."""
        return [Branch(self.session, child) for child in list(self._last().children)]

    @property
    def tokens(self) -> list[int]:
        """Its own tokens, from where it left its parent; without a guess that is not confirmed."""
        last = self._last()
        return self.session._tree.tokens(last, self._first().alias_len, last.known).tolist()

    @property
    def full_tokens(self) -> list[int]:
        """All tokens from the root to its tip; without a guess that is not confirmed."""
        last = self._last()
        return self.session._tree.tokens(last, 0, last.known).tolist()

    @property
    def text(self) -> str:
        """Its own text, special tokens included."""
        return self.session._decode(self.tokens)

    @property
    def full_text(self) -> str:
        """The text from the root to its tip, special tokens included."""
        return self.session._decode(self.full_tokens)

    # ---------------------------------------------------------------- text that is known

    def fork(self, name: str = "", text: str | Tokens = ()) -> Branch:
        """A speculative branch that leaves the tip, with the text that is known to follow on it.

        Costs the same however long the path is.  name: for commits, `Session.tip` and people;
        by default b1, b2, ... within the session.
        """
        name = string("name", name) or f"b{next(self.session._names)}"
        tip = self._last()
        return Branch(self.session, self.engine.fork(self.session.id, tip.id, name, text))

    def attempts(self, n: int, name: str = "", text: str | Tokens = ()) -> list[Branch]:
        """`n` attempts that leave the tip: ways on that run for real beside the main line.

        They hold nothing of their own but `text`.  Give them to `Session.generate_many`, which
        decodes them in shared passes, and `commit` the best.  Each draws from a seed of its own,
        derived from the session's and the number of its line, so the same program draws the same.
        name: they are called name1, name2, ...

        Raises ConfigError (n), NodeError (dead, ends in a guess), SessionError (closed).
        """
        if not 1 <= whole("n", n) <= _ATTEMPTS:
            raise ConfigError(f"n={n} attempts; ask for 1 to {_ATTEMPTS}")
        string("name", name)
        ways = [self.fork(f"{name}{i}" if name else "", text) for i in range(1, n + 1)]
        try:
            return [way.attempt() for way in ways]
        except BaseException:
            for way in ways:
                way.abort()
            raise

    def append(self, text: str | Tokens) -> int:
        """Add known text; returns the length of the whole sequence in tokens.

        Branches that left before keep what they saw.  Raises NodeError when speculation has added
        a guess: give `commit` what was observed.
        """
        return self.engine.append(self.session.id, self._last().id, text)

    def speculate(
        self,
        *,
        priority: float = 1.0,
        t_idle_ms: float | None = None,
        tool: str | None = None,
        guess: str | Tokens = (),
        q: float = 0.0,
        strict: bool = False,
    ) -> Speculation:
        """Let the engine prefill this branch while nothing better is to do; see `Engine.speculate`.

        Never waits.  The answer says how much was admitted, and why the rest was not.
        """
        return self.engine.speculate(
            self.session.id,
            self._last().id,
            priority=priority,
            t_idle_ms=t_idle_ms,
            tool=tool,
            guess=guess,
            q=q,
            strict=strict,
        )

    def attempt(self) -> Branch:
        """Run it for real: a speculative branch, and those above it, become attempts.

        Does nothing on committed text.  `generate` and `stream` do it by themselves.
        """
        path = [self._last()]
        while not on_a_line(path[-1]):
            require_known(path[-1])
            above = path[-1].parent
            assert above is not None, "the root is committed"
            path.append(above)
        for node in reversed(path[:-1]):
            self.engine.attempt(self.session.id, node.id)
        return self

    # ---------------------------------------------------------------- choices

    def commit(self, observed: str | Tokens | None = None, *, full: bool = False) -> CommitResult:
        """What really happened is this branch, and then `observed`.

        A speculative branch becomes part of the line it left, with `observed` at its end; a guess
        that it holds is kept as far as it was right.  An attempt goes on with `observed`, and
        without it becomes part of the line it left.  What loses thereby is aborted.
        full: `observed` is the whole sequence from the root on, for the nearest committed text.

        To bind an observation whatever branch it fits, use `Session.commit`.

        Raises NodeError (dead; the line it left has gone on another way; committed already and
        nothing observed), SessionError (closed, in use, generating), ConfigError, ContextOverflow.
        """
        last = base = self._last()
        if flag("full", full) and observed is None:
            raise ConfigError("full=True needs the whole sequence")
        if full or (observed is not None and on_a_line(last)):
            while not on_a_line(base):
                assert base.parent is not None, "the root is committed"
                base = base.parent
            tokens: str | Tokens = () if observed is None else observed
        else:
            base, own = self._choice()
            tokens = own + self.session._ids(() if observed is None else observed)
        prefer = self.name if base is not last else None
        return self.engine.commit(self.session.id, base.id, tokens, full=full, branch=prefer)

    async def acommit(
        self, observed: str | Tokens | None = None, *, full: bool = False
    ) -> CommitResult:
        """`commit` for a coroutine."""
        return await self.session._atomic(lambda: self.commit(observed, full=full))

    def promote(self) -> Branch:
        """Make its tip the tip of the main line, whatever the main line has become meanwhile.

        What the main line held instead goes idle, as a line of its own; nothing is aborted.
        """
        self.engine.promote(self.session.id, self._last().id)
        return self

    async def apromote(self) -> Branch:
        """`promote` for a coroutine."""
        return await self.session._atomic(self.promote)

    def abort(self, *, lazy: bool | None = None, cascade: bool = False) -> int:
        """Drop it and all below it; returns the pages that became free.  Idempotent.

        cascade: also drop speculative branches above that are left without a child.
        Raises NodeError if it carries the main line.
        """
        self.session._open()
        return self.engine.abort(self.session.id, self.id, lazy=lazy, cascade=cascade)

    # ---------------------------------------------------------------- helpers

    def _start(self, max_tokens: int, params: SamplingParams) -> Generation:
        if self.engine._startable(max_tokens, params):  # else it would be an attempt for nothing
            self.engine._guard.fits(self._last().length + 1, "sequence")
        self.attempt()
        return self.engine.start(self.session.id, max_tokens, node=self._last().id, params=params)

    async def _astart(self, max_tokens: int, params: SamplingParams) -> Generation:
        async with self.session._turn():
            return self._start(max_tokens, params)

    def _first(self) -> Node:
        """Its first node, alive."""
        return self.session._open().get(self.id)

    def _last(self) -> Node:
        """Its last node: where its own line ends."""
        node = self._first()
        if self._pinned or not on_a_line(node):
            return node
        line, below = node.line, node
        while True:
            children = list(below.children.values())
            on = next((c for c in children if c.line == line and on_a_line(c)), None)
            if on is None:
                return below
            below = on

    def _choice(self) -> tuple[Node, list[int]]:
        """The node that choosing this branch is a commit at, and the tokens to commit there."""
        top, tree = self._first(), self.session._tree
        if self.committed:
            raise NodeError(
                f"branch '{self.name}' (node {self.id}) is committed already; give commit() what "
                "was observed after it"
            )
        while (base := top.parent) is not None and not on_a_line(base):
            top = base
        assert base is not None, "the root is committed"
        last = self._last()
        own = tree.tokens(last, top.alias_len, last.known)
        grown = tree.tokens(base, top.alias_len)
        if own[: len(grown)] != grown:
            raise NodeError(
                f"node {base.id} has grown by {len(grown)} tokens that branch '{self.name}' (node "
                f"{self.id}) does not hold; promote() goes its way nevertheless"
            )
        return base, own[len(grown) :].tolist()
