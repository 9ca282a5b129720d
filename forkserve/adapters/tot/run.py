"""One search without its waiting: requests, budgets, the tree, and what is given back when.

A strategy is a generator: it yields batches of requests, which decode together, and is sent their
replies.  `driving` waits for them, in a thread or in a task; everything that decides is here or in
the strategies, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from forkserve.adapters.tot.options import Options
from forkserve.adapters.tot.places import Place, Trunks
from forkserve.adapters.tot.records import Step, Stopped, Thought, ToTResult
from forkserve.adapters.tot.task import Reader, Role, State, Task
from forkserve.adapters.tot.usage import PrefixCache, Usage
from forkserve.api import Engine
from forkserve.control.generation import Generation
from forkserve.errors import SessionError
from forkserve.reply import Reply
from forkserve.types import Tokens, derive_seed

__all__ = ["Asking", "Batch", "Halt", "Request", "Run", "Strategy"]

T = TypeVar("T")


@dataclass(eq=False)
class Request:
    """A reply that is wanted at the end of a place.  limit: tokens, at most."""

    place: Place
    role: Role
    states: Sequence[State]
    limit: int = 0


Batch = list[Request]
Asking = Generator[Batch, list[Reply], T]


class Halt(Exception):
    """A budget is used up: the search ends with what it has."""

    def __init__(self, reason: Stopped) -> None:
        super().__init__(reason)
        self.reason: Stopped = reason


class Run:
    """The state of one search."""

    def __init__(self, engine: Engine, task: Task, problem: str, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.reader = Reader(task)
        self.root = Thought(State(problem))
        self.depth = options.depth or self.reader.depth()
        self.answers: list[Thought] = []
        self.fallback: Thought | None = None  # the most promising one, should there be no answer
        self.trace: list[Step] = []
        self.usage = Usage()
        self.stopped: Stopped = "exhausted"
        self.trunks: Trunks | None = None
        self.unreadable = 0  # since the last step
        self._task = task
        self._nodes = 0
        self._seen: set[Hashable] = set()
        self._places: list[Place] = []  # branches that it made, and may still have
        self._roles: set[Role] = set()  # whose trunk was used
        self._tip = (0, 0)  # node and length that the session ended with
        self._cut: Stopped | None = None
        self._begun = time.monotonic()
        self._cache = PrefixCache(engine.config.page_size)

    # ---------------------------------------------------------------- begin and end

    def open(self) -> None:
        """Make the trunks, or the root of the tree."""
        options = self.options
        if options.mode == "template":
            self.trunks = options.trunks or Trunks(self.engine, self._task)
        else:
            opening = self.root.state.problem
            session = options.session or self.engine.session(self.reader.opening(opening))
            tip = self.engine.tree(session.id).tip
            self._tip = tip.id, tip.length
            self.root.place = self._known(Place.of(session))

    def trunk(self, role: Role, thought: Thought) -> Place:
        """Where a prompt about a thought begins: at the role's trunk, or at the thought."""
        if self.trunks is None:
            assert thought.place is not None, "what is asked about is alive"
            return thought.place
        place = self.trunks.place(role)
        if role not in self._roles:
            self._roles.add(role)
            self._known(place)
        return place

    def fan(self, place: Place, text: str | Tokens, count: int) -> list[Place]:
        """`Place.fan`, remembered until the end of the search."""
        branches = place.fan(text, count)
        self._places += branches
        return branches

    def _known(self, place: Place) -> Place:
        """What is computed before the search begins, a prefix cache has as well."""
        tokens = self.engine.tokens(place.session.id, place.branch.tip)
        self._cache.add(tokens[: place.ready])
        return place

    def close(self) -> None:
        """Give back every page that is not part of a session or a trunk that was given."""
        for place in self._places:
            place.drop()
        root, self.root.place = self.root.place, None
        for thought in self.root.walk():
            thought.place = None
        if self.trunks is not None and self.options.trunks is None:
            self.trunks.close()
        if root is not None and self.options.session is None:
            root.session.close()

    def finish(self) -> ToTResult:
        """The result; the best path becomes part of the session that was given.  May wait."""

        def rank(one: Thought) -> tuple[bool, float]:
            return one.right is True, one.score if one.score is not None else float("-inf")

        answers = sorted(self.answers, key=rank, reverse=True)
        best = answers[0] if answers else self.fallback
        if self.options.session is not None and best is not None and best.alive and best.place:
            self._adopt(best.place)
        return ToTResult(best, answers, self.trace, self.usage, self.root, self.stopped)

    def _adopt(self, place: Place) -> None:
        root = self.root.place
        assert root is not None
        tip = self.engine.tree(root.session.id).tip
        if (tip.id, tip.length) != self._tip:
            raise SessionError(
                f"session '{root.session.id}' went on while the search ran: it ended at token "
                f"{self._tip[1]} of node {self._tip[0]}, and ends at {tip.length} of {tip.id} now"
            )
        place.adopt()

    # ---------------------------------------------------------------- asking

    def ask(self, requests: Batch, *, keep: bool = False) -> Asking[list[Reply]]:
        """Replies to requests, at most `max_parallel` at a time.

        Their places are dropped once they are read, unless they are to be kept.
        """
        replies: list[Reply] = []
        width = self.options.max_parallel
        try:
            for begin in range(0, len(requests), width):
                batch = requests[begin : begin + width]
                self._ration(batch)
                replies += yield batch
                if self._cut is not None:
                    raise Halt(self._cut)
                for request in batch if not keep else ():
                    request.place.drop()
        except BaseException:
            for request in requests:
                request.place.drop()
            raise
        return replies

    def _ration(self, batch: Batch) -> None:
        """How many tokens each reply may have."""
        left = self.options.budget.max_tokens
        share = None if left is None else (left - self.usage.decoded) // len(batch)
        if share is not None and share < 1:
            raise Halt("tokens")
        if self.late():
            raise Halt("deadline")
        for request in batch:
            wanted = self.options.tokens(request.role)
            request.limit = wanted if share is None else min(wanted, share)

    def late(self) -> bool:
        """Whether the deadline has passed."""
        limit = self.options.budget.deadline_s
        return limit is not None and time.monotonic() - self._begun >= limit

    def start(self, batch: Batch) -> list[Generation]:
        """Begin to decode."""
        started: list[Generation] = []
        try:
            for request in batch:
                started.append(self._start(request))
        except BaseException:
            for generation in started:
                generation.cancel()
            raise
        return started

    def _start(self, request: Request) -> Generation:
        place, usage = request.place, self.usage
        params = self.options.sampling(request.role)
        seed = self.options.seed if params.seed is None else params.seed
        constraint = self.reader.constraint(request.role, request.states)
        params = replace(
            params,
            seed=derive_seed(seed, usage.requests),
            constraint=constraint or params.constraint,
            logprobs=params.logprobs or self.options.evaluate == "logprob",
        )
        place.branch.attempt()
        session, tip = place.session.id, place.branch.tip
        prompt = self.engine.tokens(session, tip)
        generation = self.engine.start(session, request.limit, node=tip, params=params)
        self.usage = replace(
            usage,
            requests=usage.requests + 1,
            prompt=usage.prompt + len(prompt),
            prefilled=usage.prefilled + place.claim(),
            prefix_cache=usage.prefix_cache + len(prompt) - self._cache.lookup(prompt),
        )
        self._cache.add(prompt)
        return generation

    def settled(self, generations: Sequence[Generation]) -> bool:
        """Whether there is nothing more to wait for."""
        return all(g.done for g in generations) or any(g.error for g in generations) or self.late()

    def land(self, batch: Batch, generations: Sequence[Generation]) -> list[Reply]:
        """The replies, after the wait is over and what still ran was cancelled."""
        late = self.late()
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        for request, generation in zip(batch, generations, strict=True):
            request.place.grew(len(generation.tokens))
            self.usage = replace(self.usage, decoded=self.usage.decoded + len(generation.tokens))
            if generation.finish_reason == "cancelled":
                if not late:
                    raise SessionError(
                        f"session '{generation.session}' was closed, or a branch of the search "
                        "aborted, while the search ran"
                    )
                self._cut = "deadline"
            elif generation.finish_reason == "length" and request.limit < self.options.tokens(
                request.role
            ):
                self._cut = self._cut or "tokens"
            else:
                self._cache.add(self.engine.tokens(generation.session, generation.node))
        return [Reply.of(generation) for generation in generations]

    # ---------------------------------------------------------------- growing the tree

    def expand(self, parents: Sequence[Thought]) -> Asking[list[Thought]]:
        """New thoughts after each of `parents`, in order, duplicates marked."""
        options = self.options
        role: Role = options.generate
        requests: Batch = []
        owners: list[Thought] = []
        if self._room() < 1:
            raise Halt("nodes")
        for parent in parents:
            prompt = self.reader.prompt(role, parent.state)
            for branch in self.fan(self.trunk(role, parent), prompt, options.replies):
                requests.append(Request(branch, role, (parent.state,)))
                owners.append(parent)
        keep = role == "sample" and self.trunks is None
        replies = yield from self.ask(requests, keep=keep)
        found: list[Thought] = []
        try:
            for parent, request, reply in zip(owners, requests, replies, strict=True):
                texts = self.reader.thoughts(role, parent.state, reply.text)
                own = request.place if keep and texts == [reply.text.strip()] else None
                if own is None:
                    request.place.drop()
                found += self._grow(parent, texts, own, reply)
        except BaseException:
            for request in requests:
                request.place.drop()
            raise
        return found

    def _grow(
        self, parent: Thought, texts: Sequence[str], own: Place | None, reply: Reply
    ) -> list[Thought]:
        """Thoughts as children.  own: the branch that decoded the only one."""
        found = []
        for text in texts:
            state = parent.state.then(text)
            thought = Thought(state, parent, place=own)
            key = self.reader.key(state)
            if self.options.dedupe and key in self._seen:
                thought.status = "duplicate"
            elif self._room() < 1:
                self.stopped = "nodes"
                if own is not None:
                    own.drop()
                break
            else:
                self._nodes += 1
                self._seen.add(key)
                self._settle(thought, parent, reply)
            if thought.status == "duplicate" and own is not None:
                own.drop()
                thought.place = None
            parent.children.append(thought)
            found.append(thought)
        return found

    def _settle(self, thought: Thought, parent: Thought, reply: Reply) -> None:
        """Give a new thought a place, and find out whether it is an answer."""
        if self.trunks is None and thought.place is None:
            assert parent.place is not None
            (thought.place,) = self.fan(parent.place, self.reader.write(thought.state), 1)
        if self.options.evaluate == "logprob":  # what a constraint ends at once is certain
            thought.logprob = sum(reply.logprobs) / max(1, len(reply.logprobs))
        thought.done = self.reader.done(thought.state) or thought.depth >= self.depth
        if thought.done:
            thought.right = self.reader.check(thought.state)

    def _room(self) -> int:
        """Thoughts that there may still be."""
        limit = self.options.budget.max_nodes
        return 1 if limit is None else limit - self._nodes

    # ---------------------------------------------------------------- choosing

    def rank(self, candidates: Sequence[Thought]) -> list[Thought]:
        """Those that can be chosen, best first; equal ones stay in order."""
        fit = [c for c in candidates if c.alive and c.right is not False and c.score is not None]
        return sorted(fit, key=lambda c: c.score or 0.0, reverse=True)

    def solution(self, candidates: Sequence[Thought]) -> list[Thought]:
        """Right answers among the candidates, if the search is to stop with the first."""
        found = [c for c in candidates if c.alive and c.right is True]
        if not found or not self.options.first:
            return []
        self.stopped = "solved"
        self.answers += found
        return found

    def record(
        self, parents: Sequence[Thought], candidates: Sequence[Thought], selected: Sequence[Thought]
    ) -> None:
        """Note a step; its losers give back their pages now, and so do parents left barren."""
        aborted = [c for c in candidates if c.alive and c not in selected]
        self._record(parents, candidates, selected, aborted)

    def note(self, parents: Sequence[Thought], candidates: Sequence[Thought]) -> None:
        """Note a step that chooses nothing yet."""
        self._record(parents, candidates, (), [c for c in candidates if c.right is False])

    def _record(
        self,
        parents: Sequence[Thought],
        candidates: Sequence[Thought],
        selected: Sequence[Thought],
        aborted: Sequence[Thought],
    ) -> None:
        for thought in aborted:
            self.drop(thought)
        for thought in selected:
            thought.status = "selected"
        for parent in parents:
            self.prune(parent)
        step = Step(
            len(self.trace),
            tuple(parents),
            tuple(candidates),
            tuple(c.score for c in candidates),
            tuple(selected),
            tuple(aborted),
            self.unreadable,
            self.engine.stats().live_pages,
        )
        self.unreadable = 0
        self._places = [place for place in self._places if not place.gone]
        self.trace.append(step)
        if self.options.on_step is not None:
            self.options.on_step(step)

    def drop(self, thought: Thought) -> None:
        """Abort a thought and all below it.  Idempotent."""
        for below in thought.walk():
            if below.alive:
                below.status = "aborted"
        if thought.place is not None:
            thought.place.drop()

    def prune(self, thought: Thought) -> None:
        """Abort a thought, and those above it, that was expanded and has no live child."""
        at: Thought | None = thought
        while at is not None and at.parent is not None and not any(c.alive for c in at.children):
            self.drop(at)
            at = at.parent


Strategy = Callable[[Run], Asking[None]]
