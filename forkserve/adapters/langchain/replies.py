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

from forkserve import aio
from forkserve.adapters.chat import Reading
from forkserve.branch import Branch
from forkserve.control.generation import Generation
from forkserve.errors import ConfigError
from forkserve.reply import AsyncStream, Reply, Stream
from forkserve.types import SamplingParams

__all__ = ["Call", "Chunks", "ain_time", "in_time", "result"]

_REASONS = {"length": "length", "context": "length", "cancelled": "cancelled"}


@dataclass(slots=True)
class Call:
    """One call of the model whose prompt is in place on `branches`, one for each reply.

    cached: prompt tokens that need not be computed.  tools: names that count as calls.
    deadline: of `time.monotonic`.
    """

    branches: Sequence[Branch]
    prompt_tokens: int
    cached: int
    params: SamplingParams
    max_tokens: int
    tools: Sequence[str]
    model: str
    timeout: float | None
    deadline: float | None

    def stream(self) -> Stream:
        """Begin.  Raises ConfigError for several replies."""
        return self._one().stream(self.max_tokens, self.params)

    def astream(self) -> AsyncStream:
        """Begin, for a coroutine."""
        return self._one().astream(self.max_tokens, self.params)

    def _one(self) -> Branch:
        if len(self.branches) > 1:
            raise ConfigError(f"n={len(self.branches)}: one reply at a time can be streamed")
        return self.branches[0]

    def replies(self) -> list[Reply]:
        """Generate all of them, in shared passes."""
        running = self._start()
        try:
            aio.wait(running[0], lambda: self._ended(running))
            return self._told(running)
        finally:
            for generation in running:
                generation.cancel()

    async def areplies(self) -> list[Reply]:
        """`replies` for a coroutine; cancelling it cancels them all."""
        session = self.branches[0].session
        async with session._turn():
            running = self._start()
        try:
            await aio.until(session.engine, running[0], lambda: self._ended(running))
            return self._told(running)
        finally:
            for generation in running:
                generation.cancel()

    def _start(self) -> list[Generation]:
        if len(self.branches) == 1:  # its seed is the one that was given
            return [self.branches[0]._start(self.max_tokens, self.params)]
        session = self.branches[0].session
        return session._start_many(self.branches, self.max_tokens, self.params)

    def _ended(self, running: Sequence[Generation]) -> bool:
        done = all(g.done for g in running) or any(g.error is not None for g in running)
        return done or self._late()

    def _told(self, running: Sequence[Generation]) -> list[Reply]:
        for generation in running:
            if generation.error is not None:
                raise generation.error
        if not all(generation.done for generation in running):
            self.check()
        return [Reply.of(generation) for generation in running]

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def check(self) -> None:
        """Raise TimeoutError once the time is over."""
        if self._late():
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
            usage_metadata=_usage(self._call, len(reply.tokens)),
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


def result(call: Call, replies: Sequence[Reply]) -> ChatResult:
    """The whole replies; the usage of each counts the prompt that they share."""
    generations, said = [], sum(len(reply.tokens) for reply in replies)
    for reply in replies:
        reading = Reading(call.tools)
        shown, _ = reading.feed(reply.text)
        rest, _ = reading.finish()
        metadata = _metadata(call, reply, len(reading.calls))
        message = AIMessage(
            content=shown + rest,
            tool_calls=reading.calls,
            usage_metadata=_usage(call, len(reply.tokens)),
            response_metadata=metadata,
        )
        told: tuple[str, ...] = ("finish_reason", "logprobs")
        info = {name: metadata[name] for name in told if name in metadata}
        generations.append(ChatGeneration(message=message, generation_info=info))
    usage = dict(_usage(call, said))
    return ChatResult(
        generations=generations, llm_output={"model_name": call.model, "token_usage": usage}
    )


def _usage(call: Call, said: int) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=call.prompt_tokens,
        output_tokens=said,
        total_tokens=call.prompt_tokens + said,
        input_token_details=InputTokenDetails(cache_read=call.cached),
    )


def _metadata(call: Call, reply: Reply, calls: int) -> dict[str, Any]:
    reason = "tool_calls" if calls else _REASONS.get(reply.finish_reason or "", "stop")
    found = {"model_name": call.model, "model_provider": "forkserve", "finish_reason": reason}
    return {**found, "logprobs": _logprobs(call, reply)} if reply.logprobs else found


def _logprobs(call: Call, reply: Reply) -> dict[str, Any]:
    """In OpenAI's form: one entry for each token, with the likeliest ones at its place."""
    decode = call.branches[0].engine.backend.tokenizer.decode_bytes

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = decode([token])
        return {"token": raw.decode("utf-8", "replace"), "bytes": [*raw], "logprob": logprob}

    top = reply.top_logprobs or ((),) * len(reply.tokens)
    return {
        "content": [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in others]}
            for token, logprob, others in zip(reply.tokens, reply.logprobs, top, strict=False)
        ]
    }
