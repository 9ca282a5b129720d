"""Speculation for `langchain.agents.create_agent`, without touching a node.

::

    agent = create_agent(ChatForkServe(engine=engine), tools, middleware=[ForkServeMiddleware()])

When the model has answered, its calls are known and no tool runs yet: the next prompt is prefilled
up to the first result while the tools run, with ``ForkServeConfig(background=True)``.  The model
itself binds what really came: its conversation commits the next prompt, and reuses what was right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from forkserve import aio
from forkserve.adapters.langchain.chat import ChatForkServe
from forkserve.control.timings import IdleTimes
from forkserve.errors import ForkServeError, MissingExtra

try:
    from langchain.agents.middleware import AgentMiddleware
except ImportError as error:
    raise MissingExtra("the agent middleware", "langgraph", "langchain") from error

__all__ = ["ForkServeMiddleware"]


class ForkServeMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware for agents whose model is a `ChatForkServe`; other models pass untouched.

    t_idle_ms: pause to expect of a tool that has not run yet; later ones are expected to take what
    a low quantile of its runs took.  stream_stats: report each turn on the ``custom`` stream,
    under the key ``forkserve``.
    """

    def __init__(
        self, *, t_idle_ms: float = 500.0, quantile: float = 0.25, stream_stats: bool = True
    ) -> None:
        super().__init__()
        self._t_idle_ms = t_idle_ms
        self._stream_stats = stream_stats
        self._times = IdleTimes(quantile)
        self._lock = threading.Lock()
        self.speculated_tokens = 0

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Let the model answer; then speculate on the results of the tools that it calls."""
        response = handler(request)
        self._answered(request, response)
        return response

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """`wrap_model_call` for a coroutine; rendering happens in a thread."""
        response = await handler(request)
        if isinstance(request.model, ChatForkServe):
            await aio.in_thread(lambda: self._answered(request, response))
        return response

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Measure the tool."""
        began = time.perf_counter()
        try:
            return handler(request)
        finally:
            self._ran(request, began)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """`wrap_tool_call` for a coroutine."""
        began = time.perf_counter()
        try:
            return await handler(request)
        finally:
            self._ran(request, began)

    def _answered(self, request: Any, response: Any) -> None:
        model = request.model
        if not isinstance(model, ChatForkServe):
            return
        messages = getattr(response, "result", [response])
        reply = next((m for m in messages if isinstance(m, AIMessage)), None)
        if reply is None:
            return
        tokens = 0
        if reply.tool_calls:
            history = [request.system_message] if request.system_message is not None else []
            tools = [convert_to_openai_tool(tool) for tool in request.tools]
            with self._lock:  # parallel calls: the next prompt waits for the slowest
                pauses = [
                    self._times.expect(call["name"], self._t_idle_ms) for call in reply.tool_calls
                ]
            try:
                tokens = model.speculate_results(
                    [*history, *request.messages], reply, tools, t_idle_ms=max(pauses)
                )
            except ForkServeError:
                tokens = 0  # speculation is optional, and nobody waits for it
        with self._lock:
            self.speculated_tokens += tokens
        if self._stream_stats:
            usage = reply.usage_metadata
            details = usage.get("input_token_details", {}) if usage is not None else {}
            stats = {
                "prompt_tokens": usage["input_tokens"] if usage is not None else 0,
                "cached_tokens": details.get("cache_read", 0),
                "speculated_tokens": tokens,
                "tools": [call["name"] for call in reply.tool_calls],
            }
            request.runtime.stream_writer({"forkserve": stats})

    def _ran(self, request: Any, began: float) -> None:
        ms = (time.perf_counter() - began) * 1e3
        with self._lock:
            self._times.observe(request.tool_call["name"], ms)
