"""The agent of the demo: one turn is question, call, tool, observation, answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from forkserve.api import Engine, SessionHandle
from forkserve.cli.dialogue import Dialogue
from forkserve.cli.identity import Committed
from forkserve.cli.record import Recorder, pages_of, widths
from forkserve.cli.report import TurnRow
from forkserve.cli.tools import Observation, Tool, Toolbox
from forkserve.cli.turns import SORRY, Turn
from forkserve.control.commit import CommitResult
from forkserve.control.generation import Generation
from forkserve.control.stats import EngineStats
from forkserve.engine.constraints import ChoiceConstraint
from forkserve.engine.mock import MockBackend
from forkserve.types import SamplingParams, derive_seed

__all__ = ["Agent", "Watcher", "refusals"]

_HAPPY, _ERROR = "result", "error"
_P_HAPPY, _P_ERROR = 0.9, 0.1
# The pause that the planner is told of: rows that wait much longer for their commit are dropped.
_PATIENCE = 1.25
_GREEDY = SamplingParams(logprobs=True)
_TEMPERATURE = 0.5


class Watcher(Protocol):
    """Hears what the agent does while it does it."""

    def turn(self, number: int, turn: Turn) -> None: ...

    def working(self, what: str) -> None:
        """Something takes time."""
        ...

    def line(self, label: str, text: str) -> None:
        """Something is known."""
        ...

    def piece(self, text: str) -> None:
        """The answer goes on; an empty piece ends it."""
        ...


@dataclass(slots=True)
class _First:
    """What came after the observation: the commit, and the generations that began."""

    commit: CommitResult
    begin_ms: float
    running: list[Generation]

    @property
    def ttft_ms(self) -> float:
        """From the observation to the first token of any of them."""
        times = [g.first_token_ms for g in self.running if g.first_token_ms is not None]
        return min(times) - self.begin_ms


@dataclass(slots=True)
class _Plan:
    """What follows the observation, the same with and without speculation."""

    ids: list[int]
    params: list[SamplingParams]
    limit: int
    scripts: list[str] = field(default_factory=list)


class Agent:
    """Runs turns on one session.  script: the backend is a mock and is told what to say."""

    def __init__(
        self,
        engine: Engine,
        dialogue: Dialogue,
        toolbox: Toolbox,
        watcher: Watcher,
        *,
        branches: int,
        max_tokens: int,
        speculate: bool,
        seed: int,
    ) -> None:
        self.engine = engine
        self.dialogue = dialogue
        self.toolbox = toolbox
        self.watcher = watcher
        self.branches = branches
        self.max_tokens = max_tokens
        self.speculate = speculate
        self.seed = seed
        self.committed: list[Committed] = []
        self.recorder = Recorder(engine.backend.tokenizer)
        self._encode = engine.backend.tokenizer.encode
        self._mock = engine.backend if isinstance(engine.backend, MockBackend) else None
        self._last: int | None = None  # last token, while the assistant's turn is not closed

    def open(self, trunk: Sequence[int]) -> SessionHandle:
        """Read the trunk."""
        self.session = self.engine.open(trunk, session="demo")
        return self.session

    def run(self, number: int, turn: Turn) -> TurnRow:
        """One whole turn."""
        self.watcher.turn(number, turn)
        self._ask(turn)
        tool, argument, call = self._choose(turn)
        before = self.engine.stats()
        base = self.engine.tokens(self.session.id)
        seen, refused, widest = self._use(turn, tool, argument)
        happy = self._happy(turn, tool)
        known = happy if seen.ok else self._recovery(tool)
        plan = self._reply_plan(turn, known, seen)
        self.watcher.working("commit and answer")
        first = self._continue(self.session, plan, own=True)
        row = TurnRow(
            name=turn.name,
            question=turn.question,
            tool=tool.name,
            call=call,
            tool_ok=seen.ok,
            tool_ms=seen.ms,
            hit=first.commit.hit.value,
            known=len(known),
            skipped=first.commit.skipped_prefill,
            ttft_ms=0.0,
            ttft_ms_without_speculation=0.0,
            same_first_token=True,
            prefilled=0,
            shared=0,
            speculative=0,
            wasted=0,
            branches=len(plan.params) if turn.attempts else 2 if self.speculate else 1,
            live_pages=widest[0],
            clone_pages=widest[1],
            refused=refused,
        )
        self.recorder.mark(first.commit.aborted, "aborted")
        row.answer = self._finish(turn, first, row, seen)
        row.ttft_ms = row.ttft_ms_without_speculation = first.ttft_ms
        self._count(row, before, len(base), turn)
        if self.speculate:
            self._compare(row, plan, base, first)
        return row

    # ---------------------------------------------------------------- before the tool

    def _ask(self, turn: Turn) -> None:
        """Commit the question as a node of its own."""
        ids = self.dialogue.question(turn.question, self._last)
        self.engine.commit(self.session.id, self.session.tip, ids, branch=f"question: {turn.name}")

    def _choose(self, turn: Turn) -> tuple[Tool, str, str]:
        """The model picks one of the calls that the grammar offers."""
        self.watcher.working("the model picks a call")
        constraint = ChoiceConstraint(self.engine.backend.tokenizer, turn.texts)
        self._script(turn.texts[0])
        limit = max(len(self._encode(text, special=False)) for text in turn.texts)
        params = replace(_GREEDY, constraint=constraint)
        generation = self._start(self.session, self.session.tip, limit, params)
        generation.result()
        self._keep(generation)
        name, argument = turn.calls[turn.texts.index(generation.text)]
        self.watcher.line("call", f"{generation.text}  (one of {len(turn.texts)} offered)")
        return self.toolbox.tools[name], argument, generation.text

    def _happy(self, turn: Turn, tool: Tool) -> list[int]:
        text = f"{turn.checklist}Result of {tool.name}: "
        return self.dialogue.tool_wrap(self._last, text)

    def _recovery(self, tool: Tool) -> list[int]:
        text = f"Error of {tool.name}, say that there is no answer: "
        return self.dialogue.tool_wrap(self._last, text)

    # ---------------------------------------------------------------- while the tool runs

    def _use(
        self, turn: Turn, tool: Tool, argument: str
    ) -> tuple[Observation, list[str], tuple[int, int]]:
        """Run the tool in a thread; meanwhile the engine's loop prefills both branches."""
        engine, session = self.engine, self.session
        refused: list[str] = []
        said: list[tuple[str, str]] = []
        pause = _PATIENCE * tool.expected_ms
        with ThreadPoolExecutor(1, "tool") as pool:
            running = pool.submit(tool, argument)
            if self.speculate:
                tip = session.tip
                nodes = {
                    engine.fork(session.id, tip, _HAPPY, self._happy(turn, tool)): _P_HAPPY,
                    engine.fork(session.id, tip, _ERROR, self._recovery(tool)): _P_ERROR,
                }
                for node, p in nodes.items():
                    got = engine.speculate(session.id, node, priority=p, t_idle_ms=pause)
                    name = _HAPPY if p == _P_HAPPY else _ERROR
                    reasons = [r.reason for r in got.refused]
                    if not got and not reasons:
                        reasons = ["planner_failed"]
                    refused += [f"{name}: {reason}" for reason in reasons]
                    said += [(f"the rest of {name}" if got else name, why) for why in reasons]
                if self._mock is not None:  # no real time passes there: let it come to an end
                    while engine.drain_slack():
                        pass
            self.watcher.working(f"{tool.name} runs")
            seen = running.result()
        tree = engine.tree(session.id)
        self.recorder.see(tree)
        mark = "result" if seen.ok else "error"
        self.watcher.line(mark, f"({seen.ms:,.0f} ms) {seen.text}")
        if refused:
            self.watcher.line("not speculated", refusals(said, pause))
        return seen, refused, (pages_of(tree), widths(tree, engine.config.page_size))

    # ---------------------------------------------------------------- after the tool

    def _reply_plan(self, turn: Turn, known: list[int], seen: Observation) -> _Plan:
        """What is committed and how the reply is sampled."""
        ids = known + self.dialogue.tool_result(seen.text)
        replies = turn.replies if seen.ok else SORRY
        params = _GREEDY
        if replies:
            eos = self.engine.backend.info.eos_ids
            constraint = ChoiceConstraint(self.engine.backend.tokenizer, replies, eos)
            params = replace(_GREEDY, constraint=constraint)
        elif turn.primer:
            ids += self._encode(turn.primer, special=False)
        if not turn.attempts:
            return _Plan(ids, [params], self.max_tokens, [_scripted(replies, seen, 0)])
        seeds = [derive_seed(self.seed, turn.name, i) for i in range(self.branches)]
        draws = [SamplingParams(temperature=_TEMPERATURE, seed=s, logprobs=True) for s in seeds]
        scripts = [_scripted((), seen, i) for i in range(self.branches)]
        return _Plan(ids, draws, self.max_tokens, scripts)

    def _continue(self, session: SessionHandle, plan: _Plan, *, own: bool) -> _First:
        """Commit the observation and begin to answer.  The clock runs from here."""
        engine = self.engine
        begin = engine.backend.clock.now_ms()
        commit = engine.commit(session.id, session.tip, plan.ids, branch=_HAPPY)
        tip, limit = session.tip, plan.limit if own else 1
        nodes = [tip]
        if len(plan.params) > 1 or plan.params[0].temperature:
            names = [f"attempt {i}" for i in range(1, len(plan.params) + 1)]
            nodes = [engine.attempt(session.id, engine.fork(session.id, tip, n)) for n in names]
        running = []
        for node, params, script in zip(nodes, plan.params, plan.scripts, strict=True):
            self._script(script)
            running.append(self._start(session, node, limit, params))
        return _First(commit, begin, running)

    def _finish(self, turn: Turn, first: _First, row: TurnRow, seen: Observation) -> str:
        """Let the answers come to an end and commit the one that stays."""
        start = turn.primer if seen.ok and not turn.replies else ""
        if not turn.attempts:
            generation = first.running[0]
            self.watcher.piece(start)
            for piece in generation.pieces():
                self.watcher.piece(piece)
            self.watcher.piece("")
            self._keep(generation)
            return (start + generation.text).strip()
        self.watcher.working(f"{len(first.running)} attempts in one batch")
        for generation in first.running:
            generation.result()
        tree = self.engine.tree(self.session.id)
        self.recorder.see(tree)
        row.live_pages = pages_of(tree)
        row.clone_pages = widths(tree, self.engine.config.page_size)
        return self._pick(start, first.running, seen)

    def _pick(self, start: str, attempts: Sequence[Generation], seen: Observation) -> str:
        """Commit the best attempt; the others are aborted with it."""
        scores = [score(g.text, seen.text, g.finish_reason == "eos") for g in attempts]
        best = max(range(len(attempts)), key=lambda i: (scores[i], -i))
        for i, generation in enumerate(attempts):
            mark = "[won] " if i == best else ""
            self.watcher.line(f"try {i + 1}", f"{mark}{start}{generation.text}")
        winner = attempts[best]
        self._keep(winner)
        session = self.session
        self.recorder.mark([g.node for g in attempts], "lost")
        self.engine.commit(session.id, session.tip, winner.tokens)
        self.recorder.mark([winner.node], "won")
        return (start + winner.text).strip()

    # ---------------------------------------------------------------- numbers

    def _count(self, row: TurnRow, before: EngineStats, trunk: int, turn: Turn) -> None:
        """Tokens of the turn from the engine's own counters."""
        old, new = before.prefilled_tokens, self.engine.stats().prefilled_tokens
        row.prefilled = new.committed - old.committed
        row.speculative = new.speculative - old.speculative
        row.wasted = new.wasted - old.wasted
        forks = self.branches if turn.attempts else 0
        row.shared = trunk * ((2 if self.speculate else 0) + forks)

    def _compare(self, row: TurnRow, plan: _Plan, base: list[int], first: _First) -> None:
        """The same turn without speculation: a second session over the same committed prefix."""
        self.watcher.working("the same without speculation")
        other = self.engine.open(base, session="without")
        try:
            plain = self._continue(other, plan, own=False)
            for generation in plain.running:
                generation.result()
            row.ttft_ms_without_speculation = plain.ttft_ms
            row.same_first_token = all(
                a.tokens[:1] == b.tokens[:1]
                for a, b in zip(first.running, plain.running, strict=True)
            )
        finally:
            self.engine.close(other.id)
        without = f"{row.ttft_ms_without_speculation:,.1f} ms without speculation"
        if row.idle:
            without = "nothing was ready, so speculation makes no difference"
        elif not row.skipped:
            without += " (nothing was ready: noise, or a wait for the branch that lost)"
        self.watcher.line("first token", f"{row.ttft_ms:,.1f} ms after the result; {without}")

    # ---------------------------------------------------------------- helpers

    def _start(
        self, session: SessionHandle, node: int, limit: int, params: SamplingParams
    ) -> Generation:
        return self.engine.start(session.id, limit, node=node, params=params)

    def _keep(self, generation: Generation) -> None:
        """Remember a generation for the identity check; it is at the end of its node."""
        tokens = tuple(generation.tokens)
        length = len(self.engine.tokens(self.session.id, generation.node))
        self.committed.append(
            Committed(
                start=length - len(tokens),
                tokens=tokens,
                logprobs=tuple(generation.logprobs),
                params=generation.params,
                seed=generation.seed,
            )
        )
        self._last = tokens[-1]

    def _script(self, text: str) -> None:
        if self._mock is not None:
            self._mock.script(text)


_WHY = {
    "idle_horizon": "the expected pause of {pause} is shorter than the prefill",
    "pages": "there are not enough free KV pages",
    "branch_cap": "as many branches as allowed are being prefilled already",
    "tbt_margin": "it would hold up an answer that is being written",
    "low_probability": "it is too unlikely to be used",
    "free_form": "free text is never guessed",
    "empty": "there is nothing left to compute",
    "not_worth": "it would cost more than it is likely to save",
    "queue_full": "too much work is waiting already",
    "planner_failed": "the planner failed; the log says why",
    "deadline": "its time ran out before it was computed",
}


def refusals(refused: Sequence[tuple[str, str]], pause_ms: float) -> str:
    """Pairs of a branch and a reason in plain words, branches with the same reason together."""
    pause = f"{pause_ms / 1e3:.2g} s" if pause_ms >= 100 else f"{pause_ms:.2g} ms"
    branches: dict[str, list[str]] = {}
    for branch, reason in refused:
        branches.setdefault(reason, []).append(branch)
    return "; ".join(
        f"{' and '.join(names)}, as {_WHY.get(reason, reason).format(pause=pause)}"
        for reason, names in branches.items()
    )


def score(answer: str, evidence: str, complete: bool) -> tuple[bool, int, bool, int]:
    """How good an attempt is: no number that the evidence lacks, as many as possible that it has,
    a sentence that came to its end, and few words."""
    known = set(re.findall(r"\d+(?:\.\d+)?", evidence))
    used = set(re.findall(r"\d+(?:\.\d+)?", answer.replace(",", "")))
    return used <= known, len(used & known), complete, -len(answer.split())


def _scripted(replies: Sequence[str], seen: Observation, number: int) -> str:
    """What the mock says: a permitted reply, or the evidence; odd attempts get it wrong."""
    if replies:
        return replies[0]
    return f" {seen.text[:60]}" if number % 2 == 0 else f" about {number * 1000} at a guess"
