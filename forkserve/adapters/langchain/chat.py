"""`ChatForkServe`: LangChain's chat model interface over an engine in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils import secret_from_env
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from forkserve import aio
from forkserve.adapters.constraints import constraint_for
from forkserve.adapters.langchain.current import current_branch, place, rows_there, running
from forkserve.adapters.langchain.messages import Prompts
from forkserve.adapters.langchain.names import check_names
from forkserve.adapters.langchain.pool import Pool
from forkserve.adapters.langchain.replies import Call, Chunks, ain_time, in_time, result
from forkserve.adapters.langchain.structured import Method, parser_for, response_format, with_raw
from forkserve.adapters.sampling import SAMPLING, sampling_fields
from forkserve.api import Engine
from forkserve.errors import AdapterError, ConfigError
from forkserve.types import SamplingParams
from forkserve.values import whole

__all__ = ["ChatForkServe"]

DEFAULT_MAX_TOKENS = 1024


class ChatForkServe(BaseChatModel):
    """A chat model on a ForkServe engine.

    engine: runs the model, in this process.  model: the name to report; the engine decides what
    runs.  temperature, max_tokens (1024 if not given), stop, seed, top_p, logit_bias,
    presence_penalty, frequency_penalty, logprobs, top_logprobs: as OpenAI's.  top_k, min_p,
    repetition_penalty, stop_token_ids, ignore_eos: as vLLM's.  n: replies to one prompt, which
    `generate` gives; they decode in shared passes.  What is given for a call and unknown is a
    ConfigError.
    timeout: seconds for a call; TimeoutError after it.  keep: conversations kept alive between
    calls.  max_retries, api_key, base_url: taken for the sake of the standard interface; a server
    URL comes with the server.

    The next call of a conversation reuses all that its prompt shares with the last one and with
    the reply; ``usage_metadata["input_token_details"]["cache_read"]`` counts it.  Inside a
    decorated LangGraph node the model speaks on the node's branch, if the prompt goes on with it.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    model_name: str = Field(default="forkserve", alias="model")
    temperature: float | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int = Field(default=1, ge=1)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    max_retries: int = 2
    streaming: bool = False
    keep: int = Field(default=16, ge=1)
    base_url: str | None = None
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("FORKSERVE_API_KEY", default=None)
    )
    _pool: Pool | None = PrivateAttr(default=None)
    _prompts: Prompts | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Set up the conversations that are kept."""
        super().model_post_init(context)
        if self.engine is not None:
            self._pool = Pool(self.engine, self.keep)
            self._prompts = Prompts(self.engine.backend.tokenizer)

    def close(self) -> None:
        """End the conversations that are kept."""
        if self._pool is not None:
            self._pool.close()

    # ---------------------------------------------------------------- identity

    @property
    def _llm_type(self) -> str:
        return "forkserve-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Part of LangChain's cache key: all that changes the output, nothing of a session."""
        names = ("model_name", "max_tokens", "stop", "n", *SAMPLING)
        return {name: getattr(self, name) for name in names}

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Where LangChain finds secrets."""
        return {"api_key": "FORKSERVE_API_KEY"}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where the class lives."""
        return ["forkserve", "langchain"]

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """An engine cannot be revived from JSON."""
        return False

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="forkserve",
            ls_model_name=kwargs.get("model", self.model_name),
            ls_model_type="chat",
        )
        temperature = kwargs.get("temperature", self.temperature)
        if temperature is not None:
            params["ls_temperature"] = temperature
        max_tokens = kwargs.get("max_tokens", self.max_tokens)
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        if words := (stop or self.stop):
            params["ls_stop"] = words
        return params

    # ---------------------------------------------------------------- tools and structure

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Tools that the model may call.

        tool_choice: auto, none, any or required or True (some tool), or the name of one; a choice
        that leaves no way out is kept by a grammar (the `engine` extra).
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice is True or tool_choice == "any":
            tool_choice = "required"
        elif isinstance(tool_choice, str) and tool_choice not in ("auto", "none", "required"):
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        if isinstance(tool_choice, dict):
            name = tool_choice.get("function", {}).get("name")
            known = [schema["function"]["name"] for schema in schemas]
            if name not in known:
                raise ValueError(f"tool_choice {name!r} is not one of the tools: {known}")
        if tool_choice:
            kwargs["tool_choice"] = tool_choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=schemas, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Replies that match a schema: kept by a grammar, not by hope.

        json_schema: the reply is the object.  function_calling: it is the only tool, and must be
        called.  json_mode: any JSON object (the prompt must say which).
        """
        if method not in ("json_schema", "function_calling", "json_mode"):
            raise ValueError(
                f"unknown method {method!r}; use json_schema, function_calling or json_mode"
            )
        if schema is None and method != "json_mode":
            raise ValueError(f"method {method!r} needs a schema")
        tool = convert_to_openai_tool(schema, strict=strict) if schema is not None else None
        note = {"kwargs": {"method": method, "strict": strict}, "schema": tool}
        kwargs["ls_structured_output_format"] = note
        model: Runnable[LanguageModelInput, AIMessage]
        if method == "function_calling" and tool is not None:
            model = self.bind_tools([tool], tool_choice=tool["function"]["name"], **kwargs)
        else:
            model = self.bind(response_format=response_format(method, tool), **kwargs)
        parser = parser_for(schema, method, tool)
        return with_raw(model, parser) if include_raw else model | parser

    # ---------------------------------------------------------------- speculation

    def speculate_results(
        self,
        messages: Sequence[BaseMessage],
        reply: AIMessage,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        t_idle_ms: float = 1e9,
    ) -> int:
        """While the tools of `reply` run: prefill the next prompt up to the first result.

        Never waits for the engine.  Returns the tokens admitted.
        """
        if self._pool is None or self._prompts is None or not reply.tool_calls:
            return 0
        decoded = self._pool.decoded(self._prompts.tokens(messages, tools))
        if decoded is None:
            return 0
        first = reply.tool_calls[0]
        known = self._prompts.known(
            decoded, [*messages, reply], tools, first["id"] or "", first["name"]
        )
        return self._pool.speculate(known, decoded, t_idle_ms)

    # ---------------------------------------------------------------- generation

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._call(messages, stop, kwargs) as call:
            return result(call, call.replies())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with self._acall(messages, stop, kwargs) as call:
            return result(call, await call.areplies())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._call(messages, stop, kwargs) as call, call.stream() as stream:
            chunks = Chunks(call)
            for piece in in_time(stream, call):
                for chunk in chunks.feed(piece):
                    _tell(run_manager, chunk)
                    yield chunk
            for chunk in chunks.finish(stream.reply):
                _tell(run_manager, chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with self._acall(messages, stop, kwargs) as call, call.astream() as stream:
            chunks = Chunks(call)
            async for piece in ain_time(stream, call):
                for chunk in chunks.feed(piece):
                    await _atell(run_manager, chunk)
                    yield chunk
            for chunk in chunks.finish(stream.reply):
                await _atell(run_manager, chunk)
                yield chunk

    # ---------------------------------------------------------------- one call

    @contextmanager
    def _call(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> Iterator[Call]:
        """Put the prompt in place, on the running node's branch or in a conversation."""
        engine, pool, prompts = self.engine, self._pool, self._prompts
        if engine is None or pool is None or prompts is None:
            raise AdapterError(
                "ChatForkServe has no engine: pass engine=Engine(backend)"
                + (" (a server URL comes with the server)" if self.base_url else "")
            )
        check_names(kwargs)
        choice = kwargs.get("tool_choice")
        tools = list(kwargs.get("tools") or ())
        prompt = prompts.tokens(messages, tools)
        room = engine.backend.info.max_context - len(prompt)
        wanted = kwargs.get("max_tokens", self.max_tokens)
        if wanted is None:
            wanted = DEFAULT_MAX_TOKENS
        if wanted < 1:
            raise ConfigError(f"max_tokens={wanted} must be >= 1, or None for {DEFAULT_MAX_TOKENS}")
        timeout = kwargs.get("timeout", self.timeout)
        asked = kwargs.get("n")
        count = whole("n", self.n if asked is None else asked)
        if count < 1:
            raise ConfigError(f"n={count} replies; ask for at least 1")
        params = self._sampling(engine, tools, choice, stop, kwargs)
        with ExitStack() as stack:
            branch = place(engine, prompt) if count == 1 else None  # a node's branch has one end
            if branch is None:
                branches, cached = stack.enter_context(pool.turn(prompt, count))
            else:
                branches, cached = [branch], rows_there(branch, len(prompt))
            yield Call(
                branches=branches,
                prompt_tokens=len(prompt),
                cached=cached,
                params=params,
                max_tokens=max(min(wanted, room), 0),
                tools=() if choice == "none" else tuple(t["function"]["name"] for t in tools),
                model=kwargs.get("model") or self.model_name,
                timeout=timeout,
                deadline=time.monotonic() + timeout if timeout is not None else None,
            )

    @asynccontextmanager
    async def _acall(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> AsyncIterator[Call]:
        """`_call` for a coroutine: rendering and committing happen in a thread."""
        here = current_branch()  # a thread of the pool would not see it
        context = self._call(messages, stop, kwargs)

        def enter() -> Call:
            token = running.set(here)
            try:
                return context.__enter__()
            finally:
                running.reset(token)

        call = await aio.in_thread(enter, undo=lambda _: _leave(context))
        try:
            yield call
        except BaseException as error:
            context.__exit__(type(error), error, error.__traceback__)
            raise
        context.__exit__(None, None, None)

    def _sampling(
        self,
        engine: Engine,
        tools: Sequence[Mapping[str, Any]],
        choice: Any,
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
    ) -> SamplingParams:
        values = sampling_fields({name: kwargs.get(name, getattr(self, name)) for name in SAMPLING})
        given = stop if stop is not None else self.stop or ()
        words = (given,) if isinstance(given, str) else tuple(given)  # letters would all stop it
        constraint = constraint_for(engine, tools, choice, kwargs.get("response_format"))
        return SamplingParams(stop=words, constraint=constraint, **values)


def _leave(context: AbstractContextManager[Any]) -> None:
    context.__exit__(None, None, None)


def _tell(manager: CallbackManagerForLLMRun | None, chunk: ChatGenerationChunk) -> None:
    if manager is not None:
        manager.on_llm_new_token(chunk.text, chunk=chunk)


async def _atell(manager: AsyncCallbackManagerForLLMRun | None, chunk: ChatGenerationChunk) -> None:
    if manager is not None:
        await manager.on_llm_new_token(chunk.text, chunk=chunk)
