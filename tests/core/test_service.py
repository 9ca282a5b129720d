"""The service loop: one pass for many, ends at chunk boundaries, and passes that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from forkserve import Engine
from forkserve.errors import BackendError, OutOfPages
from forkserve.types import Batch, SamplingParams, Work
from tests.waiting import wait_for

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    node,
    tick,
)
from .scenarios import OTHER, PROMPT, WRAP

LONG = [(3 * i) % 250 for i in range(61)]


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


class Machine:
    """Watches the passes of a mock, and fails those it is told to."""

    def __init__(self, broken: Callable[[list[Work]], Exception | None] = lambda _: None) -> None:
        self.sizes: list[tuple[int, int]] = []  # (works, rows) of the passes that went well
        self.failed = 0
        self.broken = broken

    def __call__(self, batch: Batch) -> None:
        if not batch.works:
            return
        error = self.broken(batch.works)
        if error is not None:
            self.failed += 1
            raise error
        self.sizes.append((len(batch.works), rows(batch.works)))


def rows(works: list[Work]) -> int:
    return sum(len(work.tokens) for work in works)


def memory_for(limit: int, error: Callable[[], Exception] = MemoryError) -> Machine:
    return Machine(lambda works: error() if rows(works) > limit else None)


# ---------------------------------------------------------------- one pass for many


def test_sessions_and_branches_decode_in_the_same_pass() -> None:
    watch = Machine()
    eng = engine({"on_batch": watch}, capacity_pages=512)
    names = [eng.open([i, *PROMPT]).id for i in range(6)]
    targets: list[Any] = [*names]
    for s in names[:3]:
        targets += [(s, eng.attempt(s, eng.fork(s, 1, "k", [i]))) for i in range(4)]
    watch.sizes.clear()
    got = eng.generate_many(targets, 5)
    assert got[0] == cold([0, *PROMPT], 5)
    assert got[6] == cold([0, *PROMPT, 0], 5)
    assert len(watch.sizes) == 5
    assert watch.sizes[1:] == [(18, 18)] * 4
    assert_nothing_left(eng)


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("end", ["cancel", "close", "abort"])
def test_a_prefill_ends_at_the_next_chunk(done: int, end: str) -> None:
    """Committed work too: nothing more is computed for it, and its pages go or stay whole."""
    watch = Machine()
    eng = engine({"on_batch": watch}, prefill_chunk=8)
    s, other = eng.open(PROMPT).id, eng.open(OTHER).id
    kid = eng.attempt(s, eng.fork(s, 1, "k", LONG))
    watch.sizes.clear()
    running = eng.start(s, 4, node=kid)
    for _ in range(done):
        tick(eng)
    if end == "cancel":
        running.cancel()
    elif end == "abort":
        eng.abort(s, kid)
    else:
        eng.close(s)
    assert eng.generate(other, 2) == cold(OTHER, 2)
    assert watch.sizes == [(1, 8)] * done + [(1, 1)] * 2
    assert running.done
    eng.check()
    if end == "cancel":
        assert node(eng, s, kid).kv_end == len(PROMPT) + 8 * done
        assert eng.generate(s, 4, node=kid) == cold(PROMPT + LONG, 4)
    assert_nothing_left(eng)


def test_a_full_pool_preempts_the_youngest_and_recomputes_it_once() -> None:
    """Passes are counted: one prefill again, in one chunk, and a token a pass otherwise."""
    watch = Machine()
    eng = engine({"on_batch": watch}, capacity_pages=12, prefix_index=False)
    old, young = eng.open(PROMPT).id, eng.open(OTHER).id
    watch.sizes.clear()
    running = [eng.start(old, 20), eng.start(young, 24)]
    assert [r.result() for r in running] == [cold(PROMPT, 20), cold(OTHER, 24)]
    stats = eng.stats()
    assert stats.preemptions == 1
    again = [size for size in watch.sizes if size[1] > 2]
    assert len(again) == 1, "its rows came back in one pass"
    assert len(watch.sizes) < 20 + 24
    eng.check()
    assert_nothing_left(eng)


# ---------------------------------------------------------------- memory runs out


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError,
        lambda: OutOfMemoryError("CUDA"),
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."),
        lambda: RuntimeError("HIP out of memory"),
    ],
)
def test_a_batch_that_does_not_fit_is_tried_smaller(
    background: bool, error: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    watch = memory_for(10, error)
    eng = engine({"on_batch": watch}, background=background, capacity_pages=256)
    names = [eng.open([i, *LONG], prefill=False).id for i in range(4)]
    with caplog.at_level(logging.WARNING):
        assert eng.generate_many(names, 3) == [cold([i, *LONG], 3) for i in range(4)]
    assert "tried smaller" in caplog.text
    assert watch.failed == eng.stats().failed_passes >= 5
    assert max(size for _, size in watch.sizes) <= 10
    assert eng.generate(names[0], 3) == cold([0, *LONG, *cold([0, *LONG], 3)], 3)
    eng.check()
    eng.shutdown()


def test_many_generations_that_do_not_fit_together_take_turns() -> None:
    watch = memory_for(3)
    eng = engine({"on_batch": watch}, capacity_pages=256)
    names = [eng.open([i, 1, 2], prefill=False).id for i in range(8)]
    assert eng.generate_many(names, 4) == [cold([i, 1, 2], 4) for i in range(8)]
    assert max(works for works, _ in watch.sizes) <= 3
    assert_nothing_left(eng)


def test_ticks_grow_again_when_there_is_memory_again() -> None:
    watch = memory_for(8)
    eng = engine({"on_batch": watch}, capacity_pages=512)
    s = eng.open(LONG).id
    watch.broken = lambda _: None
    room = core(eng).scheduler.recovery.room
    assert room <= 8
    eng.generate(s, 400)
    assert core(eng).scheduler.recovery.room == eng.config.max_batch_tokens
    watch.sizes.clear()
    eng.open(LONG[::-1])
    assert watch.sizes == [(1, len(LONG))]


def test_one_row_that_does_not_fit_is_a_typed_error_for_its_caller_alone() -> None:
    def broken(works: list[Work]) -> Exception | None:
        return MemoryError() if any(w.session == "big" for w in works) else None

    eng = engine({"on_batch": Machine(broken)})
    eng.open(LONG, session="big", prefill=False)
    small = eng.open(PROMPT).id
    running = [eng.start("big", 3), eng.start(small, 6)]
    assert running[1].result() == cold(PROMPT, 6)
    with pytest.raises(BackendError, match="MemoryError") as caught:
        running[0].result()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert eng.tokens("big") == LONG
    eng.check()
    assert_nothing_left(eng)


def test_speculation_that_does_not_fit_harms_nobody() -> None:
    watch = memory_for(12)
    eng = engine({"on_batch": watch}, capacity_pages=256)
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", LONG)
    assert eng.speculate(s, kid)
    assert eng.generate(eng.open(OTHER).id, 3) == cold(OTHER, 3)
    while eng.drain_slack():
        pass
    assert node(eng, s, kid).speculated == len(LONG)
    eng.commit(s, 1, LONG)
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


# ---------------------------------------------------------------- a pass fails otherwise


def poisoned(session: str) -> Machine:
    def broken(works: list[Work]) -> Exception | None:
        return ValueError("poison") if any(w.session == session for w in works) else None

    return Machine(broken)


@pytest.mark.parametrize("background", [False, True])
def test_only_the_work_at_fault_fails(background: bool) -> None:
    watch = poisoned("bad")
    eng = engine({"on_batch": watch}, background=background, capacity_pages=256)
    names = [eng.open([i, *PROMPT]).id for i in range(5)]
    eng.open(OTHER, session="bad", prefill=False)
    kid = eng.fork(names[0], 1, "k", WRAP)
    eng.speculate(names[0], kid)
    with core(eng).lock:
        running = [eng.start(s, 4) for s in [*names[:2], "bad", *names[2:]]]
    with pytest.raises(BackendError, match="poison"):
        running.pop(2).result()
    assert [r.result() for r in running] == [cold([i, *PROMPT], 4) for i in range(5)]
    assert eng.stats().failed_passes == watch.failed
    assert eng.tokens("bad") == OTHER
    for s in names:
        assert_same_as_cold(eng, s)
    eng.check()
    eng.shutdown()


def test_afterwards_they_share_passes_again() -> None:
    watch = poisoned("bad")
    eng = engine({"on_batch": watch}, capacity_pages=256)
    names = [eng.open([i, *PROMPT]).id for i in range(4)]
    eng.open(OTHER, session="bad", prefill=False)
    watch.sizes.clear()
    running = [eng.start(s, 6) for s in [*names, "bad"]]
    with pytest.raises(BackendError):
        running[-1].result()
    for generation in running[:-1]:
        generation.result()
    assert watch.sizes == [(1, 1)] * 4 + [(4, 4)] * 5


def test_a_backend_that_always_fails_ends_everybody_with_its_error() -> None:
    watch = Machine(lambda _: RuntimeError("the device is gone"))
    for background in (False, True):
        eng = engine({"on_batch": watch}, background=background)
        names = [eng.open([i, *PROMPT], prefill=False).id for i in range(4)]
        for generation in [eng.start(s, 3) for s in names]:
            with pytest.raises(BackendError, match="device is gone"):
                generation.result()
        assert not core(eng).tasks
        watch.broken, healthy = (lambda _: None), watch.broken
        for s in names:
            assert_same_as_cold(eng, s)
        watch.broken = healthy
        eng.shutdown()


def test_a_page_shortage_is_no_lack_of_memory() -> None:
    eng: Engine = engine({"on_batch": Machine(lambda _: OutOfPages(1, 0, 4))})
    with pytest.raises(OutOfPages):
        eng.open(LONG)
    assert eng.stats().failed_passes == 1
    assert core(eng).scheduler.recovery.room == eng.config.max_batch_tokens


def test_a_loop_of_its_own_outlives_every_kind_of_failure() -> None:
    errors = [MemoryError(), ValueError("x"), OutOfPages(1, 0, 4), OutOfMemoryError("y")]
    watch = Machine(lambda works: errors.pop() if errors else None)
    eng = engine({"on_batch": watch}, background=True, capacity_pages=256)
    names = [eng.open([i, *PROMPT], prefill=False).id for i in range(3)]
    for _ in range(3):
        for generation in [eng.start(s, 3) for s in names]:
            wait_for(lambda g=generation: g.done)
    assert not errors
    for s in names:
        assert_same_as_cold(eng, s)
    eng.check()
    eng.shutdown()


def test_generations_keep_their_places_in_the_batch() -> None:
    """Whose turn is first changes from tick to tick; plans of attention grow while places stay."""
    seen: list[list[str]] = []
    eng = engine(
        {"on_batch": lambda batch: seen.append([work.session for work in batch.works])},
        capacity_pages=512,
        max_batch_tokens=9,
    )
    running = []
    for i in range(12):  # at different times, of tenants that are served in turn
        prompt = [i, *PROMPT[: 1 + i % 5]]
        s = eng.open(prompt, tenant="xyz"[i % 3], session=f"{i:02}").id
        running.append((prompt, eng.start(s, 14, params=SamplingParams(ignore_eos=True))))
        for _ in range(i % 3):
            tick(eng)
    for prompt, generation in running:
        assert generation.result() == cold(prompt, 14, SamplingParams(ignore_eos=True))
    assert all(batch == sorted(batch) for batch in seen)
    assert_nothing_left(eng)
