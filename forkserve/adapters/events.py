"""What a ReAct run tells while it runs, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forkserve.adapters.scanner import ScanFault
from forkserve.adapters.tools import ToolError
from forkserve.control.generation import FinishReason
from forkserve.errors import AdapterError
from forkserve.types import HitClass

__all__ = [
    "Call",
    "Committed",
    "Event",
    "Final",
    "MaxTurnsReached",
    "Observation",
    "ReactResult",
    "Speculated",
    "TextDelta",
    "ToolCalled",
    "ToolResult",
    "ToolStarted",
    "Totals",
    "Turn",
    "TurnStats",
]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model.  number: its place among the calls of the turn, from 0."""

    id: str
    name: str
    arguments: dict[str, Any]
    number: int = 0
    text: str | None = None  # plain text in place of arguments


@dataclass(frozen=True, slots=True)
class Observation:
    """What a call came to.  text: as the model reads it.  error: why there is no result.

    ms: from the call to the result, on the wall clock.
    """

    call: Call
    text: str
    ms: float = 0.0
    value: Any = None
    error: ToolError | None = None

    @property
    def ok(self) -> bool:
        """Whether the tool gave a result."""
        return self.error is None


@dataclass(slots=True)
class TurnStats:
    """Tokens of one turn.

    prompt = cached + prefilled: tokens before the model's own; cached ones had rows already, from
    earlier turns or from speculation, when they were committed.  kept: those of the prompt that
    were decoded.  known: those known for certain while the tools ran; withheld: those that were not
    speculated since hidden arguments stand before them.  speculative: rows computed meanwhile;
    used: rows that the commit took.
    """

    prompt: int = 0
    cached: int = 0
    prefilled: int = 0
    generated: int = 0
    kept: int = 0
    known: int = 0
    speculative: int = 0
    used: int = 0
    withheld: int = 0
    hit: HitClass | None = None
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class Turn:
    """One answer of the model, with what was made of it.

    stats describe the prompt that it answers.  text: as decoded, with call markers.
    """

    number: int
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    faults: list[ScanFault] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: TurnStats = field(default_factory=TurnStats)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the turns of a run.  drifts: how often the template left nothing known."""

    turns: int
    prompt: int
    cached: int
    prefilled: int
    generated: int
    speculative: int
    used: int
    withheld: int
    tool_ms: float
    drifts: int


@dataclass(frozen=True, slots=True)
class ReactResult:
    """What a run came to.

    text: the final answer.  messages: the whole conversation, to go on from.  finish_reason: of the
    last turn ("eos" as a rule; "length" when the answer was cut off).
    """

    text: str
    messages: list[Mapping[str, Any]]
    turns: list[Turn]
    stats: Totals
    finish_reason: FinishReason | None

    def __str__(self) -> str:
        return self.text


class MaxTurnsReached(AdapterError):
    """The model still calls tools after the last turn that it has.  result: what there is."""

    def __init__(self, turns: int, result: ReactResult) -> None:
        super().__init__(f"no answer after {turns} turns; raise max_turns or improve the prompt")
        self.result = result


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The model's text goes on, call markers included."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A call is complete; the model may still be writing."""

    turn: int
    call: Call


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The tool runs.  timeout_s: how long it may."""

    turn: int
    call: Call
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Speculated:
    """A branch was forked while the tools run.

    branch: the tool's name, "err" or "guess".  at: where it leaves the decoded text.  known: its
    tokens.  admitted: those that the planner took, refused: why it did not take the rest.
    """

    turn: int
    branch: str
    at: int
    known: int
    admitted: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool has ended, or was given up."""

    turn: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class Committed:
    """The observations are bound and the next turn begins; stats are those of its prompt."""

    turn: int
    branch: str
    hit: HitClass
    stats: TurnStats


@dataclass(frozen=True, slots=True)
class Final:
    """The run is over."""

    result: ReactResult


Event = TextDelta | ToolCalled | ToolStarted | Speculated | ToolResult | Committed | Final
