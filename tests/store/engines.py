"""Engines over the mock with a store; crashes without a process to kill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.store import Store, owner
from forkserve.types import GREEDY, SamplingParams

_random = random.Random(7)
PROMPT = [_random.randrange(256) for _ in range(700)]  # two whole chunks and a rest


def engine(folder: Path | Store | None, **config: Any) -> Engine:
    settings = {"shuffle_pages": True, "page_size": 8, "capacity_pages": 1024, **config}
    return Engine(MockBackend(ForkServeConfig(**settings)), store=folder)


def crash(eng: Engine) -> None:
    """Leave an engine as a killed process would: nothing is flushed, the owner row stays."""
    assert eng.store is not None
    own = eng.store.catalog.own
    assert own is not None
    owner.forget(own)
    eng.store.catalog.own = None
    eng._core.journal = type("Gone", (), {"__getattr__": lambda s, n: lambda *a: None})()
    eng._journal = None
    eng.store.catalog._db.close()


@lru_cache(maxsize=10_000)
def _cold(prompt: tuple[int, ...], count: int, params: SamplingParams) -> tuple[int, ...]:
    eng = Engine(MockBackend(ForkServeConfig(page_size=16, capacity_pages=256, prefix_index=False)))
    return tuple(eng.generate(eng.open(prompt).id, count, params=params))


def cold(prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
    """What an engine that has never seen anything generates after `prompt`."""
    return list(_cold(tuple(prompt), count, params))


def snapshot(eng: Engine, session: str) -> dict[str, Any]:
    """All that must survive: committed nodes, lines and what comes next."""
    tree = eng.tree(session)
    nodes = {
        n.id: (
            n.parent.id if n.parent else None,
            n.branch,
            n.alias_len,
            n.tokens.tolist(),
            n.mode.value,
            n.line,
            n.generation,
            n.known,
        )
        for n in tree
        if n.mode.value != "spec"
    }
    return {
        "nodes": nodes,
        "tips": {line: node.id for line, node in tree.tips.items()},
        "next_line": tree.next_line,
        "tenant": tree.tenant,
        "salt": tree.salt,
        "seed": eng._seeds[session],
    }


def prefilled(eng: Engine) -> int:
    return eng.stats().prefilled_tokens.committed
