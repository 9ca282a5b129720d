"""`debug=True`: a work may not write rows that stand, or that its batch reads."""

from __future__ import annotations

import pytest

from forkserve import Engine
from forkserve.engine.local import LocalBackend
from forkserve.errors import BackendError
from forkserve.types import Batch, Span, Work

from .conftest import Checkpoints, tiny_config
from .rig import kv_bytes


@pytest.fixture
def backend(checkpoint: Checkpoints, kernels: str) -> LocalBackend:
    return LocalBackend(tiny_config(), checkpoint("llama")[1], kernels=kernels, debug=True)


def writer(page: int, slot: int, count: int = 1) -> Work:
    return Work("s", 2, [2] * count, 0, (), Span("w", [page], 0, count, slot))


def test_rows_that_the_batch_reads(backend: LocalBackend) -> None:
    trunk = Span("t", [3], 0, 8)
    backend.execute(Batch([Work("s", 0, [1] * 8, 0, (), trunk)]))
    before = kv_bytes(backend)
    reader = Work("s", 1, [1], 8, (trunk,), Span("r", [5], 8, 1))
    with pytest.raises(BackendError, match=r"node 2 .* slot 4 of page 3, which another work"):
        backend.execute(Batch([reader, writer(3, 4)]))
    assert kv_bytes(backend) == before
    assert backend.execute(Batch([reader, writer(3, 8)])).results


def test_rows_that_nobody_reads_now(backend: LocalBackend) -> None:
    """Pages of the index and of sealed segments, as control names them for every batch."""
    eng = Engine(backend)
    eng.open(list(range(40)), session="a")
    eng.generate("a", 2)
    seen = []
    real = backend.execute
    backend.execute = lambda batch: seen.append(batch.standing) or real(batch)  # type: ignore
    eng.generate("a", 1)
    (segment,) = eng._core.trees["a"].root.segments
    first, _, last = segment.pages
    assert eng._core.pool.indexed[first]
    assert seen[-1][first] == 16, "all of a page in the index"
    assert 8 < seen[-1][last] < 16, "the rows so far of an open one"
    before = kv_bytes(backend)
    for page, slot in ((first, 0), (last, seen[-1][last] - 1)):
        with pytest.raises(BackendError, match=f"slot {slot} of page {page}, whose row stands"):
            real(Batch([writer(page, slot)], standing=seen[-1]))
    assert kv_bytes(backend) == before
    assert real(Batch([writer(last, seen[-1][last])], standing=seen[-1])).results
    eng.shutdown()
