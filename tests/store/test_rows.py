"""KV rows as bytes: out of any pages, into any others, the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from forkserve import ForkServeConfig
from forkserve.engine import MockBackend, Portable
from forkserve.engine.protocol import Refilling
from forkserve.store.identity import fingerprint, weights_id
from forkserve.types import Batch, SampleSpec, SamplingParams, Span, Work

CONFIG = ForkServeConfig(page_size=4, capacity_pages=64, max_batch_tokens=64)


def spread(count: int, seed: int, start: int = 0, offset: int = 0, size: int = 4) -> Span:
    """A span over shuffled pages of `size` rows."""
    pages = random.Random(seed).sample(range(64), 64)
    return Span(("s", seed), pages[: -(-(offset + count) // size)], start, count, offset)


def work(tokens: Sequence[int], write: Span | None, context: tuple[Span, ...] = ()) -> Work:
    start = sum(span.length for span in context)
    return Work("s", 1, list(tokens), start, context, write, logits=True)


def check(backend: Any) -> None:
    assert isinstance(backend, Portable)
    tokens = [random.Random(1).randrange(200) for _ in range(30)]
    size = backend.config.page_size
    here = spread(30, seed=1, size=size)
    backend.execute(Batch([work(tokens, here)]))
    ahead = Span("a", here.pages, 0, 13, 0)
    rest = Span("b", here.pages[13 // size :], 13, 17, 13 % size)
    run = backend.read_rows([here])
    assert len(run) == 30 * backend.info.kv_bytes_per_token
    assert backend.read_rows([ahead, rest]) == run
    wanted = backend.execute(Batch([work([7], None, (here,))])).results[0].logits
    backend.discard(here.pages)

    first = spread(11, seed=2, offset=3, size=size)
    second = Span("c", [p for p in range(64) if p not in first.pages][:6], 11, 19, 1)
    backend.write_rows(first, run, 0)
    backend.write_rows(second, memoryview(run), 11)
    assert backend.read_rows([first, second]) == run
    assert isinstance(backend, Refilling)
    used = bytearray(b"\xff" * len(run))
    backend.read_rows_into([first, second], used)
    assert used == run, "nothing is left of what was in the buffer before"
    got = backend.execute(Batch([work([7], None, (first, second))])).results[0].logits
    assert (got == wanted).all()


def test_rows_of_the_mock_travel() -> None:
    backend = MockBackend(CONFIG)
    check(backend)
    assert fingerprint(backend.identity(weights_id)).text


def test_missing_rows_change_the_mock() -> None:
    backend = MockBackend(CONFIG)
    span = spread(8, seed=1)
    backend.execute(Batch([work(range(8), span)]))
    run = backend.read_rows([span])
    other = spread(8, seed=9)
    spec = SampleSpec(SamplingParams(), 0, 8, 0, 0)
    token = []
    for rows in (run, bytes(len(run))):
        backend.write_rows(other, rows, 0)
        item = Work("s", 1, [5], 8, (other,), None, sample=spec)
        token.append(backend.execute(Batch([item])).results[0].token)
    assert token[0] != token[1]


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "w8a16"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_rows_of_the_bundled_engine_travel(kernels: str, dtype: str) -> None:
    from forkserve.engine import LocalBackend
    from forkserve.kernels.native import library

    config = CONFIG  # of pages that the native kernels don't have
    if kernels == "native":
        if why := library.available():
            pytest.skip(why)
        config = ForkServeConfig(page_size=16, capacity_pages=64, max_batch_tokens=64)
    elif dtype == "w8a16":
        pytest.skip("a variant of the native kernels")
    backend = LocalBackend(config, dtype=dtype, kernels=kernels)
    check(backend)
    made = fingerprint(backend.identity(weights_id))
    assert made.fields["kv_dtype"] == ("float32" if dtype == "float32" else "bfloat16")
    assert made.fields["weights"].startswith("blake3:")
    assert made.layout["row_bytes"] == backend.info.kv_bytes_per_token
    backend.close()
