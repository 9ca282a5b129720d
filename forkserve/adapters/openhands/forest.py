"""The families of one engine: which one a request belongs to, and which are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from forkserve.adapters.openhands.requests import ChatRequest
from forkserve.adapters.openhands.trees import Family, Found, Tip
from forkserve.api import Engine
from forkserve.errors import NodeError, SessionError

__all__ = ["Forest", "Place"]


@dataclass(frozen=True)
class Place:
    """A prompt in place.

    tip: where the conversation goes on.  how: opened, continued, forked or side.  cached: tokens of
    the prompt that need not be computed.
    """

    family: Family
    tip: Tip
    how: str
    cached: int


class Forest:
    """At most `keep` families that nobody is using; the oldest go first.

    gone: told the conversations that have no place any more.  options: of `Engine.open`.
    """

    def __init__(
        self,
        engine: Engine,
        keep: int,
        options: dict[str, Any],
        gone: Callable[[set[str]], None],
    ) -> None:
        self.engine = engine
        self.keep = keep
        self._options = options
        self._gone = gone
        self._families: list[Family] = []  # in the order of their last use
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._families)

    @contextmanager
    def turn(self, request: ChatRequest, prompt: Sequence[int]) -> Iterator[Place]:
        """Put a prompt in place, and hold the place while it is answered.

        Waits for the pass in flight, if it belongs to the family.
        """
        family, fresh = self._take(request, prompt)
        tip: Tip | None = None
        try:
            with family.lock:
                tip, how = self._place(family, fresh, request, prompt)
                tip.busy = True
                place = Place(family, tip, how, family.cached(tip.node))
            yield place
        finally:
            with family.lock:
                if tip is not None:
                    tip.busy = False
                    if not tip.owner and not fresh:
                        with suppress(NodeError, SessionError):
                            family.forget(tip)
            self._give_back(family)

    def _place(
        self, family: Family, fresh: bool, request: ChatRequest, prompt: Sequence[int]
    ) -> tuple[Tip, str]:
        if request.side:
            tip = family.tips[0] if fresh else family.aside(request.conversation, prompt)
            return tip, "side"
        if fresh:
            return family.tips[0], "opened"
        tip, on = family.place(request.conversation, request.head, prompt)
        return tip, "continued" if on else "forked"

    # ---------------------------------------------------------------- finding

    def of(self, owner: str) -> Family | None:
        """The family where a conversation was last."""
        own = [family for family in self._open() if owner in family.owners()]
        return own[-1] if own else None

    def best(self, owners: set[str], prompt: Sequence[int]) -> tuple[Family, Found] | None:
        """Where a prompt has most in common with a family.

        A family of one of the owners takes any prompt; a foreign one only what goes on with its
        first prompt, which is a fork that nobody has told of.
        """
        best: tuple[Family, Found] | None = None
        for family in self._open():
            with family.lock:
                if family.session.closed:
                    continue
                found = family.find(next(iter(owners), ""), prompt)
                own = bool(owners & family.owners())
            if found is None or found.shared < (1 if own else family.first):
                continue
            if best is None or found.shared >= best[1].shared:
                best = family, found
        return best

    def _take(self, request: ChatRequest, prompt: Sequence[int]) -> tuple[Family, bool]:
        """A family for a request, in use from now on, and whether it was opened for it."""
        owners = {name for name in (request.conversation, request.parent) if name}
        while (best := self.best(owners, prompt)) is not None:
            family = best[0]
            with self._lock:
                if family in self._families and not family.session.closed:
                    self._families.remove(family)
                    self._families.append(family)
                    family.users += 1
                    return family, False
        owner = "" if request.side else request.conversation
        family = Family.open(self.engine, owner, request.head, prompt, self._options)
        family.users += 1
        with self._lock:
            self._families.append(family)
        return family, True

    def _open(self) -> list[Family]:
        """The families whose session nobody has closed behind our back."""
        with self._lock:
            self._families = [family for family in self._families if not family.session.closed]
            return list(self._families)

    # ---------------------------------------------------------------- letting go

    def release(self, owner: str) -> None:
        """A conversation is over: drop its places, and the session when it was the last one."""
        for family in self._open():
            self._drop(family, owner)
        self._gone({owner})

    def prune(self, owner: str) -> None:
        """Keep only the branch where a conversation is; drop those that it has left."""
        families = [family for family in self._open() if owner in family.owners()]
        for family in families[:-1]:
            self._drop(family, owner)
        if families:
            with families[-1].lock:
                families[-1].prune(owner)

    def _drop(self, family: Family, owner: str) -> None:
        """Drop the places of a conversation where nothing is being generated."""
        empty = False
        with family.lock:
            for tip in [tip for tip in family.tips if tip.owner == owner and not tip.busy]:
                if len(family.tips) > 1:
                    family.drop(tip)
                elif not family.users:
                    empty = True
        if empty:
            self._close([family])

    def close(self) -> None:
        """End all families."""
        self._close(self._open())

    def _give_back(self, family: Family) -> None:
        with self._lock:
            family.users -= 1
            idle = [one for one in self._families if not one.users]
            empty = [one for one in idle if not one.owners()]
            kept = [one for one in idle if one.owners()]
            over = empty + kept[: max(len(kept) - self.keep, 0)]
        self._close(over)

    def _close(self, families: Sequence[Family]) -> None:
        with self._lock:
            self._families = [family for family in self._families if family not in families]
            left = {owner for family in self._families for owner in family.owners()}
        for family in families:
            family.session.close()
            self._gone(family.owners() - left)
