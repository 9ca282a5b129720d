"""`OpenHandsAdapter`: conversations of the OpenHands SDK on an engine in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from forkserve.api import Engine
from forkserve.control.experience import UNBOUNDED_MS
from forkserve.control.timings import IdleTimes
from forkserve.errors import AdapterError, ConfigError, SessionError

# Before litellm is imported: it would fetch a list of prices, which name none of our models.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from openhands.sdk import LLM
from openhands.sdk.context.view import View
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.event import LLMConvertibleEvent

from forkserve.adapters.openhands import provider
from forkserve.adapters.openhands.beside import Worker
from forkserve.adapters.openhands.bridge import Bridge, Stats
from forkserve.adapters.openhands.condenser import TrunkCondenser
from forkserve.adapters.openhands.requests import ADDRESS, Turn
from forkserve.adapters.openhands.turns import Running
from forkserve.adapters.openhands.watching import ERROR_PREFIX, Watch, as_request

__all__ = ["EventPlace", "OpenHandsAdapter"]


@dataclass(frozen=True, slots=True)
class EventPlace:
    """Where an event of a conversation is in the context tree.

    node: holds the event's last token.  tokens: from the root up to there.  expected: as many as
    the event and those before it have; fewer are there if its branch was let go.
    """

    session: str
    node: int
    tokens: int
    expected: int


class OpenHandsAdapter:
    """Runs the model calls of OpenHands conversations, and speculates while their tools run.

    name: the model is ``forkserve/<name>``, by default the engine's own name.  speculate: prefill
    what is known while tools run.  placeholders: never speculate on tool arguments (they may be
    secrets) but those of the tools in `public`; they are added when the results are bound.
    p_error: expected share of calls that fail.  keep, max_tokens, **session: see `Bridge`.

    It may be used by any number of conversations, threads and tasks at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "",
        speculate: bool = True,
        placeholders: bool = True,
        public: Collection[str] = (),
        p_error: float = 0.1,
        keep: int = 16,
        max_tokens: int = 4096,
        **session: Any,
    ) -> None:
        if not 0 <= p_error <= 1:
            raise ConfigError(f"p_error={p_error} must be in [0, 1]")
        self.engine = engine
        self.name = name or engine.backend.info.name
        self.bridge = Bridge(engine, keep=keep, max_tokens=max_tokens, **session)
        self._speculates = speculate
        self._placeholders = placeholders
        self._public = frozenset(public)
        self._p_error = p_error
        self._times = IdleTimes(engine.config.idle_quantile)
        self._lock = threading.Lock()
        self._worker = Worker(engine, lambda: self.bridge.count(failures=1))
        provider.register(self.name, self.bridge)

    def close(self) -> None:
        """Take the model away and end what the conversations hold here.  Idempotent."""
        provider.unregister(self.name, self.bridge)
        self._worker.close()
        self.bridge.close()

    def __enter__(self) -> OpenHandsAdapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> str:
        """What OpenHands calls the model."""
        return f"{provider.PROVIDER}/{self.name}"

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self.bridge.stats

    # ---------------------------------------------------------------- parts of a conversation

    def llm(self, **options: Any) -> LLM:
        """An `LLM` of the SDK on this engine.  options: its fields (usage_id=, stream=, ...)."""
        given = {"usage_id": "agent", "api_key": "none", **options}
        return LLM(model=self.model, **given)

    def watch(self) -> Watch:
        """A callback for one conversation: ``Conversation(agent, callbacks=[adapter.watch()])``."""
        return Watch(self)

    def condenser(self, llm: LLM, **options: Any) -> TrunkCondenser:
        """A condenser whose question is a branch of the conversation; see `TrunkCondenser`."""
        return TrunkCondenser(llm=llm, **options)

    def attach(self, conversation: LocalConversation) -> Watch:
        """Watch a conversation that was made already: a fork takes no callbacks along."""
        watch = self.watch()
        for name in ("_base_callback", "_on_event"):
            if not callable(getattr(conversation, name, None)):
                raise AdapterError(
                    f"this version of the SDK has no {name}; give callbacks=[adapter.watch()] to "
                    "Conversation instead"
                )
        base = conversation._base_callback

        def composed(event: Any) -> None:
            base(event)
            watch(event)

        # The chain is made of the base twice: now, and when hooks are set up at the first run.
        conversation._base_callback = composed
        if conversation._hook_processor is None:
            stamped = conversation._rules_injecting(composed)
            conversation._on_event = conversation._tree_stamping(stamped)
        else:
            whole = conversation._on_event

            def after(event: Any) -> None:
                whole(event)
                watch(event)

            conversation._on_event = after
        return watch

    def fork(self, conversation: LocalConversation, **options: Any) -> LocalConversation:
        """`conversation.fork(**options)`, watched, and on the context tree of its origin."""
        forked = conversation.fork(**options)
        self.attach(forked)
        self.bridge.derive(str(forked.id), str(conversation.id))
        return forked

    @staticmethod
    def address(
        conversation: str | UUID = "", *, parent: str | UUID = "", side: bool = False
    ) -> dict[str, Any]:
        """A value of ``litellm_extra_body`` that says where requests belong.

        conversation: in place of the SDK's own id.  parent: the conversation that it goes on from.
        side: answer on a branch and forget it.
        """
        given = {"conversation": str(conversation), "parent": str(parent), "side": side}
        return {ADDRESS: {name: value for name, value in given.items() if value}}

    # ---------------------------------------------------------------- events and the tree

    def place(self, conversation: LocalConversation, event_id: str | None = None) -> EventPlace:
        """Where an event is in the context tree; by default the conversation's last one.

        Raises AdapterError for an event that it does not have, SessionError when nothing of the
        conversation is kept.
        """
        state = conversation.state
        self.bridge.settle(str(conversation.id))
        with state:
            leaf = state.leaf_event_id if event_id is None else event_id
            if leaf is None or leaf not in state.events:
                raise AdapterError(f"conversation {conversation.id} has no event {leaf}")
            view = View.from_events(state.events.path_to_root(leaf))
        messages = [
            as_request(message)
            for message in LLMConvertibleEvent.events_to_messages(list(view.events))
        ]
        tools = self.bridge.tools(str(conversation.id))
        best = None
        if tools is not None:
            tokens = self.bridge.renderers.tokens(messages, tools, generation=False)
            best = self.bridge.forest.best({str(conversation.id)}, tokens)
        if best is None:
            raise SessionError(f"nothing of conversation {conversation.id} is kept here")
        family, found = best
        with family.lock:
            tree = family.tree
            owner = tree.owner(tree.get(found.tip.node), max(found.shared, 1))
        return EventPlace(family.session.id, owner.id, found.shared, len(tokens))

    def prune(self, conversation: LocalConversation) -> None:
        """Drop the branches that the conversation has left (by `navigate_to`, a summary, a title).

        They are kept otherwise, for the way back, until their time is over or pages run out.
        """
        self.bridge.prune(str(conversation.id))

    def release(self, conversation: LocalConversation) -> None:
        """The conversation is over: give back what it alone held."""
        self.bridge.release(str(conversation.id))

    def settle(self) -> None:
        """Wait until all speculation so far has been computed."""
        self._worker.settle()

    # ---------------------------------------------------------------- what watches ask

    def running(self, turn: Turn, assistant: Mapping[str, Any]) -> Running:
        """The tools of a turn that begin to run."""
        names = [call["function"]["name"] for call in assistant["tool_calls"]]
        public = self._public if self._placeholders else frozenset(names)
        return Running(self.bridge, turn, assistant, public)

    def beside(self, running: Running, job: Callable[[], None]) -> None:
        """Do something in the adapter's thread; the conversation's next request waits for it."""
        owner = running.turn.request.conversation
        self.bridge.beside(owner, lambda: self._worker.run(job))

    def speculate(self, running: Running, pause_ms: float) -> None:
        """Prefill what is known while the tools of a turn run."""
        if self._speculates:
            running.speculate(pause_ms, self._p_error, ERROR_PREFIX)

    def expected_ms(self, tools: Sequence[str]) -> float:
        """How long the slowest of some tools will take, as it was seen; unbounded if never."""
        with self._lock:
            return max(self._times.expect(tool, UNBOUNDED_MS) for tool in tools)

    def learn(self, running: Running, ms: float) -> None:
        """The only tool of a turn took this long."""
        with self._lock:
            self._times.observe(running.names[0], ms)
        session = running.turn.family.session.id
        self.beside(running, lambda: self.engine.observe(session, running.names[0], ms=ms))
