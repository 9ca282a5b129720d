"""A condenser that asks for the summary on a branch of the live conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.context.condenser.base import NoCondensationAvailableException
from openhands.sdk.context.view import View
from openhands.sdk.event import LLMConvertibleEvent, SystemPromptEvent
from openhands.sdk.event.condenser import Condensation
from openhands.sdk.llm import LLM, Message, TextContent
from pydantic import Field

from forkserve.adapters.openhands.requests import ADDRESS

__all__ = ["TrunkCondenser"]

_ASK = """\
The conversation so far will be removed, except for its beginning, and your answer takes its place.
Write it for yourself, to go on from: what the user wants, what was done and found out, which files
and values matter and how they stand now, what is still to do. Keep names, paths and ids exact. Do
not call a tool."""


class TrunkCondenser(LLMSummarizingCondenser):
    """When and what it forgets is as in `LLMSummarizingCondenser`; only the question differs.

    That one sends the forgotten events as text under a system message of its own, which shares
    nothing with the conversation, so all of it is computed again.  This one asks in the
    conversation itself, as it stood after the last event to be forgotten: all but the question is
    there already.

    instruction: the question.  A hard reset, when the conversation is too long to be asked, goes
    the old way.
    """

    instruction: str = Field(default=_ASK)

    def get_condensation(self, view: View, agent_llm: LLM | None = None) -> Condensation:
        """Summarise what is to be forgotten.

        Raises NoCondensationAvailableException when there is too little of it, or no summary.
        """
        forgotten, offset = self._forgotten(view, agent_llm)
        try:
            reply = self._side().generate(**self._question(view, offset + len(forgotten)))
        except Exception as error:
            raise NoCondensationAvailableException(f"no summary: {error}") from error
        return _condensation(reply, forgotten, offset)

    async def aget_condensation(self, view: View, agent_llm: LLM | None = None) -> Condensation:
        """`get_condensation` for a coroutine."""
        forgotten, offset = self._forgotten(view, agent_llm)
        try:
            reply = await self._side().agenerate(**self._question(view, offset + len(forgotten)))
        except Exception as error:
            raise NoCondensationAvailableException(f"no summary: {error}") from error
        return _condensation(reply, forgotten, offset)

    def _forgotten(
        self, view: View, agent_llm: LLM | None
    ) -> tuple[Sequence[LLMConvertibleEvent], int]:
        """The events to forget, and where they begin."""
        try:
            forgotten, offset = self._get_forgotten_events(view, agent_llm=agent_llm)
        except ValueError as error:
            raise NoCondensationAvailableException("nothing can be forgotten") from error
        if not forgotten or len(forgotten) < len(view) * self.minimum_progress:
            raise NoCondensationAvailableException(
                f"{len(forgotten)} of {len(view)} events could be forgotten: too few"
            )
        return forgotten, offset

    def _side(self) -> LLM:
        """The model, with an address that makes each request a branch that is dropped."""
        body = dict(self.llm.litellm_extra_body or {})
        body[ADDRESS] = {**(body.get(ADDRESS) or {}), "side": True}
        return self.llm.model_copy(update={"litellm_extra_body": body})

    def _question(self, view: View, upto: int) -> dict[str, Any]:
        """Arguments of `LLM.generate`: the same tools as the agent sends, and none to be called."""
        events = list(view.events[:upto])
        system = next((e for e in events if isinstance(e, SystemPromptEvent)), None)
        messages = LLMConvertibleEvent.events_to_messages(events)
        messages.append(Message(role="user", content=[TextContent(text=self.instruction)]))
        return {
            "messages": messages,
            "tools": list(system.tools) if system is not None else None,
            "tool_choice": "none",
            "add_security_risk_prediction": True,
            "store": False,
        }


def _condensation(
    reply: Any, forgotten: Sequence[LLMConvertibleEvent], offset: int
) -> Condensation:
    texts = [part.text for part in reply.message.content if isinstance(part, TextContent)]
    summary = "\n".join(texts).strip()
    if not summary:
        raise NoCondensationAvailableException("the summary is empty")
    return Condensation(
        forgotten_event_ids={event.id for event in forgotten},
        summary=summary,
        summary_offset=offset,
        llm_response_id=reply.id,
    )
