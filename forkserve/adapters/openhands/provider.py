"""The bridge behind litellm: models called ``forkserve/<name>`` run in this process.

litellm takes a custom provider as an object with four methods.  OpenHands keeps nothing but the
model's name, so a conversation that was forked, copied or stored finds its engine again by it.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any

import litellm
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import (
    ChatCompletionDeltaToolCall,
    Choices,
    Function,
    Message,
    ModelResponse,
    ModelResponseStream,
    StreamingChoices,
    Usage,
)
from litellm.types.utils import (
    Delta as ChunkDelta,
)

from forkserve.adapters.openhands.bridge import Bridge
from forkserve.adapters.openhands.requests import Answer, ChatRequest, Delta
from forkserve.errors import (
    AdmissionRefused,
    ConfigError,
    ContextOverflow,
    ForkServeError,
    OutOfPages,
)

__all__ = ["PROVIDER", "register", "unregister"]

PROVIDER = "forkserve"
SESSION_HEADER = "x-litellm-session-id"

_bridges: dict[str, Bridge] = {}
_lock = threading.Lock()


class _Provider(CustomLLM):
    """Every method takes what litellm passes to custom providers, by keyword."""

    def completion(self, **given: Any) -> ModelResponse:
        """One whole reply."""
        model = given["model"]
        try:
            bridge, request = _read(given)
            return _response(model, bridge.complete(request))
        except Exception as error:
            raise _mapped(error, model) from error

    async def acompletion(self, **given: Any) -> ModelResponse:
        """`completion` for a coroutine."""
        model = given["model"]
        try:
            bridge, request = _read(given)
            return _response(model, await bridge.acomplete(request))
        except Exception as error:
            raise _mapped(error, model) from error

    def streaming(self, **given: Any) -> Iterator[ModelResponseStream]:
        """A reply in chunks; the last one has the usage."""
        model = given["model"]
        try:
            bridge, request = _read(given)
            chunks = _Chunks(model, request.id)
            with closing(bridge.stream(request)) as items:
                for item in items:
                    yield from chunks.of(item)
        except Exception as error:
            raise _mapped(error, model) from error

    async def astreaming(self, **given: Any) -> AsyncIterator[ModelResponseStream]:
        """`streaming` for a coroutine."""
        model = given["model"]
        try:
            bridge, request = _read(given)
            chunks = _Chunks(model, request.id)
            async with aclosing(bridge.astream(request)) as items:
                async for item in items:
                    for chunk in chunks.of(item):
                        yield chunk
        except Exception as error:
            raise _mapped(error, model) from error


_provider = _Provider()


def register(name: str, bridge: Bridge) -> None:
    """Let ``forkserve/<name>`` be answered by a bridge.  Raises ConfigError if it is taken."""
    info = bridge.engine.backend.info
    with _lock:
        if name in _bridges:
            raise ConfigError(
                f"the model '{PROVIDER}/{name}' is there already; close its adapter, or give name="
            )
        _bridges[name] = bridge
        if not any(item["provider"] == PROVIDER for item in litellm.custom_provider_map):
            litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": _provider})
            litellm.utils.custom_llm_setup()
    litellm.register_model(
        {
            f"{PROVIDER}/{name}": {
                "litellm_provider": PROVIDER,
                "mode": "chat",
                "max_input_tokens": info.max_context,
                "input_cost_per_token": 0.0,
                "output_cost_per_token": 0.0,
                "supports_function_calling": True,
            }
        }
    )


def unregister(name: str, bridge: Bridge) -> None:
    """Undo `register`; does nothing if the name is another one's by now."""
    with _lock:
        if _bridges.get(name) is bridge:
            del _bridges[name]
            litellm.model_cost.pop(f"{PROVIDER}/{name}", None)


def _read(given: Mapping[str, Any]) -> tuple[Bridge, ChatRequest]:
    name = given["model"]
    with _lock:
        bridge = _bridges.get(name)
        known = ", ".join(sorted(_bridges)) or "none"
    if bridge is None:
        raise litellm.NotFoundError(
            f"no engine in this process is called '{name}' (there: {known}); make an "
            f"OpenHandsAdapter with name={name!r}",
            model=name,
            llm_provider=PROVIDER,
        )
    headers = {key.lower(): value for key, value in (given.get("headers") or {}).items()}
    timeout = given.get("timeout")
    return bridge, ChatRequest.read(
        given["messages"],
        given.get("optional_params") or {},
        session=headers.get(SESSION_HEADER, ""),
        timeout=float(timeout) if isinstance(timeout, (int, float)) else None,
    )


def _response(model: str, answer: Answer) -> ModelResponse:
    message = Message(
        content=answer.text or None,
        role="assistant",
        tool_calls=list(answer.calls) or None,
        **({"reasoning_content": answer.thought} if answer.thought else {}),
    )
    choice = Choices(finish_reason=answer.finish_reason, index=0, message=message)
    return ModelResponse(id=answer.id, choices=[choice], model=model, usage=Usage(**answer.usage))


class _Chunks:
    """Chunks of one reply, under one id."""

    def __init__(self, model: str, reply: str) -> None:
        self._model = model
        self._id = reply
        self._calls = 0

    def of(self, item: Delta | Answer) -> Iterator[ModelResponseStream]:
        """The chunks of a piece, or the last ones."""
        if isinstance(item, Answer):
            # litellm ends with the reason, so the usage comes before it.
            usage = self._chunk(ChunkDelta())
            usage.usage = Usage(**item.usage)
            yield usage
            yield self._chunk(ChunkDelta(), item.finish_reason)
            return
        if item.thought:
            yield self._chunk(ChunkDelta(reasoning_content=item.thought, role="assistant"))
        if item.text:
            yield self._chunk(ChunkDelta(content=item.text, role="assistant"))
        for call in item.calls:
            part = ChatCompletionDeltaToolCall(
                id=call["id"],
                type="function",
                index=self._calls,
                function=Function(**call["function"]),
            )
            self._calls += 1
            yield self._chunk(ChunkDelta(tool_calls=[part], role="assistant"))

    def _chunk(self, delta: ChunkDelta, reason: str | None = None) -> ModelResponseStream:
        choice = StreamingChoices(delta=delta, index=0, finish_reason=reason)
        return ModelResponseStream(id=self._id, choices=[choice], model=self._model)


def _mapped(error: Exception, model: str) -> Exception:
    """An error as litellm, and OpenHands behind it, expects it.

    What may be better in a moment is of a kind that is retried.
    """
    where = {"model": model, "llm_provider": PROVIDER}
    if isinstance(error, ContextOverflow):
        return litellm.ContextWindowExceededError(message=str(error), **where)
    if isinstance(error, TimeoutError):
        return litellm.Timeout(message=str(error), **where)
    if isinstance(error, AdmissionRefused):
        return litellm.RateLimitError(message=str(error), **where)
    if isinstance(error, OutOfPages):
        return litellm.ServiceUnavailableError(message=str(error), **where)
    if isinstance(error, ConfigError):
        return litellm.BadRequestError(message=str(error), **where)
    if isinstance(error, ForkServeError):
        return litellm.InternalServerError(message=str(error), **where)
    return error
