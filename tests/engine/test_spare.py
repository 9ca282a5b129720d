"""Memory of freed pages: kept for a while, given back in the end, never under a live row."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from forkserve.engine.local.kv import KVSize, PagedKV
from forkserve.engine.local.spare import Spare
from forkserve.types import Span

PAGE = 16


def pool(spare_pages: int, capacity: int = 4096) -> PagedKV:
    bytes_ = 2 * 2 * 2 * 64 * 4 * PAGE
    size = KVSize(2, 2, 64, PAGE, capacity, PAGE, torch.float32)
    return PagedKV(size, spare_bytes=spare_pages * bytes_)


def test_the_oldest_go_first_and_what_is_used_again_stays() -> None:
    spare = Spare(8)
    assert spare.free(range(8)) == []
    spare.take([0, 3])
    assert spare.free([20, 21]) == []
    assert spare.free([22]) == [1, 2], "down to seven eighths"
    assert len(spare) == 7
    assert spare.free([4]) == [], "freed again: the youngest now"
    assert spare.free([30, 31]) == [5, 6]


def test_a_trunk_that_was_freed_finds_its_memory_again() -> None:
    kv = pool(spare_pages=256)
    kv.rows[:, :, : 512 * PAGE] = 1.0
    kv.discard(range(256))
    assert (kv.rows[:, :, : 256 * PAGE] == 1.0).all(), "nothing was given back"
    kv.discard(range(256, 512))  # twice as much as may stay: the oldest go
    assert not kv.rows[:, :, : 256 * PAGE].any()
    assert (kv.rows[:, :, 288 * PAGE : 512 * PAGE] == 1.0).all()


def test_pages_in_use_are_never_given_back() -> None:
    kv = pool(spare_pages=128)
    rows = bytes(kv.bytes_per_token * 64 * PAGE)
    kv.discard(range(128))
    span = Span("s", list(range(64)), 0, 64 * PAGE)
    kv.take([span])
    kv.write(span, rows, 0)
    kv.rows[:, :, : 64 * PAGE] = 2.0
    kv.discard(range(1000, 1400))
    assert (kv.rows[:, :, : 64 * PAGE] == 2.0).all()
    assert not kv.rows[:, :, 64 * PAGE : 128 * PAGE].any()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_use_keeps_every_live_row(seed: int) -> None:
    rng = random.Random(seed)
    kv = pool(spare_pages=rng.choice([0, 100, 300]), capacity=2048)
    live: dict[int, int] = {}
    free = list(range(2048))
    for turn in range(200):
        if rng.random() < 0.6 and len(free) > 200:
            pages = sorted(free)[: rng.choice([1, 70, 200])]
            free = [page for page in free if page not in pages]
            kv.take([Span("s", pages, 0, len(pages) * PAGE)])
            for page in pages:
                kv.rows[:, :, page * PAGE : (page + 1) * PAGE] = turn + 1
                live[page] = turn + 1
        elif live:
            mark = rng.choice(list(live.values()))
            gone = [page for page, of in live.items() if of == mark]
            for page in gone:
                del live[page]
            free += gone
            kv.discard(gone)
    for page, mark in live.items():
        found = kv.rows[:, :, page * PAGE : (page + 1) * PAGE].numpy()
        assert np.all(found == mark), page
