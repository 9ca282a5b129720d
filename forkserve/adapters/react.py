"""An agent loop over plain tools: reason, act, observe, on one growing sequence of tokens.

::

    def weather(city: str) -> str:
        "The weather in a city."
        return look_up(city)

    agent = ReactAgent(engine, [weather], system="Answer in one sentence.")
    print(agent.run("Is it raining in Oslo?").text)

While a tool runs the engine prefills what is known of the next prompt: the turn as the chat
template writes it, and the header of the result.  The prompts are those of a loop without
speculation, token by token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, Literal

from forkserve import aio
from forkserve.adapters.events import (
    Call,
    Committed,
    Event,
    Final,
    MaxTurnsReached,
    Observation,
    ReactResult,
    Speculated,
    TextDelta,
    ToolCalled,
    ToolResult,
    ToolStarted,
    Turn,
    TurnStats,
)
from forkserve.adapters.react_run import Run
from forkserve.adapters.running import Tasks, Threads
from forkserve.adapters.scanner import ParsedToolCall
from forkserve.adapters.templates import Dialect, probe
from forkserve.adapters.tools import Tool, as_tools
from forkserve.api import Engine
from forkserve.control.experience import UNBOUNDED_MS
from forkserve.control.timings import IdleTimes
from forkserve.errors import AdapterError, ConfigError
from forkserve.types import GREEDY, SamplingParams

__all__ = [
    "Call",
    "Committed",
    "Event",
    "Final",
    "MaxTurnsReached",
    "Observation",
    "ParsedToolCall",
    "ReactAgent",
    "ReactResult",
    "Speculated",
    "TextDelta",
    "ToolCalled",
    "ToolResult",
    "ToolStarted",
    "Turn",
    "TurnStats",
]

Task = str | Sequence[Mapping[str, Any]]

_TOOLS_PROMPT = """\
You can call tools. These are their signatures, one a line:
{tools}
To call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>:
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
The result is given to you then. When you need no tool, answer the user."""

_TEXT_PROMPT = """\
You can use tools. These are their signatures, one a line:
{tools}
Write each step in this form:
Thought: what to do next
Action: the name of a tool
Action Input: its arguments as a JSON object
The result is given to you as an Observation. When you know the answer, write:
Thought: I know the answer.
Final Answer: the answer"""


class ReactAgent:
    """Runs tools for a model until it answers.

    tools: functions, pydantic models, `Tool`s, or pairs (definition, callable) with an OpenAI or
    MCP definition.  system: text of the system message; how to call tools is added to it unless the
    template says that by itself.
    mode: "tools" finds calls in the notations models are trained on; "text" is Thought / Action /
    Observation.  parallel: let the model end its turn, which may hold several calls; a tool starts
    with its call all the same.  Without it, or if the template refuses several calls, the turn ends
    with the first one.
    params: how to sample; a function gives them by the number of the turn, from 0 (a constraint for
    the first turn makes it call a tool).
    speculate: prefill what is known while tools run.  placeholders: never speculate on tool
    arguments (they may be secrets) unless the tool is `public`; they are added with the commit.
    reasoning: keep <think> blocks in the messages (the template may drop them), or drop them.
    tool_timeout_s: how long a tool may take that has no limit of its own.  p_error: expected share
    of calls that fail.  error_prefix: how an error observation begins.
    result_wrap: text around results in a user message, for templates without tool messages.
    dialect: what the template can do; found out by trying it.
    **session: options of `Engine.open` (tenant=, salt=, seed=).

    An agent may be used by several threads and tasks at once: each run has a session of its own.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Sequence[Any] = (),
        *,
        system: str = "",
        mode: Literal["tools", "text"] = "tools",
        params: SamplingParams | Callable[[int], SamplingParams] = GREEDY,
        max_tokens: int = 512,
        max_turns: int = 8,
        parallel: bool = True,
        speculate: bool = True,
        placeholders: bool = True,
        reasoning: Literal["keep", "drop"] = "keep",
        tool_timeout_s: float | None = None,
        p_error: float = 0.1,
        error_prefix: str = "Error: ",
        result_wrap: tuple[str, str] | None = None,
        dialect: Dialect | None = None,
        **session: Any,
    ) -> None:
        if max_turns < 1 or max_tokens < 1:
            raise ConfigError(f"max_turns={max_turns} and max_tokens={max_tokens} must be >= 1")
        if mode not in ("tools", "text") or reasoning not in ("keep", "drop"):
            raise ConfigError(
                f"mode={mode!r} is tools or text, reasoning={reasoning!r} keep or drop"
            )
        if not 0 <= p_error <= 1:
            raise ConfigError(f"p_error={p_error} must be in [0, 1]")
        self.engine = engine
        self.tools: dict[str, Tool] = as_tools(tools)
        self.mode = mode
        self.max_tokens = max_tokens
        self.max_turns = max_turns
        self.speculate = speculate
        self.placeholders = placeholders
        self.reasoning = reasoning
        self.tool_timeout_s = tool_timeout_s
        self.p_error = p_error
        self.error_prefix = error_prefix
        self.session_options = session
        found = dialect or probe(engine.backend.tokenizer)
        if mode == "text":
            found = replace(found, tools=False, calls=False, results=False)
        self.dialect = found
        self.parallel = parallel and mode == "tools" and self.dialect.parallel
        default = (
            ("Observation: ", "") if mode == "text" else ("<tool_response>\n", "\n</tool_response>")
        )
        self.result_wrap = result_wrap or default
        self._params = params
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.system = self._system(system)
        self._times = IdleTimes(engine.config.idle_quantile)
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- running

    def run(self, task: Task, *, session: Any = None) -> ReactResult:
        """Work on a task until the model answers.

        task: the user's message, or a whole conversation (a result's `messages` and a new one).
        session: an open session (an object with ``id``, or the id) to go on with; it stays open.
        What it holds already of the prompt is not computed again.  By default the run opens one and
        closes it at the end.

        Raises MaxTurnsReached, and what the engine's verbs raise.  What a tool raises becomes an
        observation: see `Observation.error`.
        """
        with closing(self.stream(task, session=session)) as events:
            for event in events:
                if isinstance(event, Final):
                    return event.result
        raise AssertionError("a run ends with Final")

    async def arun(self, task: Task, *, session: Any = None) -> ReactResult:
        """`run` for a coroutine.  Cancelling it ends the generation and async tools."""
        async with aclosing(self.astream(task, session=session)) as events:
            async for event in events:
                if isinstance(event, Final):
                    return event.result
        raise AssertionError("a run ends with Final")

    def stream(self, task: Task, *, session: Any = None) -> Generator[Event, None, None]:
        """`run` as events; the last one is Final.  Closing the iterator ends the run."""
        run = self._run(task, session)
        threads = Threads(run, self.tool_timeout_s)
        try:
            run.open()
            while True:
                generation = run.start()
                while run.decoding:
                    aio.wait(generation, run.ready)
                    for event in run.read():
                        yield event
                        yield from self._start(threads, event)
                for event in run.end_decoding():
                    yield event
                    yield from self._start(threads, event)
                if run.answered:
                    break
                while run.pending:
                    observation = threads.next(wait=False)
                    if observation is None:
                        yield from run.speculate()
                        observation = self._wait(threads)
                    run.arrived(observation)
                    yield ToolResult(len(run.turns) - 1, observation)
                yield run.commit()
            yield Final(run.result())
        finally:
            run.close()

    async def astream(self, task: Task, *, session: Any = None) -> AsyncGenerator[Event, None]:
        """`stream` for ``async for``.  Use ``contextlib.aclosing`` when it may be left early."""
        run = self._run(task, session)
        tasks = Tasks(run, self.tool_timeout_s)
        try:
            await aio.in_thread(run.open)
            while True:
                generation = run.start()
                while run.decoding:
                    await aio.until(self.engine, generation, run.ready)
                    for event in run.read():
                        yield event
                        for started in self._start(tasks, event):
                            yield started
                for event in run.end_decoding():
                    yield event
                    for started in self._start(tasks, event):
                        yield started
                if run.answered:
                    break
                while run.pending:
                    seen = await tasks.next(wait=False)
                    if seen is None:
                        forked = await aio.in_thread(run.speculate)
                        for event in forked:
                            yield event
                        if forked and not self.engine.config.background:
                            tasks.also(_drain(self.engine))
                        seen = await tasks.next(wait=True)
                    assert seen is not None
                    run.arrived(seen)
                    yield ToolResult(len(run.turns) - 1, seen)
                yield await aio.in_thread(run.commit)
            yield Final(run.result())
        finally:
            run.close()
            await tasks.aclose()

    def prompt(self, task: Task) -> list[int]:
        """The tokens that a run on a task begins with: ``engine.session(agent.prompt(task))``."""
        run = self._run(task, None)
        return run.renderer.tokens(run.messages)

    def params(self, turn: int) -> SamplingParams:
        """How a turn is sampled."""
        params = self._params(turn) if callable(self._params) else self._params
        if self.mode == "text":
            params = replace(params, stop=(*params.stop, "\nObservation:"))
        return params

    # ---------------------------------------------------------------- what runs learn

    def expected_ms(self, tool: str) -> float:
        """How long a call of a tool will take: as it did, or as the tool says."""
        hint = self.tools[tool].idle_ms if tool in self.tools else 0.0
        with self._lock:
            return self._times.expect(tool, UNBOUNDED_MS if hint is None else hint)

    def learn(self, tool: str, ms: float) -> None:
        """A call of a tool took this long."""
        with self._lock:
            self._times.observe(tool, ms)

    # ---------------------------------------------------------------- helpers

    def _run(self, task: Task, session: Any) -> Run:
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": task}] if isinstance(task, str) else list(task)
        )
        if not messages:
            raise AdapterError("a task is a user message, or a conversation with at least one")
        if self.system and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        identifier = session if session is None or isinstance(session, str) else session.id
        return Run(self, messages, identifier)

    def _system(self, text: str) -> str:
        """The system message, with what the template does not say about tools."""
        if not self.tools or self.dialect.tools:
            return text
        import json

        lines = "\n".join(json.dumps(s["function"], ensure_ascii=False) for s in self.schemas)
        prompt = _TEXT_PROMPT if self.mode == "text" else _TOOLS_PROMPT
        return "\n\n".join(part for part in (text, prompt.format(tools=lines)) if part)

    def _start(self, running: Threads | Tasks, event: Event) -> Iterator[ToolStarted]:
        """Run the tool of a call as soon as it is complete."""
        if isinstance(event, ToolCalled) and running.start(event.call):
            yield ToolStarted(event.turn, event.call, running.limit(event.call))

    def _wait(self, threads: Threads) -> Observation:
        """The next observation; until then an engine without a thread speculates in this one."""
        stepping = not self.engine.config.background
        while True:
            found = threads.next(wait=not stepping)
            if found is not None:
                return found
            stepping = self.engine.drain_slack() > 0


async def _drain(engine: Engine) -> None:
    """Let an engine without a thread of its own speculate until nothing is left."""
    while await aio.in_thread(engine.drain_slack):
        await asyncio.sleep(0)
