"""Conversations on context trees: where a prompt belongs, and what it has in common with others.

A *family* is one engine session: a conversation, its forks, and the branches that each has left.
Every place where a conversation can go on is a *tip*, the end of a committed line::

    root --[ prompt 1 | reply ]--[ result | reply ]          tip of conversation A
                           |          `--[ other user message | reply ]   A after `navigate_to`
                           `--[ user message | reply ]       tip of its fork B

A prompt names no place, it is a whole history; it goes on at the tip that has most of it.  So a
fork, a step back, a summary in place of old turns and a template that writes a turn anew are one
case: what is shared stays where it is, down to the token, and the rest hangs below it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forkserve.adapters.templates import common
from forkserve.api import Engine
from forkserve.errors import AdapterError, NodeError, SessionError
from forkserve.session import Session
from forkserve.tree.node import Node
from forkserve.tree.rows import missing
from forkserve.tree.tree import ContextTree

__all__ = ["Family", "Found", "Tip"]

_TIPS = 8  # places of one conversation that are kept; the oldest that it left goes first


@dataclass(eq=False, slots=True)
class Tip:
    """A place where a conversation can go on.

    node: end of its line.  owner: the conversation, empty for nobody's.  head: its tools and system
    message, hashed.  prompt: length of the last prompt that was answered here; what follows may be
    taken back.  busy: a reply is being generated.  serial: grows with each prompt.
    """

    node: int
    owner: str
    head: str
    prompt: int
    busy: bool = False
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Where a sequence leaves a family: the tip, and how many tokens they share."""

    tip: Tip
    shared: int


@dataclass(eq=False)
class Family:
    """One session and its tips.  Held by its lock while a prompt is put in place.

    first: length of the first prompt.  tips: in the order of their last use.  users: requests that
    are being answered.
    """

    engine: Engine
    session: Session
    first: int
    tips: list[Tip] = field(default_factory=list)
    users: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def open(
        cls, engine: Engine, owner: str, head: str, prompt: Sequence[int], options: dict[str, Any]
    ) -> Family:
        """A family whose root is a prompt."""
        session = Session(engine, list(prompt), **options)
        tip = Tip(session.tip.id, owner, head, len(prompt))
        return cls(engine, session, len(prompt), [tip])

    @property
    def tree(self) -> ContextTree:
        """The context tree.  Raises SessionError once the session is closed."""
        return self.engine.tree(self.session.id)

    def owners(self) -> set[str]:
        """The conversations that have a place here."""
        return {tip.owner for tip in self.tips if tip.owner}

    def last(self, owner: str) -> Tip | None:
        """Where a conversation was last."""
        return next((tip for tip in reversed(self.tips) if tip.owner == owner), None)

    def tokens(self, tip: Tip) -> array[int]:
        """All tokens from the root to a tip."""
        return self.tree.tokens(self.tree.get(tip.node))

    def find(self, owner: str, prompt: Sequence[int]) -> Found | None:
        """The tip that has most of a prompt; of equals the conversation's own, then the latest.

        None when nothing here is anybody's history.
        """
        ids, best, key = array("i", prompt), None, (-1, False, -1)
        for number, tip in enumerate(self.tips):
            if not tip.owner:
                continue
            shared = common(self.tokens(tip), ids)
            if tip.busy:  # what it is writing is nobody's history yet
                shared = min(shared, tip.prompt)
            found = (shared, tip.owner == owner and not tip.busy, number)
            if found > key:
                best, key = Found(tip, shared), found
        return best

    # ---------------------------------------------------------------- putting a prompt in place

    def place(self, owner: str, head: str, prompt: Sequence[int]) -> tuple[Tip, bool]:
        """The tip that holds exactly `prompt`, and whether the conversation went on without a fork.

        Waits for the pass in flight, if it belongs to the session.
        """
        found = self._found(owner, prompt)
        tip = found.tip
        on = tip.owner == owner and self.extend(tip, prompt, found.shared)
        if not on:
            tip = self._fork(found, owner, head, prompt)
        self.tips.remove(tip)
        self.tips.append(tip)
        tip.prompt, tip.head = len(prompt), head
        tip.serial += 1
        return tip, on

    def extend(
        self, tip: Tip, prompt: Sequence[int], shared: int, branch: str | None = None
    ) -> bool:
        """Let a tip hold `prompt`; False, and nothing changes, if that needs a fork.

        Taken back is only what follows the last prompt: a reply that the template writes anew.
        Nothing that another tip stands on is touched.
        """
        node = self.tree.get(tip.node)
        if tip.busy or shared < min(tip.prompt, len(prompt)) - 1:
            return False
        if shared == len(prompt) == node.length:
            return True
        at = min(shared, len(prompt) - 1)
        for other in self.tips:
            stands, on = self._shared(other, node)
            if other is not tip and on and stands >= at:
                return False
        place = None if at == node.length else at
        try:
            won = self.engine.commit(self.session.id, node.id, prompt[at:], at=place, branch=branch)
        except (NodeError, SessionError):
            # The place is in the text of the line that this one left, or somebody generates on a
            # branch of the text that would be taken back.
            return False
        tip.node = won.winner
        return True

    def aside(self, owner: str, prompt: Sequence[int]) -> Tip:
        """A tip for a prompt that is nobody's history; `forget` it when it is answered."""
        tip = Tip(self._leave(self._found(owner, prompt), prompt, "side"), "", "", len(prompt))
        self.tips.append(tip)
        return tip

    def forget(self, tip: Tip) -> None:
        """Undo `aside`.  Nothing stands on such a tip."""
        self.tips.remove(tip)
        self.engine.abort(self.session.id, tip.node, cascade=False)

    def cached(self, node: int) -> int:
        """How many tokens on the path of a node need not be computed."""
        end = self.tree.get(node)
        return end.length - sum(stop - begin for _, begin, stop in missing(end, end.length))

    def _found(self, owner: str, prompt: Sequence[int]) -> Found:
        found = self.find(owner, prompt)
        if found is None:
            raise SessionError(f"session '{self.session.id}' has no conversation any more")
        return found

    def _leave(self, found: Found, prompt: Sequence[int], name: str) -> int:
        """A line of its own for what a prompt has beyond a tip."""
        at = min(found.shared, len(prompt) - 1)
        node = self.tree.get(found.tip.node)
        place = None if at == node.length else at
        fork = self.engine.fork(self.session.id, node.id, name, prompt[at:], at=place)
        try:
            return self.engine.attempt(self.session.id, fork)
        except BaseException:
            self.engine.abort(self.session.id, fork, cascade=False)
            raise

    def _fork(self, found: Found, owner: str, head: str, prompt: Sequence[int]) -> Tip:
        tip = Tip(self._leave(found, prompt, "conversation"), owner, head, len(prompt))
        self.tips.append(tip)
        left = found.tip
        if left.owner == owner and left.head == head and not left.busy:
            with suppress(NodeError, SessionError):  # its rows may go after a while
                life = self.engine.config.ttl_max_s
                self.engine.mark_idle(self.session.id, left.node, life)
        own = [other for other in self.tips if other.owner == owner and not other.busy]
        for old in own[: max(len(own) - _TIPS, 0)]:
            self.drop(old)
        return tip

    def _shared(self, tip: Tip, node: Node) -> tuple[int, bool]:
        """How much of a node's path a tip stands on, and whether its own way goes on there."""
        below: dict[int, Node | None] = {}  # by id, the next node on the way to `node`
        last: Node | None = None
        for member in (node, *node.ancestors()):
            below[member.id], last = last, member
        last = None
        for member in (end := self.tree.get(tip.node), *end.ancestors()):
            if member.id in below:
                ways = [way for way in (last, below[member.id]) if way is not None]
                place = min([member.length, *(way.alias_len for way in ways)])
                return place, last is not None
            last = member
        raise AdapterError(f"node {tip.node} is in another tree than node {node.id}")

    # ---------------------------------------------------------------- letting go

    def drop(self, tip: Tip) -> None:
        """Forget a tip, with the nodes that no other tip stands on.

        It stays for another time while somebody generates where a line would have to be taken back.
        """
        self.tips.remove(tip)
        try:
            self._cut(tip)
        except SessionError:
            self.tips.insert(0, tip)

    def _cut(self, tip: Tip) -> None:
        tree = self.tree
        if tree.is_dead(tip.node) or not self.tips:
            return
        if len(self.tips) == 1 and self._merge(tip, self.tips[0]):
            return
        kept = {node.id for other in self.tips for node in self._path(other)}
        top = tree.get(tip.node)
        if top.id in kept:
            return
        while top.parent is not None and top.parent.id not in kept:
            top = top.parent
        try:
            self.engine.abort(self.session.id, top.id, cascade=False)
        except NodeError:  # it carries the main line: another one takes that over
            heir = next((t for t in reversed(self.tips) if t.owner), self.tips[-1])
            self.engine.promote(self.session.id, heir.node)
            self.engine.abort(self.session.id, top.id, cascade=False)

    def prune(self, owner: str) -> None:
        """Keep only the place where a conversation was last, and what it stands on."""
        last = self.last(owner)
        if last is None:
            return
        end = self.tree.get(last.node)
        left = [t for t in self.tips if t.owner == owner and t is not last and not t.busy]
        left.sort(key=lambda tip: self._shared(tip, end)[0], reverse=True)
        alone = self.owners() == {owner} and not any(tip.busy for tip in self.tips)
        for tip in left:
            if alone and self._merge(tip, last):
                self.tips.remove(tip)
            else:
                self.drop(tip)

    def _merge(self, left: Tip, kept: Tip) -> bool:
        """Take the line of a tip back to where the only other one leaves it, which it adopts.

        So nothing remains of it, not even the end of a node that both stand on.
        """
        tree = self.tree
        if tree.is_dead(left.node):
            return True
        node = tree.get(left.node)
        at, _ = self._shared(kept, node)
        line, rest = tree.owner(node, at).line, self.tokens(kept)[at:]
        if kept.busy or not rest or line != node.line or tree.tips.get(line) is not node:
            return False
        won = self.engine.commit(self.session.id, node.id, rest, at=at)
        kept.node = won.winner
        return True

    def _path(self, tip: Tip) -> Iterator[Node]:
        end = self.tree.get(tip.node)
        yield end
        yield from end.ancestors()
