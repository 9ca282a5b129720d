"""Conversations that are kept alive between calls, found again by their longest prefix.

A conversation is a session whose main line is the last prompt, and whose reply was generated on a
branch of it.  The next prompt is committed there: as much of the reply, or of what was speculated
while a tool ran, as it really repeats is reused, down to the token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from forkserve.adapters.templates import Known, common
from forkserve.api import Engine
from forkserve.branch import Branch
from forkserve.errors import NodeError, SessionError
from forkserve.session import Session
from forkserve.tree.rows import missing

__all__ = ["Conversation", "Pool"]


@dataclass(eq=False)
class Conversation:
    """prompt: tokens of the main line.  reply: the branch generated last."""

    session: Session
    prompt: list[int]
    reply: Branch | None = None


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
    def turn(self, prompt: Sequence[int]) -> Iterator[tuple[Branch, int]]:
        """Put a prompt in place: the branch to generate on, and how many of its rows were there.

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
            conversation.reply = conversation.session.fork("reply")
            yield conversation.reply, cached
        except BaseException:
            if conversation is not None and conversation.reply is not None:
                with suppress(NodeError, SessionError):
                    conversation.reply.abort()
                conversation.reply = None
            raise
        finally:
            if conversation is not None:
                self._give_back(conversation)

    def decoded(self, prompt: Sequence[int]) -> list[int] | None:
        """A prompt and the reply that it got; None if nobody keeps it."""
        conversation = self._find(prompt)
        if conversation is None:
            return None
        try:
            reply = conversation.reply
            if len(conversation.prompt) != len(prompt) or reply is None or not reply.alive:
                return None
            return [*prompt, *reply.tokens]
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
            reply, begin = conversation.reply, len(conversation.prompt)
            if reply is not None and reply.alive and known.at == len(decoded):
                branch = reply.fork("turn", known.tokens)
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
        reply, conversation.reply = conversation.reply, None
        with suppress(NodeError, SessionError):
            if reply is not None and reply.alive and not reply.committed:
                reply.abort()

    def _give_back(self, conversation: Conversation) -> None:
        with self._lock:
            self._idle.append(conversation)
            gone = self._idle[: max(len(self._idle) - self.keep, 0)]
            del self._idle[: len(gone)]
        for old in gone:
            old.session.close()
