"""Equal prompts in flight together: their rows are computed once, whoever ends first or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine
from forkserve.errors import BackendError
from forkserve.types import Batch
from tests.waiting import HANGS_S

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    node,
    tick,
)
from .scenarios import PROMPT, WRAP

P = 4
LONG = [(7 * i) % 250 for i in range(41)]
WHOLE = 40  # tokens of LONG in pages that can be shared


class Rows:
    """Counts the rows that passes write, and may do something at a pass."""

    def __init__(self) -> None:
        self.written = self.passes = 0
        self.at: dict[int, Callable[[], Any]] = {}

    def __call__(self, batch: Batch) -> None:
        self.passes += 1
        self.written += sum(len(w.tokens) for w in batch.works if w.write is not None)
        self.at.pop(self.passes, lambda: None)()


def several(
    rows: Rows, count: int = 3, prompt: list[int] = LONG, **config: Any
) -> tuple[Engine, list[str]]:
    """Sessions that have not computed anything of their prompt yet."""
    eng = engine({"on_batch": rows}, **{"prefill_chunk": 8, "capacity_pages": 256, **config})
    return eng, [eng.open(prompt, session=f"s{i}", prefill=False).id for i in range(count)]


@pytest.mark.parametrize("chunk", [3, 4, 8, 11, 64])
@pytest.mark.parametrize("count", [2, 5])
def test_rows_are_computed_once(chunk: int, count: int) -> None:
    rows = Rows()
    eng, names = several(rows, count, prefill_chunk=chunk)
    got = eng.generate_many(names, 4)
    assert got == [cold(LONG, 4)] * count
    own = len(LONG) - WHOLE + 3  # the last token is left to each, and what it generates
    assert rows.written == WHOLE + count * own
    assert eng.stats().cached_tokens == (count - 1) * WHOLE
    assert eng.stats().prefilled_tokens.committed <= len(LONG)
    eng.check()
    assert_nothing_left(eng)


def test_opens_in_threads_wait_for_one_another() -> None:
    rows = Rows()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(HANGS_S)

    rows.at[1] = hold
    eng = engine({"on_batch": rows}, background=True, prefill_chunk=16, capacity_pages=256)
    handles: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: handles.append(eng.open(LONG, session=f"s{i}")))
        for i in range(6)
    ]
    threads[0].start()
    assert entered.wait(HANGS_S)
    for thread in threads[1:]:
        thread.start()
    leave.set()
    for thread in threads:
        thread.join(HANGS_S)
    assert rows.written == WHOLE + 6 * (len(LONG) - WHOLE)
    assert sum(handle.cached_tokens for handle in handles) == 5 * WHOLE
    for handle in handles:
        assert_same_as_cold(eng, handle.id)
    eng.shutdown()


def test_a_common_beginning_is_computed_once_and_the_rest_apart() -> None:
    rows = Rows()
    eng = engine({"on_batch": rows}, prefill_chunk=8, capacity_pages=256)
    prompts = [[*LONG[:18], *[i] * 9] for i in range(3)]
    names = [eng.open(prompt, prefill=False).id for prompt in prompts]
    assert eng.generate_many(names, 3) == [cold(prompt, 3) for prompt in prompts]
    assert rows.written == 16 + 3 * (2 + 9 + 2)
    assert_nothing_left(eng)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"salt": "x"}, {"salt": "y"}),
        ({"tenant": "a"}, {"tenant": "a", "salt": "own"}),
    ],
)
def test_tenants_and_salts_never_wait_for_one_another(
    one: dict[str, str], two: dict[str, str]
) -> None:
    rows = Rows()
    eng = engine({"on_batch": rows}, capacity_pages=256)
    names = [eng.open(LONG, prefill=False, **options).id for options in (one, two)]
    assert eng.generate_many(names, 1) == [cold(LONG, 1)] * 2
    assert rows.written == 2 * len(LONG)
    assert eng.stats().cached_tokens == 0


def test_tenants_that_share_a_salt_share_the_work() -> None:
    rows = Rows()
    eng = engine({"on_batch": rows}, capacity_pages=256)
    names = [eng.open(LONG, prefill=False, tenant=t, salt="x").id for t in "ab"]
    eng.generate_many(names, 1)
    assert rows.written == len(LONG) + 1


def test_without_the_index_each_computes_its_own() -> None:
    rows = Rows()
    eng, names = several(rows, prefix_index=False)
    assert eng.generate_many(names, 1) == [cold(LONG, 1)] * 3
    assert rows.written == 3 * len(LONG)


# ---------------------------------------------------------------- somebody takes over


def chunks(eng: Engine, count: int) -> None:
    for _ in range(count):
        tick(eng)


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_the_one_that_computes_is_ended(done: int, end: str) -> None:
    """After any chunk: the next in line goes on behind the last whole page."""
    rows = Rows()
    eng, names = several(rows)
    running = [eng.start(s, 2) for s in names]
    chunks(eng, done)
    assert rows.written == min(8 * done, WHOLE)
    if end == "cancel":
        running[0].cancel()
    else:
        eng.close(names[0])
    assert [r.result() for r in running[1:]] == [cold(LONG, 2)] * 2
    assert rows.written == WHOLE + 2 * 2
    if end == "cancel":
        assert_same_as_cold(eng, names[0])
    assert_nothing_left(eng)


@pytest.mark.parametrize("at", range(1, 7))
def test_the_one_that_computes_fails(at: int) -> None:
    rows = Rows()
    eng, names = several(rows)
    rows.at[at] = fail
    running = [eng.start(s, 2) for s in names]
    results: list[list[int] | None] = []
    for generation in running:
        try:
            results.append(generation.result())
        except BackendError:
            results.append(None)
    assert results.count(None) <= 1
    assert [r for r in results if r is not None] == [cold(LONG, 2)] * (3 - results.count(None))
    for s in names:
        assert_same_as_cold(eng, s)
    assert rows.written <= WHOLE + 8 + 3 * 7
    assert_nothing_left(eng)


def fail() -> None:
    raise BackendError("this pass fails")


@pytest.mark.parametrize("done", range(1, 5))
def test_the_one_that_computes_is_preempted(done: int) -> None:
    rows = Rows()
    eng, names = several(rows)
    running = [eng.start(s, 2) for s in names]
    chunks(eng, done)
    with core(eng).lock:
        task = core(eng).tasks[names[0], 1]
        task.held = True  # it lost its pages and waits
        core(eng).drop_rows(task.tree, task.target)
    assert [r.result() for r in running[1:]] == [cold(LONG, 2)] * 2
    with core(eng).lock:
        task.held = False
    assert running[0].result() == cold(LONG, 2)
    assert rows.written == WHOLE + 3 * 2, "it came back through the index"
    assert eng.stats().cached_tokens == 2 * WHOLE, "what it had once is no hit"
    assert_nothing_left(eng)


def test_the_branch_that_computes_the_trunk_is_aborted() -> None:
    """Attempts over trunks that nobody has computed yet."""
    rows = Rows()
    eng, names = several(rows, 2)
    kids = [eng.attempt(s, eng.fork(s, 1, "k", WRAP)) for s in names]
    running = [eng.start(s, 3, node=kid) for s, kid in zip(names, kids, strict=True)]
    chunks(eng, 2)
    eng.abort(names[0], kids[0])
    assert running[0].done
    assert running[1].result() == cold(LONG + WRAP, 3)
    assert rows.written == len(LONG) + len(WRAP) + 2
    assert_same_as_cold(eng, names[0])
    assert_nothing_left(eng)


def test_one_that_began_alone_takes_over_what_another_did_meanwhile() -> None:
    """Rows of its own in a half-filled page make way for the shared page."""
    rows = Rows()
    eng, names = several(rows, 2, prefill_chunk=6)
    late = eng.start(names[0], 2)
    tick(eng)
    assert node(eng, names[0], 1).kv_end == 6
    core(eng).tasks[names[0], 1].held = True
    assert eng.generate(names[1], 2) == cold(LONG, 2)
    core(eng).tasks[names[0], 1].held = False
    assert late.result() == cold(LONG, 2)
    assert rows.written == 6 + (WHOLE - 4) + 2 * 2
    eng.check()
    assert_nothing_left(eng)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 41), st.integers(0, 2)), min_size=2, max_size=6),
    st.sampled_from([3, 5, 8, 64]),
    st.integers(14, 60),
    st.sampled_from([0, 2, 3]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4),
)
def test_any_mix_says_what_cold_engines_say(
    prompts: list[tuple[int, int]],
    chunk: int,
    capacity: int,
    preempt: int,
    cancels: list[tuple[int, int]],
) -> None:
    """Common beginnings of any length, a small pool, pre-emption and cancels at any tick."""
    eng = engine({"force_preempt_every": preempt}, prefill_chunk=chunk, capacity_pages=capacity)
    texts = [[*LONG[:same], 300 + kind, 301] for same, kind in prompts]
    running = []
    for text in texts:
        s = eng.open(text, prefill=False).id
        running.append(eng.start(s, 5))
    for at in range(13):
        for number, when in cancels:
            if when == at:
                running[number % len(running)].cancel()
        if not all(r.done for r in running):
            tick(eng)
            eng.check()
    for text, generation in zip(texts, running, strict=True):
        if not generation.done:
            generation.result()
        assert generation.tokens == cold(text, 5)[: len(generation.tokens)]
        if generation.finish_reason == "length":
            assert len(generation.tokens) == 5
    eng.check()
    assert_nothing_left(eng)


def test_prompts_shorter_than_a_page_share_nothing() -> None:
    eng, names = several(Rows(), 3, PROMPT[:3])
    assert eng.generate_many(names, 2) == [cold(PROMPT[:3], 2)] * 3
    assert eng.stats().cached_tokens == 0
