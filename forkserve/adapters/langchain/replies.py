"""A generation as LangChain's messages, chunks and results."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from forkserve.adapters.chat import Reading
from forkserve.branch import Branch
from forkserve.reply import AsyncStream, Reply, Stream
from forkserve.types import SamplingParams

__all__ = ["Call", "Chunks", "ain_time", "in_time", "result"]

_REASONS = {"length": "length", "context": "length", "cancelled": "cancelled"}


@dataclass(slots=True)
class Call:
    """One call of the model whose prompt is in place on `branch`.

    cached: prompt tokens that need not be computed.  tools: names that count as calls.
    deadline: of `time.monotonic`.
    """

    branch: Branch
    prompt_tokens: int
    cached: int
    params: SamplingParams
    max_tokens: int
    tools: Sequence[str]
    model: str
    timeout: float | None
    deadline: float | None

    def stream(self) -> Stream:
        """Begin."""
        return self.branch.stream(self.max_tokens, self.params)

    def astream(self) -> AsyncStream:
        """Begin, for a coroutine."""
        return self.branch.astream(self.max_tokens, self.params)

    def check(self) -> None:
        """Raise TimeoutError once the time is over."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError(f"the model did not finish within timeout={self.timeout} s")


def in_time(stream: Stream, call: Call) -> Iterator[str]:
    """The pieces of a stream; TimeoutError when they take too long."""
    for piece in stream:
        call.check()
        yield piece


async def ain_time(stream: AsyncStream, call: Call) -> AsyncIterator[str]:
    """`in_time` for a coroutine."""
    async for piece in stream:
        call.check()
        yield piece


class Chunks:
    """Chunks of a reply, in order: text and calls, then usage and metadata, once."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reading = Reading(call.tools)
        self._calls = 0

    def feed(self, piece: str) -> Iterator[ChatGenerationChunk]:
        """What a piece of text adds."""
        return self._some(*self._reading.feed(piece))

    def finish(self, reply: Reply) -> Iterator[ChatGenerationChunk]:
        """What is left, and the last chunk."""
        yield from self._some(*self._reading.finish())
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(self._call, reply),
            response_metadata=_metadata(self._call, reply, self._calls),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message)

    def _some(self, text: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[ChatGenerationChunk]:
        if text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        for call in calls:
            piece = tool_call_chunk(
                name=call["name"],
                args=json.dumps(call["args"], ensure_ascii=False),
                id=call["id"],
                index=self._calls,
            )
            self._calls += 1
            message = AIMessageChunk(content="", tool_call_chunks=[piece])
            yield ChatGenerationChunk(message=message)


def result(call: Call, text: str, reply: Reply) -> ChatResult:
    """The whole reply."""
    reading = Reading(call.tools)
    shown, _ = reading.feed(text)
    rest, _ = reading.finish()
    usage = _usage(call, reply)
    message = AIMessage(
        content=shown + rest,
        tool_calls=reading.calls,
        usage_metadata=usage,
        response_metadata=_metadata(call, reply, len(reading.calls)),
    )
    return ChatResult(
        generations=[ChatGeneration(message=message)],
        llm_output={"model_name": call.model, "token_usage": dict(usage)},
    )


def _usage(call: Call, reply: Reply) -> UsageMetadata:
    said = len(reply.tokens)
    return UsageMetadata(
        input_tokens=call.prompt_tokens,
        output_tokens=said,
        total_tokens=call.prompt_tokens + said,
        input_token_details=InputTokenDetails(cache_read=call.cached),
    )


def _metadata(call: Call, reply: Reply, calls: int) -> dict[str, Any]:
    reason = "tool_calls" if calls else _REASONS.get(reply.finish_reason or "", "stop")
    return {"model_name": call.model, "model_provider": "forkserve", "finish_reason": reason}
