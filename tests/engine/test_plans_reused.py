"""Through the backend: what native attention was told is grown from pass to pass, not made anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forkserve import Engine, SamplingParams
from forkserve.engine.local import LocalBackend
from forkserve.engine.local.native import NativeRunner
from forkserve.kernels.native import library
from forkserve.kernels.native.grown_tables import TablePlanner

from .conftest import Checkpoints, tiny_config

pytestmark = pytest.mark.skipif(library.available() is not None, reason=str(library.available()))

GO_ON = SamplingParams(ignore_eos=True)


@pytest.fixture
def backend(checkpoint: Checkpoints) -> Iterator[LocalBackend]:
    backend = LocalBackend(tiny_config(prefill_chunk=64), checkpoint("llama")[1], kernels="native")
    yield backend
    backend.close()


def tables(backend: LocalBackend) -> TablePlanner:
    runner = backend._runner
    assert isinstance(runner, NativeRunner)
    return runner._tables


def attempts(eng: Engine, session: str, count: int) -> list[tuple[str, int]]:
    tip = eng.tip(session)
    kids = [eng.fork(session, tip, f"b{i}", [100 + i]) for i in range(count)]
    return [(session, eng.attempt(session, kid)) for kid in kids]


def test_branches_that_decode_grow_their_tables(backend: LocalBackend) -> None:
    with Engine(backend) as eng:
        targets = attempts(eng, eng.open(range(40)).id, 4)
        planner = tables(backend)
        made, grown = planner.made, planner.grown
        eng.generate_many(targets, 20, params=GO_ON)  # over the end of a page
        assert planner.made - made <= 2, "the first row of a branch's own run, and the second"
        assert planner.grown - grown >= 18


def test_they_grow_beside_a_prompt_that_comes_in_chunks(backend: LocalBackend) -> None:
    with Engine(backend) as eng:
        s = eng.open(range(40)).id
        running = [eng.start(s, 30, node=node, params=GO_ON) for s, node in attempts(eng, s, 3)]
        planner = tables(backend)
        for _ in range(3):
            eng._loop.tick(wake=True)
        made, grown = planner.made, planner.grown
        other = eng.open(range(50, 250), prefill=False)
        running.append(eng.start(other.id, 1, params=GO_ON))
        while not running[-1].done:
            eng._loop.tick(wake=True)
        assert (planner.made - made, planner.grown - grown) == (0, 4)
        for generation in running:
            generation.cancel()
