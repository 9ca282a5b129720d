"""Publish and restore through the engine: off the token path, and never a wrong token."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import NodeError, SessionError, StoreError
from forkserve.store import Store, faults
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S, wait_for

from .engines import PROMPT, cold, crash, engine

WHOLE = len(PROMPT) // 256 * 256  # 512


def published(folder: Path, **config: Any) -> None:
    eng = engine(folder, **config)
    eng.open(PROMPT, session="a")
    assert eng.publish("a", name="start").tokens == WHOLE
    eng.shutdown()


def test_only_committed_states_are_published_under_free_and_sane_names(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    with pytest.raises(NodeError, match="speculative"):
        eng.publish("a", eng.fork("a", h.tip, "guess", [1]))
    eng.publish("a", name="one")
    with pytest.raises(StoreError, match="taken"):
        eng.publish("a", name="one")
    for name in ("", "x" * 600, "a\nb"):
        with pytest.raises(StoreError, match="no name"):
            eng.publish("a", name=name)
    with pytest.raises(StoreError, match="no state named 'two'"):
        eng.restore("two")
    with pytest.raises(SessionError, match="open already"):
        eng.restore("one", session="a")
    again = eng.publish("a", name="again").wait()
    assert (again.written, again.known) == (0, 2), "equal chunks are stored once"
    eng.shutdown()


def test_missing_rows_of_whole_chunks_are_computed_first(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT[:250], session="a", prefill=False)
    eng.commit("a", h.tip, PROMPT[250:530])
    assert eng.publish("a").tokens == 512
    eng.commit("a", h.tip, PROMPT[530:])
    assert eng.publish("a", wait=False).wait().known == 2
    eng.shutdown()


# -------------------------------------------------------------------- off the token path


def test_a_full_queue_drops_and_delays_nobody(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hook(point: str) -> None:
        if point == "publish.captured":
            entered.set()
            gate.wait(HANGS_S)

    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    faults.hook = hook
    first = eng.publish("a", wait=False)
    assert entered.wait(HANGS_S)
    queued = [eng.publish("a", wait=False) for _ in range(2)]
    dropped = eng.publish("a", wait=False)
    assert not dropped.accepted
    assert dropped.reason == "the queue is full"
    with pytest.raises(StoreError, match="queue is full"):
        dropped.wait()
    assert eng.generate("a", 5) == cold(PROMPT, 5), "a publish that hangs holds up no token"
    assert not first.done, "nobody waited for it"
    eng.close("a")  # its pages stay pinned until they are captured
    gate.set()
    assert first.wait(HANGS_S).written == 2
    assert [q.wait(HANGS_S).written for q in queued] == [0, 0]
    assert eng.store is not None
    assert eng.store.health()["dropped"] == 1
    eng.check()
    eng._core.index.clear()
    assert not any(eng._core.pool.pins)
    assert eng._core.pool.live_pages == 0
    eng.shutdown()


def test_captures_that_wait_give_their_pages_back_when_tokens_need_them(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hook(point: str) -> None:
        if point == "publish.captured":
            entered.set()
            gate.wait(HANGS_S)

    eng = engine(tmp_path, page_size=16, capacity_pages=100, prefix_index=False)
    for name in "ab":
        eng.open(PROMPT, session=name, salt=name)
    faults.hook = hook
    running = eng.publish("a", wait=False)
    assert entered.wait(HANGS_S)
    waiting = eng.publish("b", wait=False)
    for name in "ab":
        eng.close(name)  # both still hold the pages of 512 rows
    assert eng.store is not None
    publisher = eng.store.publisher

    def let_go() -> None:
        wait_for(lambda: publisher.dropped)
        gate.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    h = eng.open(PROMPT[::-1] + PROMPT[:700], salt="c")  # 88 of 100 pages
    assert eng.generate(h.id, 3) == cold(PROMPT[::-1] + PROMPT[:700], 3)
    assert running.wait(HANGS_S).written == 2
    with pytest.raises(StoreError, match="needed for tokens"):
        waiting.wait(HANGS_S)
    helper.join()
    eng.check()
    eng.shutdown()


def test_a_restore_takes_the_pages_of_captures_that_only_wait(tmp_path: Path) -> None:
    published(tmp_path)
    with Store(tmp_path, restore="always") as store:
        eng = engine(store, page_size=16, capacity_pages=60, prefix_index=False)
        eng.open(PROMPT[::-1], session="b", salt="b")
        real, store.publisher._start = store.publisher._start, lambda: None
        waiting = eng.publish("b", wait=False)
        assert waiting.accepted
        eng.close("b")  # 32 of 60 pages are held by the capture alone
        assert eng.resume("a").cached_tokens == WHOLE
        store.publisher._start = real
        store.publisher._start()
        with pytest.raises(StoreError, match="needed for tokens"):
            waiting.wait(HANGS_S)
        assert eng.generate("a", 3) == cold(PROMPT, 3)
        eng.check()
        eng.shutdown()


def test_publish_and_restore_beside_a_running_engine(tmp_path: Path) -> None:
    published(tmp_path)
    eng = engine(tmp_path, background=True, prefix_index=False, page_size=4, capacity_pages=4096)
    base = [eng.open([*PROMPT[:300], n], session=f"d{n}") for n in range(3)]
    running = [eng.start(h.id, 60) for h in base]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(4):
                name = f"w{number}-{turn}"
                h = eng.open([*PROMPT, number, turn], session=name)
                assert h.cached_tokens >= WHOLE
                eng.commit(name, h.tip, PROMPT[:100])
                eng.publish(name, wait=bool(turn % 2))
                history = eng.tokens(name)
                assert eng.generate(name, 4) == cold(history, 4)
                eng.close(name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for n, generation in enumerate(running):
        assert generation.result() == cold([*PROMPT[:300], n], 60)
    eng.check()
    assert eng.store is not None
    assert verify(eng.store.vault).clean
    eng.shutdown()


def test_a_crash_in_the_middle_of_a_publish_costs_the_publish_only(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    text = eng.tokens("a")
    crash(eng)
    eng = engine(tmp_path)
    assert eng.resume("a").cached_tokens == 0
    assert eng.tokens("a") == text
    eng.shutdown()
