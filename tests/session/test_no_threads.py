"""A system that gives no thread, and a forked process, in which those of its parent are not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forkserve import Engine, ForkServeConfig, aio
from forkserve.engine import MockBackend
from forkserve.errors import BackendError, StoreError
from tests.waiting import HANGS_S


class Limit:
    """How many threads may still be started; None: all."""

    left: int | None = None


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """Threads are refused as Python does it where the system has none."""
    limit, start = Limit(), threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if limit.left is not None:
            if limit.left < 1:
                raise RuntimeError("can't start new thread")
            limit.left -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    aio._pool.cache_clear()  # one that has no thread yet
    yield limit
    limit.left = None
    aio._pool.cache_clear()


def engine(store: Path | None = None, *, background: bool = False) -> Engine:
    config = ForkServeConfig(page_size=8, capacity_pages=256, background=background)
    return Engine(MockBackend(config), store=store)


def test_an_engine_without_a_thread_for_its_loop(limit: Limit) -> None:
    backend = MockBackend(ForkServeConfig(background=True))
    limit.left = 0
    with pytest.raises(BackendError, match=r"no thread for 'forkserve-loop'.*ulimit -u"):
        Engine(backend)
    limit.left = None
    Engine(backend).shutdown()


def test_a_verb_that_got_no_thread_never_happens(limit: Limit) -> None:
    async def opened(eng: Engine) -> None:
        with pytest.raises(BackendError, match="no thread for 'forkserve-verb'"):
            await eng.asession([1, 2, 3], session="a")
        assert eng.sessions() == []
        limit.left = None  # the next one's thread looks into the same queue
        s = await eng.asession([1, 2, 3], session="a", prefill=True)
        assert (await s.agenerate(2)).tokens
        assert eng.sessions() == ["a"]

    with engine() as eng:
        limit.left = 0
        asyncio.run(opened(eng))
        eng.check()


def test_a_verb_goes_to_the_threads_that_are_there(limit: Limit) -> None:
    """The pool wants another thread and gets none; one that has nothing to do takes the work."""

    class Pool(ThreadPoolExecutor):
        def submit(self, work, /, *args, **options):  # type: ignore[no-untyped-def]
            future = super().submit(work, *args, **options)
            future.result(HANGS_S)
            raise RuntimeError("can't start new thread")

    with engine() as eng, Pool(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio, "_pool", lambda: pool)
        assert asyncio.run(eng.asession([1, 2, 3], session="a")).id == "a"


def test_a_generation_that_nobody_can_watch_is_cancelled(limit: Limit, cancels: list[int]) -> None:
    async def speak(eng: Engine) -> None:
        s = await eng.asession([1, 2, 3])
        limit.left = 0
        with pytest.raises(BackendError, match="no thread for 'forkserve-async'"):
            await s.agenerate(5)
        limit.left = None
        assert (await s.agenerate(2)).tokens

    with engine() as eng:
        asyncio.run(speak(eng))
        assert len(cancels) == 1
        eng.check()


@pytest.mark.parametrize("background", [False, True])
def test_a_store_whose_threads_do_not_come(limit: Limit, tmp_path: Path, background: bool) -> None:
    """Publishing is refused and says why; tokens go on, and all of them are there afterwards."""
    prompt = [i % 250 for i in range(300)]
    eng = engine(tmp_path, background=background)
    limit.left = 0
    s = eng.open(prompt, session="a").id
    running = eng.start(s, 3)
    eng._loop.run_until(lambda: running.done)  # nobody who waits for it writes it down
    assert not eng.publish(s, wait=False).accepted
    with pytest.raises(StoreError, match="nothing was published: no thread for 'forkserve-publish"):
        eng.publish(s, name="n")
    assert eng.store is not None
    assert eng.store.publisher.dropped == 2
    limit.left = None
    eng.publish(s, name="n").wait()
    tokens = eng.tokens(s)
    eng.shutdown()
    with engine(tmp_path) as again:
        again.resume("a")
        assert again.tokens("a") == tokens
        assert again.restore("n").id


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_coroutines_in_a_forked_process() -> None:
    async def speak(eng: Engine) -> tuple[int, ...]:
        s = await eng.asession([1, 2, 3], prefill=True)
        reply = await s.agenerate(3)
        await s.acommit([5, 6])
        return reply.tokens

    with engine(background=True) as eng:
        want = asyncio.run(speak(eng))
        with eng._core.lock:  # as the loop of the parent may hold it at that moment
            pid = os.fork()
            if pid == 0:  # no assertion here: pytest's copy must not go on
                wrong = 1
                try:
                    threading.Timer(HANGS_S, os._exit, [2]).start()
                    with engine(background=True) as own:
                        wrong = int(asyncio.run(speak(own)) != want)
                finally:
                    os._exit(wrong)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_leaves_its_parents_engine_alone(tmp_path: Path) -> None:
    """Also if another thread held the engine's lock: no thread is left that would let go of it."""
    eng = engine(tmp_path, background=True)
    s = eng.open([1, 2, 3], session="a").id
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with eng._core.lock:
            locked.set()
            assert done.wait(HANGS_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(HANGS_S)
    pid = os.fork()
    if pid == 0:
        wrong = 1
        try:
            threading.Timer(HANGS_S, os._exit, [2]).start()
            eng.shutdown()
            eng._loop.retire()
            wrong = 0
        finally:
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    done.set()
    holder.join(HANGS_S)
    eng.commit(s, eng.tip(s), [4, 5])
    tokens = eng.tokens(s)
    eng.shutdown()
    with engine(tmp_path) as again:
        again.resume("a")
        assert again.tokens("a") == tokens
