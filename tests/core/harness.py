"""Engines for tests: a poisoned, shuffled mock, and the cold engine that everything must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forkserve import Engine, ForkServeConfig
from forkserve.control.core import Core
from forkserve.control.flight import Ran
from forkserve.control.loop import Loop
from forkserve.engine import MockBackend
from forkserve.tree.node import Node
from forkserve.tree.rows import missing, spans
from forkserve.types import GREEDY, NodeMode, SamplingParams

from .strict import StrictMock

_COLD = ForkServeConfig(page_size=16, capacity_pages=64, prefix_index=False)


def engine(backend: dict[str, Any] | None = None, **config: Any) -> Engine:
    """An engine over the mock; pages come in shuffled order, free slots hold poison."""
    settings = {"shuffle_pages": True, "page_size": 4, "capacity_pages": 64, **config}
    return Engine(StrictMock(ForkServeConfig(**settings), **(backend or {})))


def mock(eng: Engine) -> MockBackend:
    backend = eng.backend
    assert isinstance(backend, MockBackend)
    return backend


def core(eng: Engine) -> Core:
    return eng._core


def loop(eng: Engine) -> Loop:
    return eng._loop


def tick(eng: Engine) -> Ran:
    return loop(eng).tick(wake=True)


def node(eng: Engine, session: str, node_id: int) -> Node:
    return eng.tree(session).get(node_id)


def refs(eng: Engine) -> list[int]:
    return list(core(eng).pool.refs)


def warm(eng: Engine, session: str, *kids: int) -> None:
    """Prefill branches."""
    eng.speculate_set(session, dict.fromkeys(kids, 1.0))
    while eng.drain_slack():
        eng.check()


Key = tuple[tuple[int, ...], int, SamplingParams, int]
_known: dict[Key, tuple[int, ...]] = {}  # what cold engines said


def cold(
    prompt: Sequence[int], count: int, params: SamplingParams = GREEDY, window: int = 0
) -> list[int]:
    """What an engine that has never seen anything else generates after `prompt`.

    It keeps every row: nobody tells it that the layers of the model have a window.
    """
    key = (tuple(prompt), count, params, window)
    if key not in _known:
        backend = MockBackend(_COLD, window=window)
        backend.info.extra.clear()
        eng = Engine(backend)
        _known[key] = tuple(eng.generate(eng.open(prompt).id, count, params=params))
    return list(_known[key])


_rows: dict[tuple[tuple[int, ...], int], bytes] = {}


def cold_rows(tokens: Sequence[int], window: int = 0) -> bytes:
    """The KV rows of these tokens in an engine that has never seen anything else."""
    key = tuple(tokens), window
    if key not in _rows:
        backend = MockBackend(_COLD, window=window)
        backend.info.extra.clear()
        eng = Engine(backend)
        tree = eng.tree(eng.open(tokens).id)
        _rows[key] = bytes(backend.read_rows(spans(tree, tree.root, len(tokens))))
    return _rows[key]


def assert_rows_as_cold(eng: Engine, session: str) -> None:
    """Every row that a path of the session can read has the bits that a cold engine computes."""
    while core(eng).pending:
        tick(eng)
    tree, backend = eng.tree(session), mock(eng)
    for one in tree:
        end = one.kv_end
        if missing(one, end) or not (parts := spans(tree, one, end)):
            continue
        rows = bytes(backend.read_rows(parts))
        want = cold_rows(tree.tokens(one, 0, end), backend.window)
        assert want[len(want) - len(rows) :] == rows, f"rows of node {one.id}"
        assert len(rows) == len(want) * (end - parts[0].start) // end


@contextmanager
def only_for_now() -> Iterator[None]:
    """What a cold engine says in here, perhaps broken on purpose, is forgotten afterwards."""
    before = dict(_known)
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


@dataclass(frozen=True)
class Alphabet:
    """Lets a generation use the ids [low, high) only: a session's own letters."""

    low: int
    high: int

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        return range(self.low, self.high)


def assert_same_as_cold(eng: Engine, session: str, count: int = 3) -> None:
    """Whatever happened to the session, its tip goes on as a cold engine would."""
    history = eng.tokens(session)
    assert eng.generate(session, count) == cold(history, count, window=mock(eng).window)
    eng.check()


def assert_nothing_left(eng: Engine) -> None:
    """Close everything: no page, no task, no promise may stay behind."""
    for session in eng.sessions():
        eng.close(session)
    while core(eng).pending:
        tick(eng)
    state = core(eng)
    state.index.clear()
    eng.check()
    assert state.pool.live_pages == 0
    assert eng.stats().live_rows == 0
    assert not any(state.pool.pins)
    assert not state.tasks
    assert not state.parked
    assert not state.in_flight
    assert not state.trees
    assert len(state.scheduler) == 0
    assert not state.scheduler._nodes
    assert not state.scheduler._programs
    assert state.planner.ledger.total == 0
    assert not state.planner.ledger._held


def snapshot(eng: Engine, session: str) -> dict[int, tuple[Any, ...]]:
    """Everything about the nodes of a session that a failed verb must not change."""
    tree = eng.tree(session)
    return {
        n.id: (tree.tokens(n).tolist(), n.mode, n.line, n.generation, n.known, n.alias_len)
        for n in tree
    }


def modes(eng: Engine, session: str) -> dict[int, NodeMode]:
    return {n.id: n.mode for n in eng.tree(session)}
