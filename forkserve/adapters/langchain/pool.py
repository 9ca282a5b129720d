"""Conversations that are kept alive between calls, found again by their longest prefix.

A conversation is a session whose main line is the last prompt, and whose reply was generated on a
branch of it.  The next prompt is committed there: as much of the reply, or of what was speculated
while a tool ran, as it really repeats is reused, down to the token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from forkserve.adapters.templates import Known, common
from forkserve.api import Engine
from forkserve.branch import Branch
from forkserve.errors import NodeError, SessionError
from forkserve.session import Session
from forkserve.tree.rows import missing

__all__ = ["Conversation", "Pool"]


@dataclass(eq=False)
class Conversation:
    """prompt: tokens of the main line.  replies: the branches generated last, mostly one."""

    session: Session
    prompt: list[int]
    replies: list[Branch] = field(default_factory=list)

    def drop(self) -> None:
        """Abort the replies that are not part of the main line."""
        gone, self.replies = self.replies, []
        for reply in gone:
            with suppress(NodeError, SessionError):
                if reply.alive and not reply.committed:
                    reply.abort()


class Pool:
    """At most `keep` conversations of one engine that nobody is using; the oldest go first."""

    def __init__(self, engine: Engine, keep: int) -> None:
        self.engine = engine
        self.keep = keep
        self._lock = threading.Lock()
        self._idle: list[Conversation] = []  # oldest first

    def __len__(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """End all conversations that nobody is using."""
        with self._lock:
            gone, self._idle = self._idle, []
        for conversation in gone:
            conversation.session.close()

    @contextmanager
    def turn(self, prompt: Sequence[int], n: int = 1) -> Iterator[tuple[list[Branch], int]]:
        """Put a prompt in place: `n` branches to generate on, and how many of its rows were there.

        Waits for the pass in flight, if it belongs to the conversation.
        """
        conversation = self._find(prompt)
        try:
            if conversation is None:
                session = Session(self.engine, prompt)
                conversation = Conversation(session, list(prompt))
            else:
                self._go_on(conversation, prompt)
            tip = self.engine.tree(conversation.session.id).tip
            cached = len(prompt) - sum(end - begin for _, begin, end in missing(tip, tip.length))
            for _ in range(n):
                conversation.replies.append(conversation.session.fork("reply"))
            yield list(conversation.replies), cached
        except BaseException:
            if conversation is not None:
                conversation.drop()
            raise
        finally:
            if conversation is not None:
                self._give_back(conversation)

    def decoded(self, prompt: Sequence[int]) -> list[int] | None:
        """A prompt and the one reply that it got; None if nobody keeps it."""
        conversation = self._find(prompt)
        if conversation is None:
            return None
        try:
            replies = conversation.replies
            if len(conversation.prompt) != len(prompt) or len(replies) != 1:
                return None
            return [*prompt, *replies[0].tokens] if replies[0].alive else None
        finally:
            self._give_back(conversation)

    def speculate(self, known: Known, decoded: Sequence[int], t_idle_ms: float) -> int:
        """Prefill what will follow the reply just decoded; returns the tokens admitted.

        decoded: prompt and reply.  Where the template writes the turn as the model did, the rest
        follows the reply; else the turn is written anew beside it.
        """
        ids = [*decoded[: known.at], *known.tokens]
        conversation = self._find(ids) if known.tokens else None
        if conversation is None:
            return 0
        try:
            replies, begin = conversation.replies, len(conversation.prompt)
            if replies and replies[0].alive and known.at == len(decoded):
                branch = replies[0].fork("turn", known.tokens)
            else:
                branch = conversation.session.fork("turn", ids[begin:])
            return branch.speculate(t_idle_ms=t_idle_ms).tokens
        except (NodeError, SessionError):
            return 0  # it is optional
        finally:
            self._give_back(conversation)

    def _find(self, prompt: Sequence[int]) -> Conversation | None:
        """Take the conversation that is the longest prefix of `prompt`, if there is one."""
        with self._lock:
            best: Conversation | None = None
            for one in list(self._idle):
                if one.session.closed:
                    self._idle.remove(one)
                elif common(one.prompt, prompt) == len(one.prompt) and (
                    best is None or len(one.prompt) >= len(best.prompt)
                ):
                    best = one
            if best is not None:
                self._idle.remove(best)
            return best

    def _go_on(self, conversation: Conversation, prompt: Sequence[int]) -> None:
        """Commit what the prompt has beyond the last one; drop the reply if it is not in it."""
        rest = list(prompt[len(conversation.prompt) :])
        if rest:
            conversation.session.commit(rest)
            conversation.prompt = list(prompt)
        conversation.drop()

    def _give_back(self, conversation: Conversation) -> None:
        with self._lock:
            self._idle.append(conversation)
            gone = self._idle[: max(len(self._idle) - self.keep, 0)]
            del self._idle[: len(gone)]
        for old in gone:
            old.session.close()
