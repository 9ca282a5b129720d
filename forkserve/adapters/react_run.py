"""One ReAct run without its waiting: what is decoded, bound, forked and committed, and when.

The loops in `react` wait for the engine and the tools, in threads or in tasks, and tell the run
what came; everything that decides anything is here, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forkserve.adapters.conversation import TurnMessages, thought
from forkserve.adapters.events import (
    Call,
    Committed,
    Event,
    MaxTurnsReached,
    Observation,
    ReactResult,
    Speculated,
    TextDelta,
    ToolCalled,
    Totals,
    Turn,
)
from forkserve.adapters.guessing import ERROR_BRANCH, Guesser
from forkserve.adapters.scanner import ParsedToolCall, Scanner, TextScanner
from forkserve.adapters.templates import ChatRenderer, common
from forkserve.adapters.tools import Tool, ToolError, UnknownTool, failure_of
from forkserve.control.generation import Generation
from forkserve.control.text import TextStream
from forkserve.errors import AdapterError
from forkserve.types import HitClass, Tokens

if TYPE_CHECKING:
    from forkserve.adapters.react import ReactAgent

__all__ = ["Run"]

_ANSWER = re.compile(r".*Final Answer:\s*", re.DOTALL)


class Run:
    """State of one run.  Used by one thread or task at a time."""

    def __init__(
        self, agent: ReactAgent, messages: Sequence[Mapping[str, Any]], session: str | None
    ) -> None:
        self.agent = agent
        self.engine = agent.engine
        self.renderer = ChatRenderer(self.engine.backend.tokenizer, agent.schemas, agent.dialect)
        self.messages: list[Mapping[str, Any]] = list(messages)
        self.turns: list[Turn] = []
        self.pending: dict[str, Call] = {}
        self.generation: Generation | None = None
        self._session = session
        self._own = session is None
        self._opened = False
        self._ids = 0
        self._prompt_end = ""
        self._suffix = 0  # tokens of the known part of the next prompt, if it was asked for
        self._speculated = -1  # results known when the last suffix was forked
        self._guesser: Guesser | None = None
        self._turn = Turn(0)
        self._decoded: list[int] = []

    @property
    def session(self) -> str:
        """Id of the session it runs on."""
        assert self._session is not None, "the run was not opened"
        return self._session

    # ---------------------------------------------------------------- begin and end

    def open(self) -> None:
        """Bring the session to the first prompt."""
        prompt = self.renderer.tokens(self.messages)
        stats = self._turn.stats
        stats.prompt = len(prompt)
        self._prompt_end = self._text(prompt[-8:])
        if self._session is None:
            handle = self.engine.open(prompt, prefill=False, **self.agent.session_options)
            self._session, self._opened = handle.id, True
            stats.cached = handle.cached_tokens
            stats.prefilled = len(prompt) - stats.cached
            return
        self._opened = True
        held = self.engine.tokens(self.session)
        if held == prompt:
            stats.cached = stats.kept = len(prompt)
        else:
            self._bind(prompt, held, None)

    def close(self) -> None:
        """Stop what runs and give back what the run forked.  Idempotent."""
        if self.generation is not None:
            self.generation.cancel()
        if not self._opened:
            return
        self._opened = False
        if self._own:
            self.engine.close(self.session)
        elif self._guesser is not None:
            self._guesser.drop()

    # ---------------------------------------------------------------- decoding

    def start(self) -> Generation:
        """Begin the model's next turn.  Raises MaxTurnsReached."""
        agent = self.agent
        if len(self.turns) == agent.max_turns:
            raise MaxTurnsReached(agent.max_turns, self.result(""))
        self._turn.number = len(self.turns)
        self.turns.append(self._turn)
        names = None if agent.tools else ()
        thinking = self._prompt_end.rstrip().endswith("<think>")
        text = agent.mode == "text"
        self._scanner = TextScanner() if text else Scanner(names, thinking=thinking)
        params = self._params = agent.params(self._turn.number)
        self._stream = TextStream(self.engine.backend.tokenizer.decode_bytes, params.stop)
        self._read = 0
        self._stopped = False
        self._suffix, self._speculated = 0, -1
        dialect = self.renderer.dialect
        self._wording = TurnMessages(agent, dialect, self.messages, self._scanner)
        self.generation = self.engine.start(self.session, agent.max_tokens, params=params)
        return self.generation

    def ready(self) -> bool:
        """Whether `read` has something to read, or decoding has ended."""
        generation = self.generation
        assert generation is not None
        return generation.done or len(generation.tokens) > self._read

    @property
    def decoding(self) -> bool:
        """Whether the model's turn goes on."""
        generation = self.generation
        assert generation is not None
        return not self._stopped and not (generation.done and self._read >= len(generation.tokens))

    def read(self) -> Iterator[Event]:
        """What the tokens since the last time say: text, and calls that are complete."""
        generation = self.generation
        assert generation is not None
        done = generation.done  # asked first: no token comes after it
        fresh = generation.tokens[self._read :]
        self._read += len(fresh)
        yield from self._say(self._stream.push(self._spoken(fresh)))
        if done and not self._stopped:
            yield from self._say(self._stream.finish())
        if generation.error is not None:
            raise generation.error

    def _spoken(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that are text: without those that end it."""
        params, eos = self._params, self.engine.backend.info.eos_ids
        ends = set(params.stop_ids) | (set() if params.ignore_eos else set(eos))
        return [token for token in tokens if token not in ends]

    def _say(self, piece: str) -> Iterator[Event]:
        if not piece or self._stopped:
            return
        turn = self._turn
        before, turn.text = len(turn.text), turn.text + piece
        found = self._scanner.feed(piece)
        if found and not self.agent.parallel:  # the turn ends with its first call
            found = found[:1]
            turn.text = turn.text[: found[0].span[1]]
            if turn.text.count("<tool_call>") > turn.text.count("</tool_call>"):
                turn.text += "</tool_call>"
            self._stopped = True
            assert self.generation is not None
            self.generation.cancel()
        if len(turn.text) > before:
            yield TextDelta(turn.number, turn.text[before:])
        for parsed in found:
            yield self._called(parsed)

    def _called(self, parsed: ParsedToolCall) -> ToolCalled:
        turn = self._turn
        self._ids += 1
        given = parsed.id or f"call{self._ids:05d}"
        if any(call.id == given for call in turn.calls):
            given = f"call{self._ids:05d}"
        call = Call(given, parsed.name, parsed.arguments, len(turn.calls), parsed.text)
        turn.calls.append(call)
        self._wording.calls.append(call)
        self._wording.spans.append(parsed.span)
        self.pending[call.id] = call
        return ToolCalled(turn.number, call)

    def end_decoding(self) -> Iterator[Event]:
        """The model's turn is over: bind it as a message."""
        turn, generation = self._turn, self.generation
        assert generation is not None
        late = self._scanner.finish()
        if not self.agent.parallel:
            late = [] if turn.calls else late[:1]
        for parsed in late:
            yield self._called(parsed)
        turn.faults = list(self._scanner.faults)
        turn.finish_reason = "stop" if self._stopped else generation.finish_reason
        turn.stats.generated = len(generation.tokens)
        self._wording.text = turn.text
        self.messages = [*self.messages, self._wording.assistant()]
        self._decoded = self.engine.tokens(self.session)

    @property
    def answered(self) -> bool:
        """Whether the turn is the answer: it neither calls a tool nor tries to."""
        return not self._turn.calls and not self._turn.faults

    # ---------------------------------------------------------------- while the tools run

    def prepare(self, call: Call) -> tuple[Tool, dict[str, Any]] | Observation:
        """The tool of a call and its checked arguments, or the observation that there is none."""
        tool = self.agent.tools.get(call.name)
        try:
            if tool is None:
                known = ", ".join(self.agent.tools) or "none"
                raise UnknownTool(f"there is no tool '{call.name}'; the tools are: {known}")
            arguments = call.arguments
            if call.text is not None:
                arguments = tool.from_text(call.text)
            return tool, tool.check(arguments)
        except ToolError as error:
            return self.failed(call, error)
        except Exception as error:  # a validator of the tool's own
            return self.failed(call, failure_of(error))

    def failed(self, call: Call, error: ToolError, ms: float = 0.0) -> Observation:
        """The observation of a call that gave no result."""
        return Observation(call, f"{self.agent.error_prefix}{error}", ms, None, error)

    def arrived(self, observation: Observation) -> None:
        """A result has come, or its tool was given up."""
        call = observation.call
        del self.pending[call.id]
        self._wording.observed[call.number] = observation
        tool = self.agent.tools.get(call.name)
        if tool is not None and observation.ms > 0:
            self.agent.learn(tool.name, observation.ms)
            self.engine.observe(self.session, tool.name, ms=observation.ms)

    def speculate(self) -> list[Speculated]:
        """Fork and speculate on what is known by now, while calls are pending."""
        agent, calls = self.agent, self._turn.calls
        known = self._wording.known
        if not agent.speculate or known == len(calls) or known == self._speculated:
            return []
        self._speculated = known
        if self._guesser is None:
            self._guesser = Guesser(self.engine, self.session, self._turn.number)
        guesser, call = self._guesser, calls[known]
        tool, pause = agent.tools.get(call.name), self._pause_ms()
        build, masks = self._wording.open, self._wording.masks(self._secret)
        suffix = self.renderer.known(self._decoded, build, masks=masks)
        if not known and not suffix.drift:
            self._suffix = suffix.at + len(suffix.tokens) + suffix.withheld
        events = guesser.wrap(suffix, call.name, pause)
        if not suffix.tokens:
            return events
        begins = self.renderer.known(self._decoded, build, prefix=agent.error_prefix, masks=masks)
        events += guesser.recovery(begins, agent.p_error, pause)
        if tool is not None and tool.stable and not suffix.withheld:
            events += guesser.guess(tool.name, 1 - agent.p_error, pause)
        return events

    def _secret(self, call: Call) -> bool:
        """Whether the arguments of a call must not be speculated on."""
        tool = self.agent.tools.get(call.name)
        anything = bool(call.arguments) or bool(call.text)
        return self.agent.placeholders and anything and not (tool is not None and tool.public)

    def _pause_ms(self) -> float:
        """How long the slowest of the pending tools will take, from what was seen."""
        return max(self.agent.expected_ms(call.name) for call in self.pending.values())

    # ---------------------------------------------------------------- commit

    def commit(self) -> Committed:
        """Bind all observations of the turn; the next prompt begins."""
        turn = self._turn
        turn.observations = [self._wording.observed[call.number] for call in turn.calls]
        self.messages = self._wording.whole()
        if not turn.calls:
            text = f"{self.agent.error_prefix}{turn.faults[0].error()}"
            self.messages.append({"role": "user", "content": text})
        prompt = self.renderer.tokens(self.messages)
        failed = any(not o.ok for o in turn.observations)
        branch = ERROR_BRANCH if failed else (turn.calls[0].name if turn.calls else None)
        self._turn = Turn(0)
        hit = self._bind(prompt, self._decoded, branch)
        self._learn_outputs(turn, prompt)
        return Committed(turn.number, branch or "", hit, self._turn.stats)

    def _bind(self, prompt: Tokens, held: Sequence[int], branch: str | None) -> HitClass:
        """Make the line hold `prompt`; fills in the statistics of the turn that begins."""
        stats, guesser = self._turn.stats, self._guesser
        kept = min(common(list(prompt), list(held)), len(prompt) - 1)
        if not kept:
            raise AdapterError(
                f"session '{self.session}' holds {len(held)} tokens that have nothing in common "
                "with this conversation; open one from ReactAgent.prompt, or let the run open one"
            )
        if guesser is not None:
            stats.speculative = guesser.speculated()
            stats.known, stats.withheld = guesser.known, guesser.withheld
            stats.refused = tuple(guesser.refused)
        tip = self.engine.tip(self.session)
        got = self.engine.commit(self.session, tip, prompt[kept:], at=kept, branch=branch)
        if guesser is not None:
            guesser.drop()  # what hangs on a branch that the commit adopted
        self._guesser = None
        self._prompt_end = self._text(prompt[-8:])
        stats.prompt, stats.kept, stats.hit = len(prompt), kept, got.hit
        stats.used = got.skipped_prefill
        stats.cached = kept + got.skipped_prefill
        stats.prefilled = len(prompt) - stats.cached
        return got.hit

    def _text(self, tokens: Sequence[int]) -> str:
        return self.engine.backend.tokenizer.decode_bytes(tokens).decode("utf-8", "replace")

    def _learn_outputs(self, turn: Turn, prompt: Sequence[int]) -> None:
        """Let the engine learn how outputs of a stable shape begin, as the template wrote them."""
        if len(turn.calls) != 1 or not turn.observations[0].ok or not self._suffix:
            return
        tool = self.agent.tools[turn.calls[0].name]
        if not tool.stable:
            return
        *before, last = self.messages
        whole = self.renderer.text(self.messages)
        empty = self.renderer.text([*before, {**last, "content": ""}])
        end = len(whole) - common(whole[::-1], empty[::-1])  # close, and what the output repeats
        decode = self.engine.backend.tokenizer.decode_bytes
        room = len(whole[:end].encode()) - len(decode(prompt[: self._suffix]))
        output: list[int] = []
        for token in prompt[self._suffix :]:
            room -= len(decode([token]))
            if room < 0:
                break
            output.append(token)
        self.engine.observe(self.session, tool.name, output=output, schema_stable=True)

    # ---------------------------------------------------------------- result

    def result(self, text: str | None = None) -> ReactResult:
        """What the run came to."""
        turns = self.turns
        last = turns[-1] if turns else Turn(0)
        if text is None:
            text = thought(self._scanner.content(last.text))
            if self.agent.mode == "text":
                text = _ANSWER.sub("", text)
            text = text.strip()

        def total(name: str) -> int:
            return sum(getattr(turn.stats, name) for turn in turns)

        totals = Totals(
            turns=len(turns),
            prompt=total("prompt"),
            cached=total("cached"),
            prefilled=total("prefilled"),
            generated=total("generated"),
            speculative=total("speculative"),
            used=total("used"),
            withheld=total("withheld"),
            tool_ms=sum(o.ms for turn in turns for o in turn.observations),
            drifts=self.renderer.drifts,
        )
        return ReactResult(text, list(self.messages), list(turns), totals, last.finish_reason)
