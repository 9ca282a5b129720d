"""The turns that `benchmarks.turns` measures: an engine and a function that runs one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from langgraph.graph import END, START, StateGraph

from benchmarks import models
from benchmarks.measure import Options
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.langgraph import Branch, ForkServe, ForkState
from forkserve.adapters.react import Committed, ReactAgent, TextDelta, ToolResult
from forkserve.adapters.tools import Tool
from forkserve.engine.constraints import ChoiceConstraint
from forkserve.engine.local.chat import ChatTemplate

__all__ = ["Shot", "Size", "bare", "error", "rewritten", "send"]

# Tools in the system message; of every turn but the last only the answer and the calls stay, not
# the reasoning: what most templates of reasoning models do.
DROPS_REASONING = r"""\
{%- if tools %}<|im_start|>system
{{ messages[0].content }}
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set said = (m.content.split('</think>') | last).lstrip('\n') %}
{{- '<|im_start|>assistant\n' + said }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Messages and nothing else, as SmolLM2's own template writes them.
PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = (
    "<think>\nThe question needs a number that I do not have. I will run a program.\n</think>\n"
)
RETRY = (
    "Error: the command failed, and nothing was changed. Read the message below, find out what was "
    "wrong with the command, and call the tool again with a better one. If the same command has "
    "failed before, try another way. The message was: "
)
OBSERVED = "exit status 0, 14 lines written to the report, the last of them: total 4478"
FIRST_TOKENS = 6  # compared between the two ways; the first of them is timed


@dataclass
class Size:
    trunk_words: int = 700
    program_lines: int = 12
    role_words: int = 225
    pauses_s: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    rounds: int = 5
    budget_s: float = 60.0


class Shot(NamedTuple):
    """ms: from the end of the tool to the first token.  text: what the turn began with."""

    ms: float
    text: str
    known: int
    observed: int


@contextmanager
def bare(options: Options, size: Size) -> Iterator[tuple[Engine, Callable[[float, bool], Shot]]]:
    """bare wrapper"""
    with _engine(options) as engine:
        yield engine, _agent(engine, size, thinking="", fails=False)


@contextmanager
def rewritten(
    options: Options, size: Size
) -> Iterator[tuple[Engine, Callable[[float, bool], Shot]]]:
    """re-rendered turn, reasoning dropped"""
    with _engine(options, DROPS_REASONING) as engine:
        yield engine, _agent(engine, size, thinking=THINKING, fails=False)


@contextmanager
def error(options: Options, size: Size) -> Iterator[tuple[Engine, Callable[[float, bool], Shot]]]:
    """error branch"""
    with _engine(options, DROPS_REASONING) as engine:
        yield engine, _agent(engine, size, thinking=THINKING, fails=True)


@contextmanager
def send(options: Options, size: Size) -> Iterator[tuple[Engine, Callable[[float, bool], Shot]]]:
    """Send with a role prompt"""
    with _engine(options) as engine:
        yield engine, _graph(engine, size)


@contextmanager
def _engine(options: Options, template: str | None = None) -> Iterator[Engine]:
    config = ForkServeConfig(background=True, capacity_pages=2048)
    backend = models.Watched(config, models.tiny_llama() if options.quick else "smollm2")
    backend.tokenizer = _Templated(backend.tokenizer, template or PLAIN)
    with Engine(backend) as engine:
        yield engine


class _Templated:
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._template = ChatTemplate(template, {}, "benchmark")
        self.encode, self.decode_bytes = tokenizer.encode, tokenizer.decode_bytes

    def render(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        return self._template.render(messages, tools, add_generation_prompt)


_STOCK = ("the", "report", "lists", "every", "order", "of", "a", "day", "with", "its", "weight")


def _words(count: int) -> str:
    """Prose of `count` words, the same each time."""
    return " ".join(_STOCK[(i * 7 + i // 5) % len(_STOCK)] for i in range(count))


def _agent(
    engine: Engine, size: Size, *, thinking: str, fails: bool
) -> Callable[[float, bool], Shot]:
    """A ReAct agent whose first turn is given and whose tool takes as long as it is told."""
    pause = [0.0]

    def execute(program: str) -> str:
        """Run a program.

        program: its text
        """
        time.sleep(pause[0])
        if fails:
            raise RuntimeError(OBSERVED)
        return OBSERVED

    lines = size.program_lines if thinking else 1
    program = "\\n".join(f"total = total + read(column {i}, row {i * 3})" for i in range(lines))
    call = (
        f'<tool_call>\n{{"name": "execute", "arguments": {{"program": "{program}"}}}}\n</tool_call>'
    )
    backend = engine.backend
    first = ChoiceConstraint(backend.tokenizer, [thinking + call], backend.info.eos_ids)
    budget = len(backend.tokenizer.encode(thinking + call)) + 8

    def params(turn: int) -> SamplingParams:
        return SamplingParams(constraint=first) if turn == 0 else SamplingParams(ignore_eos=True)

    def shoot(seconds: float, speculate: bool) -> Shot:
        pause[0] = seconds
        agent = ReactAgent(
            engine,
            [Tool.of(execute, public=True, idle_ms=seconds * 1e3)],
            system=_words(size.trunk_words),
            params=params,
            max_tokens=budget,
            speculate=speculate,
            error_prefix=RETRY,
            p_error=0.9 if fails else 0.1,
        )
        ended = first_ms = 0.0
        said: list[str] = []
        known = observed = 0
        events = agent.stream("How much is it in total?")
        for event in events:
            if isinstance(event, ToolResult):
                ended = time.perf_counter()
            elif isinstance(event, Committed):
                # Of an error more is used than was certain.
                known = max(event.stats.known, event.stats.used)
                observed = event.stats.prompt - event.stats.kept - known
            elif isinstance(event, TextDelta) and event.turn == 1:
                first_ms = first_ms or (time.perf_counter() - ended) * 1e3
                said.append(event.text)
                if len(said) == FIRST_TOKENS:
                    break
        events.close()
        return Shot(first_ms, "".join(said), known, observed)

    return shoot


class State(ForkState, total=False):
    """What the graph of the third kind holds."""

    prompt: str


def _graph(engine: Engine, size: Size) -> Callable[[float, bool], Shot]:
    """A LangGraph graph: a node with a tool, then a Send whose branch begins with a role prompt."""
    fs = ForkServe(engine, stream_stats=False)
    role = "\n" + _words(size.role_words) + "\nThe total is"
    known = len(engine.backend.tokenizer.encode(role))
    seen: dict[str, Any] = {}

    @fs.node
    def look(state: State, fork: Branch) -> dict[str, Any]:
        if seen["speculate"]:
            fork.hint(role, t_idle_ms=seen["pause"] * 1e3)
        time.sleep(seen["pause"])
        seen["ended"] = time.perf_counter()
        return {}

    def fan(state: State) -> Sequence[Any]:
        return [fs.send("work", {"topic": "ports"}, parent=state["fork_tip"], text=role)]

    @fs.node
    def work(state: State, fork: Branch) -> dict[str, Any]:
        said = []
        for piece in fork.stream(FIRST_TOKENS, params=SamplingParams(ignore_eos=True)):
            if not said:
                seen["ms"] = (time.perf_counter() - seen["ended"]) * 1e3
            said.append(str(piece))
        seen["text"] = "".join(said)
        return {}

    builder = StateGraph(State)
    builder.add_node("look", look)
    builder.add_node("work", work)
    builder.add_edge(START, "look")
    builder.add_conditional_edges("look", fan, ["work"])
    builder.add_edge("work", END)
    graph = fs.bind(builder.compile())

    def shoot(seconds: float, speculate: bool) -> Shot:
        seen.update(pause=seconds, speculate=speculate)
        graph.invoke({"prompt": _words(size.trunk_words)})
        return Shot(seen["ms"], seen["text"], known, 0)

    return shoot
