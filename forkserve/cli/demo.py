"""`forkserve demo`: an agent on a real model, with and without speculation, checked cold."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from forkserve.api import Engine
from forkserve.cli.agent import Agent
from forkserve.cli.backends import Kept, choose, open_backend
from forkserve.cli.dialogue import Dialogue
from forkserve.cli.document import Document, load_document
from forkserve.cli.identity import check_cold, check_exact
from forkserve.cli.narrate import Narrator
from forkserve.cli.record import save_run
from forkserve.cli.report import Identity, Report, TurnRow, show
from forkserve.cli.tools import Toolbox
from forkserve.cli.turns import INSTRUCTIONS, Turn, plan_turns
from forkserve.engine.mock import MockBackend
from forkserve.engine.protocol import Backend
from forkserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Options", "run_demo"]

_LEAST_TRUNK = 200  # tokens


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    backend: str | None = None
    model: str | None = None
    file: Path | None = None
    seed: int = 0
    branches: int = 4
    max_tokens: int = 32
    speculate: bool = True
    as_json: bool = False


def run_demo(options: Options) -> bool:
    """Run it and print the report; False if a committed token is not a cold engine's."""
    began, load = time.perf_counter(), _load_average()
    document = load_document(options.file)
    kind, why = choose(options.backend, options.model)
    narrator = Narrator(quiet=options.as_json)
    if why:
        narrator.note(why)
    with narrator:
        narrator.step(f"loading {options.model or 'smollm2'}" if kind == "local" else "starting")
        opened = open_backend(
            kind, options.model, options.seed, options.branches, options.max_tokens
        )
        with opened as backend:
            report, kept = _run(backend, kind, document, options, narrator)
    report.wall_s = time.perf_counter() - began
    if report.clock == "wall":
        report.load_average = load
    if options.as_json:
        print(json.dumps(report.to_json()))
    else:
        show(report, narrator.console)
        hint = " See the tree of this run: forkserve tree" if kept else ""
        narrator.note(f"{report.wall_s:.1f} s in all.{hint}")
    return report.identity.ok


def _run(
    backend: Backend, kind: str, document: Document, options: Options, narrator: Narrator
) -> tuple[Report, bool]:
    """All of it: what is reported, and whether `forkserve tree` can show it."""
    info = backend.info
    dialogue = Dialogue(backend.tokenizer, info.eos_ids)
    turns = plan_turns(document)
    quick = kind == "mock"
    pauses = {"pause_s": 0.02, "fetch_s": 0.1, "seal_rounds": 50_000} if quick else {}
    toolbox = Toolbox(document, **pauses)  # type: ignore[arg-type]
    document, trunk = _trunk(backend, dialogue, document, turns, toolbox, options.max_tokens)
    toolbox.document = document
    threads = info.extra.get("threads")
    narrator.head(
        f"{info.name} on {info.device}, {info.dtype}"
        + (f", {threads} thread{'s' * (threads > 1)}" if threads else ""),
        f"{document.title}, {len(document.text.split()):,} words: a trunk of {len(trunk):,} tokens",
        toolbox.pauses,
        document.note,
    )
    agent = Agent(
        Engine(backend if quick else cast("Backend", Kept(backend))),
        dialogue,
        toolbox,
        narrator,
        branches=options.branches,
        max_tokens=options.max_tokens,
        speculate=options.speculate,
        seed=options.seed,
    )
    rows, history = _converse(agent, trunk, turns, narrator)
    report = Report(
        backend=kind,
        model=info.name,
        device=info.device,
        dtype=info.dtype,
        document=document.title,
        trunk_tokens=len(trunk),
        seed=options.seed,
        branches=options.branches,
        speculate=options.speculate,
        clock="virtual" if quick else "wall",
        turns=rows,
        identity=_check(backend, history, agent, narrator),
        wall_s=0.0,
    )
    head = {
        "backend": kind,
        "model": info.name,
        "device": info.device,
        "document": document.title,
        "page_size": backend.config.page_size,
        "identity": report.identity.ok,
    }
    kept = save_run(head, agent.recorder.finish()) is not None
    if not kept:
        narrator.note("the tree of this run could not be kept: its folder cannot be written")
    return report, kept


def _converse(
    agent: Agent, trunk: Sequence[int], turns: Sequence[Turn], narrator: Narrator
) -> tuple[list[TurnRow], list[int]]:
    """All turns; returns their numbers and the whole committed sequence."""
    try:
        with agent.engine as engine:
            narrator.step(f"prefilling the trunk of {len(trunk):,} tokens")
            session = agent.open(trunk)
            rows = [agent.run(number, turn) for number, turn in enumerate(turns, 1)]
            engine.check()
            agent.recorder.see(engine.tree(session.id))
            return rows, engine.tokens(session.id)
    finally:
        agent.toolbox.close()


def _check(backend: Backend, history: Sequence[int], agent: Agent, narrator: Narrator) -> Identity:
    if isinstance(backend, MockBackend):
        return check_exact(backend, history, agent.committed, narrator.step)
    return check_cold(backend, history, agent.committed, narrator.step)


def _load_average() -> float | None:
    """Of the last minute, where the system tells."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _trunk(
    backend: Backend,
    dialogue: Dialogue,
    document: Document,
    turns: Sequence[Turn],
    toolbox: Toolbox,
    max_tokens: int,
) -> tuple[Document, list[int]]:
    """The system message: instructions, tools and as much of the text as the context holds."""
    encode = backend.tokenizer.encode
    words = [f"{t.question} {t.checklist} {max(t.texts, key=len)} {t.primer}" for t in turns]
    observation = len(encode(document.text[:1000], special=False)) * 5 // 4
    rest = sum(len(encode(text)) + observation + max_tokens + 60 for text in words)
    room = backend.info.max_context - rest
    start = INSTRUCTIONS.format(tools="\n".join(tool.usage for tool in toolbox.tools.values()))
    if room < _LEAST_TRUNK + len(encode(start)):
        raise ConfigError(
            f"the turns need up to {rest:,} tokens of the context of "
            f"{backend.info.max_context:,}, which leaves no room for the text; lower --max-tokens"
        )
    trunk = dialogue.trunk(start + document.text)
    while len(trunk) > room:
        document = document.cut(len(document.text) * room * 19 // (len(trunk) * 20))
        trunk = dialogue.trunk(start + document.text)
    return document, trunk
