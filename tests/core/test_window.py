"""A model whose layers all have a window gives pages back, and nobody can tell by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forkserve import Engine
from forkserve.control.probe import choice_mass, forks
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError
from forkserve.store import Store
from forkserve.types import SamplingParams

from .driver import play, schedule, shrink
from .harness import assert_nothing_left, assert_same_as_cold, cold, core, engine, node, tick

WINDOW = 9
GO_ON = SamplingParams(ignore_eos=True)
SETTINGS: list[dict[str, Any]] = [
    {"tail": "auto"},
    {"tail": "pack"},
    {"tail": "freeze"},
    {"tail": "auto", "prefix_index": False},
    {"tail": "auto", "page_size": 3, "max_batch_works": 2, "max_queue": 3},
]


def windowed(window: int = WINDOW, **config: Any) -> Engine:
    return engine({"window": window}, **{"prefix_index": False, **config})


def grown(eng: Engine, count: int = 60) -> str:
    """A session far longer than the window."""
    s = eng.open(range(20, 40)).id
    assert eng.generate(s, count, params=GO_ON) == cold(range(20, 40), count, GO_ON, WINDOW)
    return s


def floor(eng: Engine, session: str) -> int:
    return eng.tree(session).root.floor


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_random_schedules(setting: int) -> None:
    """Every verb in any order, with windows of 1 to 25 rows: the tokens of a cold engine."""
    windows = (1, 3, 5, 9, 14, 25)
    for seed in range(40 * setting, 40 * setting + 40):
        fixed = {**SETTINGS[setting], "window": windows[seed % len(windows)]}
        begin, steps = schedule(seed, 60)
        try:
            play(fixed, begin, steps)
        except Exception as error:
            short = shrink(fixed, begin, steps, error)
            lines = "\n".join(f"    {name}({args})" for name, args in short)
            raise AssertionError(f"seed {seed}, {fixed}, {begin}\n{lines}") from error


def test_the_mock_sees_a_window() -> None:
    """Two layers: a token depends on 2 * window - 1 rows, and on none before them."""
    a, b = list(range(30)), list(range(100, 102)) + list(range(2, 30))
    reach = 2 * 5 - 1
    assert cold(a, 3, window=5) == cold(b, 3, window=5)
    changed = [*a[: 30 - reach], 200, *a[30 - reach + 1 :]]
    assert cold(a, 1, window=5) != cold(changed, 1, window=5)
    assert cold(a, 3) != cold(b, 3)
    with pytest.raises(ConfigError, match="window=-1"):
        MockBackend(window=-1)


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_long_line_holds_no_more_than_its_window(chunk: int) -> None:
    eng = windowed(capacity_pages=16, prefill_chunk=chunk, max_batch_tokens=64)
    s = eng.open(range(20, 40)).id
    running = eng.start(s, 150, params=GO_ON)
    most = 0
    while not running.done:
        tick(eng)
        eng.check()
        if len(running.tokens) > 1:
            most = max(most, core(eng).pool.live_pages)
    assert running.tokens == cold(range(20, 40), 150, GO_ON, WINDOW)  # longer than the pool
    assert most <= -(-WINDOW // 4) + 2
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_many_turns_hold_no_more_than_the_window() -> None:
    eng = windowed()
    s = grown(eng)
    for turn in range(8):
        trunk = eng.tree(s).tip.id
        guess = eng.fork(s, trunk, "guess", [turn, 1, 2])
        eng.speculate(s, guess)
        eng.commit(s, trunk, [turn, 1, 3])
        assert_same_as_cold(eng, s, 5)
    assert core(eng).pool.live_pages <= -(-WINDOW // 4) + 3
    assert all(not n.segments for n in eng.tree(s).tip.ancestors() if n.length < floor(eng, s))
    assert eng.stats().evicted_nodes == 0  # it never had to start over


def test_a_line_longer_than_the_pool_shares_it() -> None:
    """It fits: that others hold the pages now is no reason to fail."""
    eng = windowed(capacity_pages=16)
    s = grown(eng, 100)
    other = eng.open(range(200, 210)).id
    kids = [eng.fork(other, 1, "kid", [i] * 6) for i in range(7)]
    for kid in kids:
        eng.attempt(other, kid)
        eng.generate(other, 1, node=kid)
    assert core(eng).pool.free_pages < 2
    assert_same_as_cold(eng, s, 20)
    text = eng.tokens(other)
    assert eng.generate(other, 3, node=kids[0]) != []
    assert eng.tokens(other) == text
    eng.commit(s, eng.tree(s).tip.id, [1, 2], at=90)  # computed again from 0, in a pool of 64 rows
    assert_same_as_cold(eng, s, 20)
    assert_nothing_left(eng)


def test_without_a_window_nothing_goes() -> None:
    eng = engine(prefix_index=False)
    s = eng.open(range(20, 40)).id
    eng.generate(s, 60, params=GO_ON)
    assert floor(eng, s) == 0
    assert core(eng).pool.live_pages == 20


def test_a_branch_keeps_every_row_of_its_trunk() -> None:
    eng = windowed()
    s = eng.open(range(20, 28)).id
    eng.fork(s, 1, "early", [1, 2], at=6)
    eng.generate(s, 60, params=GO_ON)
    assert floor(eng, s) == 0
    kid = next(n.id for n in eng.tree(s) if n.branch == "early")
    eng.abort(s, kid)
    assert_same_as_cold(eng, s)
    assert floor(eng, s) > 0


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("at", [1, 40, 70, 77])
def test_fork_at_an_inner_place(at: int, index: bool) -> None:
    eng = windowed(prefix_index=index)
    s = grown(eng)
    assert floor(eng, s) > 40
    text = eng.tokens(s)
    kid = eng.fork(s, 1, "kid", [5, 6], at=at)
    eng.attempt(s, kid)
    assert eng.generate(s, 4, node=kid) == cold([*text[:at], 5, 6], 4, window=WINDOW)
    assert_same_as_cold(eng, s)
    eng.promote(s, kid)
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_speculation_takes_no_rows_from_its_trunk() -> None:
    eng = windowed()
    s = grown(eng)
    kept = node(eng, s, 1).segments
    kid = eng.fork(s, 1, "kid", [5, 6], at=40)
    eng.speculate(s, kid)
    while eng.drain_slack():
        pass
    assert node(eng, s, 1).segments == kept
    assert not node(eng, s, kid).segments
    assert eng.stats().refusals["window"] == 1


@pytest.mark.parametrize("at", [3, 50, 75])
def test_commit_at_an_earlier_place(at: int) -> None:
    eng = windowed()
    s = grown(eng)
    before = eng.tokens(s)
    eng.commit(s, 1, [9, 8, 7], at=at)
    assert eng.tokens(s) == [*before[:at], 9, 8, 7]
    assert_same_as_cold(eng, s, 20)
    assert floor(eng, s) == 0 or floor(eng, s) <= at + 23 - WINDOW
    assert_nothing_left(eng)


def test_evicted_rows_come_back() -> None:
    eng = windowed()
    s = grown(eng)
    eng.commit(s, 1, [1, 2, 3])
    assert_same_as_cold(eng, s)
    state = core(eng)
    with state.lock:
        state.drop_rows(eng.tree(s), eng.tree(s).tip)
    eng.check()
    assert_same_as_cold(eng, s)
    assert floor(eng, s) > 40


def test_an_equal_prompt_takes_pages_of_one_that_moved_on() -> None:
    eng = windowed(prefix_index=True)
    s = grown(eng)
    again = eng.open(range(20, 40))
    assert again.cached_tokens == 16
    assert_same_as_cold(eng, again.id, 30)
    assert_same_as_cold(eng, s)
    assert core(eng).pool.live_pages - core(eng).pool.index_only <= 2 * (WINDOW // 4 + 3)
    assert_nothing_left(eng)


def test_stored_states_hold_the_tokens(tmp_path: Any) -> None:
    """Of a line that gave rows back no KV is stored; resume and restore compute it."""

    def reopen() -> tuple[Store, Engine]:
        store = Store(tmp_path, restore="always")
        backend = MockBackend(engine(page_size=16).config, window=WINDOW)
        return store, Engine(backend, store=store)

    prompt: Sequence[int] = [int(i) for i in np.arange(300) % 50]
    store, eng = reopen()
    s = eng.open(prompt, session="a").id
    eng.generate(s, 9, params=GO_ON)
    assert floor(eng, s) > 256
    eng.publish(s, name="here")
    text = eng.tokens(s)
    eng.shutdown()
    store.close()
    store, eng = reopen()
    eng.resume("a")
    assert eng.tokens("a") == text
    assert_same_as_cold(eng, "a")
    other = eng.restore("here")
    assert eng.tokens(other.id) == text
    assert_same_as_cold(eng, other.id)
    eng.shutdown()
    store.close()


@pytest.mark.parametrize("grows", ["append", "jump"])
@pytest.mark.parametrize("pages", [6, 64])
def test_a_question_is_answered_where_it_was_asked(grows: str, pages: int) -> None:
    """Also if text behind that place moves the window on, in a pool that holds no more than it."""

    class One:
        def allowed(self, generated: Sequence[int]) -> Sequence[int]:
            return [70] if len(generated) < 24 else []

    texts = {"a": [3, 4], "b": [5], "c": [3, 6]}
    prompt = [50 + i for i in range(30)]
    alone = windowed(capacity_pages=64)
    want = alone.choice_mass(alone.open(prompt).id, 1, texts)
    eng = windowed(capacity_pages=pages, prefill_chunk=5)
    s = eng.open(prompt, prefill=False).id
    task, probe = eng._ask(s, 1, forks({name: tuple(text) for name, text in texts.items()}))
    assert task is not None
    if grows == "append":
        eng.append(s, 1, [70] * 24)
    else:
        eng.start(s, 24, params=SamplingParams(constraint=One()))
    for _ in range(60):
        tick(eng)
    assert not probe.pending(), "it goes round and round"
    rows = {text: probe.rows[i] for i, text in enumerate(probe.texts)}
    assert choice_mass({name: tuple(text) for name, text in texts.items()}, rows) == want
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)
