"""Recorded tool-calling runs, replayed turn by turn: what speculation foresaw and wasted."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from benchmarks.measure import Options, Report, Target
from benchmarks.plot import Chart
from benchmarks.recordings import absent, load
from forkserve import Engine, ForkServeConfig
from forkserve.adapters.react import ReactAgent
from forkserve.adapters.templates import Dialect
from forkserve.adapters.tools import Tool
from forkserve.adapters.tot.usage import PrefixCache
from forkserve.control.generation import Generation
from forkserve.engine import MockBackend
from forkserve.session import Session

RECORDING = "tool_trajectories_airline"
P = 16
VOCABULARY = 16_384
_PIECES = re.compile(r"<\|\w+\|>| ?[A-Za-z]{1,5}|[0-9]{1,3}|\s|[^A-Za-z0-9\s]")
Message = Mapping[str, Any]

# What a run may do, from nothing to all: (speculate, error branch, learned guess of the output).
WAYS = {
    "tree, no speculation": (False, False, False),
    "known suffix only": (True, False, False),
    "known suffix, error branch": (True, True, False),
    "known suffix, error branch, guess": (True, True, True),
}


class Chat:
    """A tokenizer of short pieces, and ChatML that knows tools.

    Pieces are up to five letters with the blank before them, up to three digits, or one other
    character: about as many characters to a token as models have.
    rewrites: the template writes calls in an order and with blanks of its own, so that every call
    is re-rendered; without, it writes them as the model did.
    """

    def __init__(self, rewrites: bool) -> None:
        self.rewrites = rewrites
        self._ids = {"<|im_start|>": 256, "<|im_end|>": 257}
        self._texts = {number: text for text, number in self._ids.items()}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        found = []
        for piece in _PIECES.findall(text):
            if piece not in self._ids:
                self._texts[number := 260 + len(self._ids)] = piece
                self._ids[piece] = number
            found.append(self._ids[piece])
        return found

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        shown = (i for i in ids if i >= 260 or not skip_special)
        return "".join(self._texts.get(i, "") for i in shown).encode()

    def call(self, function: Mapping[str, Any], rewrites: bool) -> str:
        name, arguments = function["name"], function["arguments"]
        if rewrites:
            text = json.dumps({"arguments": arguments, "name": name})
        else:
            text = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
        return f"<tool_call>\n{text}\n</tool_call>"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        parts = [f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"] if tools else []
        for message in messages:
            role, text = message["role"], message.get("content") or ""
            if role == "tool":
                role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            for call in message.get("tool_calls") or ():
                text += self.call(call["function"], self.rewrites)
            parts.append(f"<|im_start|>{role}\n{text}<|im_end|>\n")
        return "".join(parts) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@dataclass
class Run:
    """What the user says (the system before it), what is answered, and what tools give."""

    users: list[Message]
    said: list[Message] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


@dataclass
class Totals:
    """Tokens of all turns.

    prompt: each prompt whole.  waited: prefilled after the observation had come.  ahead: rows
    computed while tools ran, used: those of them that the observation confirmed.
    fresh: of the turns after a tool, prompt tokens that the decoded text did not hold.
    """

    turns: int = 0
    tools: int = 0
    hits: int = 0
    prompt: int = 0
    waited: int = 0
    ahead: int = 0
    used: int = 0
    fresh: int = 0
    cache: int = 0


def run(options: Options) -> Report:
    report = Report(
        "trajectories", "recorded tool-calling runs, token by token, on the mock backend"
    )
    recorded = made_up() if options.quick else load(RECORDING)
    if recorded is None:
        report.notes.append(absent(RECORDING))
        return report
    conversations = [parse(entry["messages"]) for entry in recorded]
    table = report.table(
        f"prompt tokens prefilled once the observation is there, {len(recorded)} conversations",
        *("template", "way", "model turns", "no reuse", "prefix cache", "waited for", "none/wait"),
        *("cache/wait", "computed ahead", "wait + ahead"),
    )
    quality = report.table(
        "speculation, turns after a tool",
        *("template", "way", "tool turns", "hits", "hit rate", "new tokens", "computed ahead"),
        *("used", "used/new", "waste"),
    )
    worse = []
    for template, rewrites in (("as decoded", False), ("rewrites calls", True)):
        for way, what in WAYS.items():
            got = replay(conversations, rewrites, *what)
            table.add(
                *(template, way, got.turns, got.prompt, got.cache, got.waited),
                *(got.prompt / got.waited, got.cache / got.waited, got.ahead),
                got.waited + got.ahead,
            )
            quality.add(
                *(template, way, got.tools, got.hits, got.hits / max(1, got.tools), got.fresh),
                *(got.ahead, got.used, got.used / max(1, got.fresh)),
                1 - got.used / got.ahead if got.ahead else 0.0,
            )
            worse += [f"{template}, {way}"] if got.waited > got.cache else []
    what = "ways that prefill more after the observation than an ideal prefix cache"
    report.targets.append(Target(what, "0", len(worse), not worse, "; ".join(worse)))
    report.notes += [
        f"tokens are pieces of up to five letters; a page holds {P}",
        "turns are the recorded ones; a tool returns when speculation has nothing left to do",
        "prefix cache: full pages of every earlier prompt and reply, kept for ever; one run a time",
        "hits: tool turns whose prompt began with tokens computed ahead; new: tokens of that "
        "prompt which the decoded text does not hold; waste: rows computed ahead and of no use",
        "'known suffix only' is what is certain; the error branch and the guess are the rest",
        "reasoning was not recorded: a template that drops it would have more to foresee",
    ]
    return report


# --- recordings ----------------------------------------------------------------------------------


def parse(messages: Sequence[Message]) -> list[Run]:
    """The runs of a conversation that end with an answer, up to the first that does not."""
    runs: list[Run] = []
    spoken: list[Message] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] in ("system", "user"):
            spoken.append({"role": message["role"], "content": content})
        elif message["role"] == "tool":
            runs[-1].results.append(content)
        else:
            if spoken:
                runs.append(Run(spoken))
                spoken = []
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [
                {"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions
            ]
            runs[-1].said.append({"content": content, "calls": calls})
    return list(takewhile(lambda run: not run.said[-1]["calls"], runs))


def made_up() -> list[dict[str, Any]]:
    """Two short conversations in the form of the recordings."""

    def say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": content, **more}

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return say("assistant", None, tool_calls=[{"id": "c", "function": function}])

    talks = []
    for city in ("Oslo", "Faro"):
        talks.append(
            {
                "messages": [
                    say("system", "You book trains. Look them up before you answer. " * 4),
                    say("user", f"When does a train leave for {city}?"),
                    call("trains", to=city),
                    say("tool", json.dumps({"to": city, "at": ["09:12", "10:12"], "seats": 4})),
                    call("price", to=city, at="09:12"),
                    say("tool", json.dumps({"to": city, "at": ["09:12"], "euros": 31})),
                    say("assistant", "At 09:12, for 31 euros."),
                    say("user", "Thank you."),
                    say("assistant", "Have a good journey."),
                ]
            }
        )
    return talks


# --- replay --------------------------------------------------------------------------------------


class Stage:
    """An engine whose tools return what was recorded, each when nothing is left to compute ahead.

    cache: tokens that a prefix cache would have prefilled for the prompts so far.
    """

    def __init__(self, engine: Engine) -> None:
        self.results: list[str] = []
        self.cache = 0
        self._known = PrefixCache(P)
        self._last: tuple[list[int], Generation] | None = None
        self._idle = threading.Semaphore(0)
        self._engine = engine
        self._drain, self._start = engine.drain_slack, engine.start
        engine.drain_slack = self._drained  # type: ignore[method-assign]
        engine.start = self._started  # type: ignore[method-assign]

    def tool(self, name: str, stable: bool) -> Tool:
        return Tool(
            name=name,
            description="",
            parameters={"type": "object"},
            call=self._call,
            check=lambda arguments: arguments,
            idle_ms=60_000,
            stable=stable,
            public=True,
        )

    def _call(self, arguments: dict[str, Any]) -> str:
        self._idle.acquire()
        return self.results.pop(0)

    def _drained(self) -> int:
        left = self._drain()
        if not left:  # the loop waits for the tool from now on
            self._idle.release()
        return left

    def _started(self, session: str, *arguments: Any, **options: Any) -> Generation:
        if self._last is not None:
            self._known.add([*self._last[0], *self._last[1].tokens])
        prompt = self._engine.tokens(session)
        self.cache += len(prompt) - self._known.lookup(prompt)
        generation = self._start(session, *arguments, **options)
        self._last = prompt, generation
        return generation


def replay(
    conversations: Sequence[Sequence[Run]], rewrites: bool, speculate: bool, err: bool, guess: bool
) -> Totals:
    """All conversations on one engine, one after the other, each in a session."""
    config = ForkServeConfig(page_size=P, capacity_pages=4_096)
    backend = MockBackend(config, vocab_size=VOCABULARY)
    backend.tokenizer = Chat(rewrites)
    said = [turn for runs in conversations for run in runs for turn in run.said]
    names = sorted({call["name"] for turn in said for call in turn["calls"]})
    totals = Totals()
    with Engine(backend) as engine:
        stage = Stage(engine)
        agent = ReactAgent(
            engine,
            [stage.tool(name, guess) for name in names],
            speculate=speculate,
            p_error=0.1 if err else 0.0,
            max_tokens=100_000,
            max_turns=1_000,
            dialect=Dialect(tools=True, calls=True, results=True),
        )
        for runs in conversations:
            talk(agent, stage, runs, totals)
        totals.cache = stage.cache
    return totals


def talk(agent: ReactAgent, stage: Stage, runs: Sequence[Run], totals: Totals) -> None:
    """One conversation."""
    backend = agent.engine.backend
    assert isinstance(backend, MockBackend)
    assert isinstance(backend.tokenizer, Chat)
    messages: list[Message] = []
    session: Session | None = None
    for run in runs:
        messages += run.users
        stage.results += run.results
        for said in run.said:
            calls = "".join(backend.tokenizer.call(call, False) for call in said["calls"])
            backend.script(said["content"] + calls)
        if session is None:
            session = agent.engine.session(agent.prompt(messages))
            totals.waited += len(session.tokens) - session.cached_tokens
        result = agent.run(messages, session=session)
        messages = list(result.messages)
        for turn in result.turns:
            stats = turn.stats
            totals.turns += 1
            totals.prompt += stats.prompt
            totals.waited += stats.prefilled
            if turn.number:  # it follows a tool
                totals.tools += 1
                totals.hits += stats.used > 0
                totals.fresh += stats.prompt - stats.kept
                totals.used += stats.used
                totals.ahead += stats.speculative
    if session is not None:
        session.close()


CHARTS = (
    Chart("prompt tokens", ("template", "way"), ("waited for", "prefix cache", "no reuse")),
    Chart("speculation", ("template", "way"), ("new tokens", "computed ahead", "used")),
)
