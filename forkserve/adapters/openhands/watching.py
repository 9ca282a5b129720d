"""Events of a conversation: when its tools start, what came of them, and how long they took."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from openhands.sdk.event import (
    ActionEvent,
    AgentErrorEvent,
    InterruptEvent,
    LLMConvertibleEvent,
    ObservationEvent,
)
from openhands.sdk.event.llm_convertible.observation import ObservationBaseEvent
from openhands.sdk.llm import Message
from openhands.sdk.tool.builtins import FinishTool
from openhands.sdk.tool.schema import Observation

from forkserve.adapters.openhands.turns import Running

if TYPE_CHECKING:
    from forkserve.adapters.openhands.adapter import OpenHandsAdapter

__all__ = ["ERROR_PREFIX", "Watch", "as_request"]

# How the model sees an observation that is an error: the header is a part of its own.
ERROR_PREFIX = Observation.ERROR_MESSAGE_HEADER + "\n"


class Watch:
    """A callback for one conversation: ``Conversation(agent, callbacks=[adapter.watch()])``.

    An action event comes before its tool runs, an observation after it.  What is to be done about
    them happens in the adapter's own thread; the tool never waits for it.
    """

    def __init__(self, adapter: OpenHandsAdapter) -> None:
        self._adapter = adapter
        self._lock = threading.Lock()
        self._actions: list[Any] = []  # of the turn that is arriving
        self._errors: dict[str, Any] = {}  # results that came before the turn was complete
        self._running: Running | None = None

    def __call__(self, event: Any) -> None:
        """An event of the conversation."""
        with self._lock:
            if isinstance(event, ActionEvent):
                self._called(event)
            elif isinstance(event, ObservationBaseEvent):
                self._observed(event)
            elif isinstance(event, InterruptEvent):
                self._stop()

    def _called(self, event: Any) -> None:
        actions = self._actions
        if actions and actions[0].llm_response_id != event.llm_response_id:
            actions.clear()
            self._errors.clear()
        actions.append(event)
        self._begin()

    def _begin(self) -> None:
        """Once all calls of the turn are known: speculate on what comes after them."""
        actions = self._actions
        turn = self._adapter.bridge.turn(actions[0].llm_response_id)
        if turn is None or len(actions) < len(turn.answer.calls):
            return
        finished = any(action.tool_name == FinishTool.name for action in actions)
        running = None if finished else self._adapter.running(turn, _assistant(actions))
        for event in self._errors.values():
            if running is not None:
                _bind(running, event)
        self._running = running
        actions.clear()
        self._errors.clear()
        if running is None:
            return
        if running.complete:
            self._commit(running)
        else:
            pause = self._adapter.expected_ms(running.names)
            self._adapter.beside(running, lambda: self._adapter.speculate(running, pause))

    def _observed(self, event: Any) -> None:
        running = self._running
        if self._actions:
            self._errors[event.tool_call_id] = event
            return
        if running is None or event.tool_call_id not in {c["id"] for c in running.calls}:
            return
        _bind(running, event)
        if running.complete:
            self._running = None
            if len(running.calls) == 1 and isinstance(event, ObservationEvent):
                self._adapter.learn(running, running.ms)
            self._commit(running)

    def _commit(self, running: Running) -> None:
        self._adapter.beside(running, running.commit)

    def _stop(self) -> None:
        running, self._running = self._running, None
        self._actions.clear()
        self._errors.clear()
        if running is not None:
            self._adapter.beside(running, running.turn.drop)


def _assistant(actions: list[Any]) -> dict[str, Any]:
    """The model's turn as it will be sent back."""
    (message,) = LLMConvertibleEvent.events_to_messages(list(actions))
    return as_request(message)


def _bind(running: Running, event: Any) -> None:
    running.results[event.tool_call_id] = as_request(event.to_llm_message())
    wrong = not isinstance(event, ObservationEvent) or event.observation.is_error
    if isinstance(event, AgentErrorEvent) or wrong:
        running.failed.add(event.tool_call_id)


def as_request(message: Message) -> dict[str, Any]:
    """A message as it goes over the wire to a text model with native calls."""
    return message.to_chat_dict(
        cache_enabled=False,
        vision_enabled=False,
        function_calling_enabled=True,
        force_string_serializer=False,
        send_reasoning_content=False,
    )
