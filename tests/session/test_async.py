"""The async twins: shared passes, cancellation, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from random import Random

import pytest

from forkserve import Engine, Session
from forkserve.aio import in_thread
from forkserve.engine import MockBackend
from forkserve.errors import BackendError, ConfigError, NodeError, SessionError
from tests.waiting import HANGS_S, at_rest, held, until, wait_for

Make = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No thread of ours watches on when nobody waits."""
    yield
    wait_for(lambda: not any(t.name == "forkserve-async" for t in threading.enumerate()))


def sizes(eng: Engine) -> list[int]:
    assert isinstance(eng.backend, MockBackend)
    return eng.backend.sizes  # type: ignore[attr-defined, no-any-return]


def only_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def decoding(eng: Engine, tokens: int = 3) -> None:
    """Wait until something has been decoded."""
    before = eng.stats().decode_steps
    while eng.stats().decode_steps < before + tokens:
        await asyncio.sleep(0.001)


async def drive(eng: Engine, s: Session) -> tuple[int, ...]:
    """A small agent: speculate, observe, speak, choose."""
    async with s.fork("tool", "<result>") as b, s.fork("err", "<error>") as e:
        b.speculate()
        e.speculate(priority=0.1)
        await asyncio.sleep(0)
        await b.acommit("seen")
    reply = await s.agenerate(8, ignore_eos=True)
    text = ""
    async with s.astream(8, ignore_eos=True) as stream:
        async for piece in stream:
            text += piece
    assert text == stream.reply.text
    return (*reply.tokens, *stream.reply.tokens)


async def test_twins_give_what_the_sync_face_gives(make: Make) -> None:
    eng, cold = make(seed=1), make(seed=1)
    async with eng.session("abc") as s:
        said = await drive(eng, s)
        tokens = s.tokens
    assert s.closed
    with cold.session("abc") as t:
        t.commit("<result>seen")
        assert t.generate(8, ignore_eos=True).tokens + t.generate(8, ignore_eos=True).tokens == said
        assert t.tokens == tokens
    assert only_task()


async def test_many_sessions_say_what_each_says_alone(make: Make) -> None:
    eng, cold = make(slow_ms=1), make()

    async def one(number: int) -> tuple[int, ...]:
        async with eng.session(f"prompt {number}") as s:
            return await drive(eng, s)

    said = await asyncio.gather(*(one(n) for n in range(50)))
    for number in (0, 17, 49):
        with cold.session(f"prompt {number}") as t:
            t.commit("<result>seen")
            assert t.generate(16, ignore_eos=True).tokens == said[number]


async def test_many_sessions_share_passes(make: Make) -> None:
    eng = make()

    async def one(number: int) -> str:
        async with eng.session(f"prompt {number}") as s, s.astream(8, ignore_eos=True) as stream:
            return "".join([piece async for piece in stream])

    with held(eng):
        tasks = [asyncio.create_task(one(n)) for n in range(50)]
        await until(lambda: eng.stats().queued == 50)
        sizes(eng).clear()
    assert len(set(await asyncio.gather(*tasks))) > 1
    assert sizes(eng) == [50] * 8, "8 tokens of 50 sessions: 400 passes one after the other"


async def test_tasks_on_branches_of_one_session(make: Make) -> None:
    eng = make()
    async with eng.session("abc", prefill=True) as s:
        branches = [s.fork(text=f"way {n}") for n in range(8)]
        with held(eng):
            tasks = [asyncio.create_task(b.agenerate(10, ignore_eos=True)) for b in branches]
            await until(lambda: eng.stats().queued == 8)
            sizes(eng).clear()
        replies = await asyncio.gather(*tasks)
        assert sizes(eng) == [8] * 10
        best = branches[3]
        result = await best.acommit()
        assert len(result.aborted) == 7
        assert s.tokens == [*b"abcway 3", *replies[3].tokens]


async def test_generate_many(make: Make) -> None:
    eng = make()
    async with eng.session("abc") as s:
        branches = [s.fork() for _ in range(4)]
        replies = await s.agenerate_many(branches, 6, temperature=1.0, seed=3)
    with eng.session("abc") as s:
        assert s.generate_many([s.fork() for _ in range(4)], 6, temperature=1.0, seed=3) == replies


async def test_join_promote_open_close(make: Make) -> None:
    eng = make()
    s = await Session.aopen(eng, "abc", prefill=True, session="named")
    assert (eng.stats().forward_passes, s.id) == (1, "named")
    joined = await s.ajoin([s.fork(text="1"), s.fork(text="2")], "concat", scaffold="=")
    assert (joined.text, s.text) == ("=12", "abc=12")
    assert joined.parent is not None
    other = await joined.parent.fork("other", "way").apromote()
    assert s.text == other.full_text == "abcway"
    result = await s.acommit("abcway!", full=True)
    assert s.tip.id == result.winner
    await s.aclose()
    await s.aclose()
    assert s.closed
    with pytest.raises(SessionError):
        await s.agenerate(1)
    with pytest.raises(ConfigError):
        await Session.aopen(eng, "")


async def test_errors_travel(make: Make) -> None:
    eng = make()
    assert isinstance(eng.backend, MockBackend)
    async with eng.session("abc") as s:
        dead = s.fork("b", "x")
        dead.abort()
        for call in (
            lambda: dead.agenerate(1),
            dead.acommit,
            dead.apromote,
            lambda: dead.astream(1).__anext__(),
            lambda: s.ajoin([dead]),
            lambda: s.agenerate_many([dead]),
        ):
            with pytest.raises(NodeError, match="dead"):
                await call()
        eng.backend.fail_next(ValueError("odd"))
        with pytest.raises(BackendError, match="odd"):
            await s.agenerate(2)
        eng.backend.fail_next(ValueError("odd"))
        with pytest.raises(BackendError, match="odd"):
            [piece async for piece in s.astream(2)]
        assert len((await s.agenerate(2)).tokens) == 2


async def test_an_exception_leaves_nothing(make: Make) -> None:
    eng = make()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with eng.session("abc") as s, s.fork("b", "x") as b:
            await b.agenerate(3)
            raise ZeroDivisionError
    assert s.closed
    assert not b.alive


async def test_shutdown_reaches_those_who_wait(make: Make) -> None:
    eng = make(slow_ms=1)
    s = eng.session("abc")
    tasks = [asyncio.create_task(s.fork(text=t).agenerate(5000, ignore_eos=True)) for t in "xy"]
    await decoding(eng)
    await asyncio.to_thread(eng.shutdown)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, BackendError)


# --- streams ----------------------------------------------------------------------------------


async def test_stream_of_characters_and_stop_strings(make: Make) -> None:
    text = "naïve ☃ 🌨 and so on"
    eng = make(text, text)
    async with eng.session("abc") as s:
        pieces = [piece async for piece in s.astream(100)]
        assert "".join(pieces) == text
        assert all(pieces)
        stream = s.astream(100, stop=(" and",))
        assert "".join([piece async for piece in stream]) == "naïve ☃ 🌨"
        assert stream.reply.finish_reason == "stop"
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()


@pytest.mark.parametrize("how", ["aclose", "with", "drop"])
async def test_leaving_a_stream_early(make: Make, cancels: list[int], how: str) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        if how == "aclose":
            stream = s.astream(500, ignore_eos=True)
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
        elif how == "with":
            async with s.astream(500, ignore_eos=True) as stream:
                await anext(stream)
        else:
            async for _ in s.astream(500, ignore_eos=True):
                break
            gc.collect()
        await s.acommit("on")
        assert len(s.tokens) < 500
        assert len(cancels) <= 1
        assert only_task(), "no task of ours was left to end it"
        assert len((await s.agenerate(2)).tokens) == 2


# --- cancellation -----------------------------------------------------------------------------


async def many(s: Session) -> object:
    return await s.agenerate_many([s.fork(text="x")], 5000, ignore_eos=True)


async def pieces(s: Session) -> object:
    return [piece async for piece in s.astream(5000, ignore_eos=True)]


@pytest.mark.parametrize(
    "work", [lambda s: s.agenerate(5000, ignore_eos=True), many, pieces], ids=["one", "many", "str"]
)
async def test_cancelling_twice_cancels_once(
    make: Make, cancels: list[int], work: Callable[[Session], Awaitable[object]]
) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        task = asyncio.ensure_future(work(s))
        await decoding(eng)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        task.cancel()
        assert len(cancels) == 1
        assert eng.stats().queued == 0
        assert only_task()
        steps = eng.stats().decode_steps
        await asyncio.sleep(0.02)
        assert eng.stats().decode_steps <= steps
        assert len((await s.agenerate(2)).tokens) == 2


async def test_cancelling_one_leaves_the_others(make: Make, cancels: list[int]) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        a, b = s.fork("a", "x"), s.fork("b", "y")
        one = asyncio.create_task(a.agenerate(5000, ignore_eos=True))
        other = asyncio.create_task(b.agenerate(50, ignore_eos=True))
        await decoding(eng)
        one.cancel()
        assert len((await other).tokens) == 50
        assert one.cancelled()
        assert len(cancels) == 1


async def test_timeout(make: Make, cancels: list[int]) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await s.agenerate(5000, ignore_eos=True)
        assert len(cancels) == 1
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(s.fork(text=t).agenerate(5)) for t in "xyz"]
        assert all(task.result().tokens for task in tasks)


async def test_cancelling_before_it_starts(make: Make, cancels: list[int]) -> None:
    eng = make()
    async with eng.session("abc") as s:
        task = asyncio.create_task(s.agenerate(50))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancels == []
        async with s._turn():
            task = asyncio.create_task(s.agenerate(50))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()
        assert eng.stats().queued == 0
        s.commit("free again")


async def test_a_verb_ends_before_its_cancellation_goes_on(make: Make) -> None:
    eng = make(slow_ms=20)
    async with eng.session("abc") as s:
        b = s.fork("b", "x")
        task = asyncio.create_task(b.acommit())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b.alive
        assert s.text == ("abcx" if b.committed else "abc")


async def test_an_open_that_was_cancelled_is_closed(make: Make) -> None:
    eng = make()
    inside, go = threading.Event(), threading.Event()

    def hold(batch: object) -> None:
        inside.set()
        assert go.wait(HANGS_S)

    assert isinstance(eng.backend, MockBackend)
    eng.backend._on_batch = hold
    task = asyncio.create_task(Session.aopen(eng, "abc", prefill=True))
    await until(inside.is_set)
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert eng.sessions() == []


async def test_in_thread_takes_errors_along() -> None:
    inside, go = threading.Event(), threading.Event()

    def fail() -> None:
        inside.set()
        assert go.wait(HANGS_S)
        raise ZeroDivisionError

    go.set()
    with pytest.raises(ZeroDivisionError):
        await in_thread(fail)
    go.clear()
    inside.clear()
    task = asyncio.create_task(in_thread(fail))
    await until(inside.is_set)
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_random_cancels_leak_nothing(make: Make) -> None:
    eng = make()
    random = Random(1)

    async def one(number: int) -> None:
        async with eng.session(f"prompt {number}") as s:
            while True:
                async with s.fork("a", "x" * 10) as a, s.fork("b", "y") as b:
                    a.speculate()
                    await b.agenerate(3)
                    await asyncio.sleep(0)
                    await random.choice([a, b]).acommit()
                async for _ in s.astream(5):
                    pass

    tasks = [asyncio.create_task(one(n)) for n in range(40)]
    while alive := [task for task in tasks if not task.done()]:
        await asyncio.sleep(random.uniform(0, 0.004))
        random.choice(alive).cancel()
        eng.check()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(o, asyncio.CancelledError) for o in outcomes), outcomes
    assert eng.sessions() == []
    at_rest(eng)
    assert (eng.stats().live_pages, eng.stats().queued) == (0, 0)


# --- loops ------------------------------------------------------------------------------------


def test_one_session_in_one_loop_after_the_other(make: Make) -> None:
    eng = make()
    s = eng.session("abc")

    async def two() -> tuple[object, object]:
        return await asyncio.gather(s.fork(text="a").agenerate(5), s.fork(text="b").agenerate(5))

    assert len(asyncio.run(two())) == 2
    assert len(asyncio.run(two())) == 2
    s.generate(2)


def test_loops_in_several_threads_share_passes(make: Make) -> None:
    eng = make()

    async def one(number: int) -> None:
        async with eng.session(f"abc {number}") as s:
            assert len((await s.agenerate(30, ignore_eos=True)).tokens) == 30

    def sync() -> None:
        with eng.session("sync") as s:
            s.generate(30, ignore_eos=True)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(one(n))) for n in range(4)]
    threads.append(threading.Thread(target=sync))
    with held(eng):
        for thread in threads:
            thread.start()
        wait_for(lambda: eng.stats().queued == 5)
        sizes(eng).clear()
    for thread in threads:
        thread.join()
    assert sizes(eng) == [5] * 30


async def test_choosing_ends_attempts_that_still_generate(make: Make) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        a, b = s.fork("a", "x").attempt(), s.fork("b", "y")
        task = asyncio.create_task(b.agenerate(5000, ignore_eos=True))
        await decoding(eng)
        assert (await a.acommit()).aborted == (b.id,)
        assert (await task).finish_reason == "cancelled"
        assert (b.alive, s.text) == (False, "abcx")


async def test_commit_on_one_attempt_while_another_generates(make: Make) -> None:
    eng = make(slow_ms=1)
    async with eng.session("abc") as s:
        a, b = s.fork("a", "x").attempt(), s.fork("b", "y")
        task = asyncio.create_task(b.agenerate(100, ignore_eos=True))
        await decoding(eng)
        await a.acommit("seen")
        reply = await task
        assert a.text == "xseen"
        assert b.tokens == [*b"y", *reply.tokens]
