"""Replies, streams, several branches at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forkserve import Branch, Engine, NodeMode, SamplingParams
from forkserve.engine import MockBackend
from forkserve.errors import (
    BackendError,
    ConfigError,
    ContextOverflow,
    NodeError,
    OutOfPages,
    SessionError,
)
from forkserve.types import Tokens, derive_seed
from tests.waiting import held, wait_for

Make = Callable[..., Engine]
EOS = 259
SNOW = "naïve ☃ snow \N{SNOWMAN WITHOUT SNOW} 🌨!"


def mock(eng: Engine) -> MockBackend:
    assert isinstance(eng.backend, MockBackend)
    return eng.backend


# --- replies ----------------------------------------------------------------------------------


def test_reply(make: Make) -> None:
    eng = make("hello", "again")
    with eng.session("abc") as s:
        reply = s.generate()
        assert str(reply) == reply.text == "hello"
        assert reply.tokens == (*b"hello", EOS)
        assert (reply.finish_reason, reply.logprobs) == ("eos", ())
        assert s.text == "abchello<|eos|>"
        reply = s.tip.generate(3, logprobs=True)
        assert (reply.text, reply.finish_reason, len(reply.logprobs)) == ("aga", "length", 3)
        with pytest.raises(AttributeError):
            reply.text = "no"  # type: ignore[misc]
        assert s.generate(0).tokens == ()


def test_sampling_by_params_and_by_name(eng: Engine) -> None:
    hot = SamplingParams(temperature=1.0, seed=5)
    replies = []
    for options in (
        {"params": hot},
        {"temperature": 1.0, "seed": 5},
        {"params": hot, "seed": 6},
        {"temperature": 1.0, "seed": 6},
        {},
    ):
        with eng.session("abc") as s:
            replies.append(s.generate(20, **options).tokens)
    a, b, c, d, greedy = replies
    assert a == b != c == d != greedy
    with eng.session("abc") as s:
        with pytest.raises(ConfigError, match="top_p"):
            s.generate(1, top_p=2.0)
        branch = s.fork("b")
        for call in (
            s.generate,
            s.stream,
            branch.generate,
            lambda n, **options: s.generate_many([branch], n, **options),
        ):
            with pytest.raises(ConfigError, match=r"'temprature'.*did you mean 'temperature'"):
                call(1, temprature=2.0)
            with pytest.raises(ConfigError, match="must be SamplingParams, not dict"):
                call(1, params={"seed": 1})  # type: ignore[arg-type]
        assert branch.mode is NodeMode.SPEC
        with pytest.raises(ConfigError, match="max_tokens"):
            s.generate(-1)


def test_stop_strings_end_the_text_but_stay_in_the_tree(make: Make) -> None:
    eng = make("Thought: x\nObservation: y")
    with eng.session("abc") as s:
        reply = s.generate(100, stop=("\nObservation:",))
        assert (reply.text, reply.finish_reason) == ("Thought: x", "stop")
        assert s.text == "abcThought: x\nObservation:"


def test_a_speculative_branch_becomes_an_attempt(make: Make) -> None:
    eng = make("one", "two")
    with eng.session("abc") as s:
        a, b = s.fork("a", "?"), s.fork("b", "!")
        assert (a.generate(9).text, b.generate(9).text) == ("one", "two")
        assert (a.text, b.text, s.text) == ("?one<|eos|>", "!two<|eos|>", "abc")


def test_errors_of_the_engine_arrive(make: Make) -> None:
    eng = make(max_context=16)
    with eng.session("abc") as s:
        assert s.generate(100, ignore_eos=True).finish_reason == "context"
        with pytest.raises(ContextOverflow):
            s.generate(1)
        with pytest.raises(ContextOverflow):
            s.append("x")
    eng = make(capacity_pages=4)
    with eng.session("abc") as s:
        with pytest.raises(OutOfPages):
            s.generate(100, ignore_eos=True)
        with pytest.raises(OutOfPages):
            "".join(s.fork("b", "x" * 16).stream(9, ignore_eos=True))
    eng = make()
    with eng.session("abc") as s:
        mock(eng).fail_next()
        with pytest.raises(BackendError):
            s.generate(3)
        mock(eng).fail_next(ValueError("odd"))
        stream = s.stream(3)
        with pytest.raises(BackendError, match="odd"):
            next(stream)
        with pytest.raises(StopIteration):
            next(stream)
        assert stream.reply.finish_reason == "error"
        assert len(s.generate(3).tokens) == 3


# --- streams ----------------------------------------------------------------------------------


def test_stream_gives_whole_characters(make: Make) -> None:
    eng = make(SNOW, SNOW)
    with eng.session("abc") as s, eng.session("abc") as t:
        stream = s.stream(100)
        assert stream.reply.finish_reason is None
        pieces = list(stream)
        assert "".join(pieces) == SNOW
        assert "\ufffd" not in "".join(pieces)
        assert all(pieces)
        assert stream.reply == t.generate(100)
        assert list(stream) == []


def test_stream_never_shows_a_stop_string(make: Make) -> None:
    eng = make("one STOX two STOP three")
    with eng.session("abc") as s:
        shown = ""
        for piece in (stream := s.stream(100, stop=("STOP",))):
            shown += piece
            assert "STO" not in shown.replace("STOX", "")
        assert shown == stream.reply.text == "one STOX two "
        assert stream.reply.finish_reason == "stop"


def test_an_unfinished_character_at_the_end(make: Make) -> None:
    """It comes with the next text, whole."""
    cut = len("naïve ".encode()) + 1
    eng = make(SNOW, list(SNOW.encode()[cut:]))
    with eng.session("abc") as s:
        assert "".join(s.stream(cut)) == "naïve "
        assert "".join(s.stream(100)) == SNOW.removeprefix("naïve ")


def test_stream_starts_when_it_is_asked(make: Make) -> None:
    eng = make("hi")
    with eng.session("abc") as s:
        unused = s.stream(5)
        assert s.generate(5).text == "hi"
        unused.close()
        assert list(unused) == []
        dead = s.fork("b", "x")
        stream = dead.stream(5)
        dead.abort()
        with pytest.raises(NodeError, match="dead"):
            next(stream)


@pytest.mark.parametrize("how", ["close", "with", "error", "drop"])
def test_leaving_a_stream_early_cancels_it(make: Make, cancels: list[int], how: str) -> None:
    eng = make(slow_ms=1)
    with eng.session("abc") as s:
        if how == "close":
            stream = s.stream(500, ignore_eos=True)
            next(stream)
            stream.close()
            stream.close()
            assert stream.reply.finish_reason == "cancelled"
        elif how == "with":
            with s.stream(500, ignore_eos=True) as stream:
                next(stream)
        elif how == "error":
            stream = s.stream(500, ignore_eos=True)
            with pytest.raises(ZeroDivisionError), stream:  # noqa: PT012
                next(stream)
                raise ZeroDivisionError
        else:
            for _ in s.stream(500, ignore_eos=True):
                break
        s.commit("and on")
        assert len(cancels) == (1 if how != "drop" else len(cancels))
        assert s.text.endswith("and on")
        assert len(s.tokens) < 500
        assert s.generate(2).finish_reason == "length"


def test_a_dropped_stream_that_is_part_of_a_cycle(make: Make) -> None:
    """Its finalizer runs wherever the collector runs, and must not touch the engine there."""
    eng = make(slow_ms=1)
    with eng.session("abc") as s:
        box: list[object] = [s.stream(500, ignore_eos=True)]
        box.append(box)
        next(box[0])  # type: ignore[call-overload]
        del box
        with eng._core.lock:
            gc.collect()
        if eng.config.background:
            wait_for(lambda: not eng.stats().queued, "it ends by itself")
        assert len(s.tokens) < 500
        s.commit("x")


@pytest.mark.parametrize("why", ["error", "pages"])
def test_a_dropped_stream_ends_whatever_happened_in_its_passes(make: Make, why: str) -> None:
    """Errors raised in a pass hold the frames of the one who drove it: not the stream as well."""

    class Fails:
        def allowed(self, generated: Tokens) -> None:
            if generated:
                raise ValueError(generated)

    eng = make(slow_ms=1, capacity_pages=256, prefix_index=why == "pages")
    gc.disable()
    try:
        for number in range(20 if why == "pages" else 0):  # what they leave has to make room
            eng.session(f"{number:060}"[::-1], prefill=True).close()
        with eng.session("abc") as s, eng.session("d") as other:
            if why == "error":
                failed = eng.start(other.id, 5, params=SamplingParams(constraint=Fails()))
            stream = s.stream(500, ignore_eos=True)
            for _ in range(8):
                next(stream)
            if why == "error":
                assert isinstance(failed.error, ValueError)
            del stream
            s.commit("and on")
            assert s.text.endswith("and on")
    finally:
        gc.enable()


def test_streams_side_by_side_share_passes(make: Make) -> None:
    eng = make()
    with eng.session("abc") as s:
        branches = [s.fork(text=t) for t in "xyz"]
        streams = [b.stream(8, ignore_eos=True) for b in branches]
        texts = ["", "", ""]
        while any(stream.reply.finish_reason is None for stream in streams):
            for number, stream in enumerate(streams):
                texts[number] += next(stream, "")
        for text, branch, stream in zip(texts, branches, streams, strict=True):
            assert text + "".join(stream) == stream.reply.text
            assert branch.tokens[1:] == list(stream.reply.tokens)
        if not eng.config.background:
            assert max(mock(eng).sizes) == 3  # type: ignore[attr-defined]


# --- several at once --------------------------------------------------------------------------


def test_generate_many_is_one_batch_and_the_same_as_one_by_one(make: Make) -> None:
    eng = make()
    with eng.session("abc", prefill=True, seed=1) as s:
        branches = [s.fork(text=f"way {n}") for n in range(5)]
        mock(eng).sizes.clear()  # type: ignore[attr-defined]
        replies = s.generate_many(branches, 10, temperature=0.8, seed=7, ignore_eos=True)
        if not eng.config.background:
            assert mock(eng).sizes == [5] * 10  # type: ignore[attr-defined]
    for number, reply in enumerate(replies):
        with eng.session(f"abcway {number}") as t:
            seed = derive_seed(7, number)
            cold = t.generate(10, temperature=0.8, seed=seed, ignore_eos=True)
            assert cold == reply


def test_generate_many_draws_differently_on_equal_branches(eng: Engine) -> None:
    with eng.session("abc", seed=1) as s:
        branches = [s.fork() for _ in range(4)]
        replies = s.generate_many(branches, 10, temperature=1.0)
        assert len({reply.tokens for reply in replies}) == 4
        branches[2].commit()
        assert s.tokens[3:] == list(replies[2].tokens)
        assert [b.alive for b in branches] == [False, False, True, False]
        assert s.generate_many([]) == []
        assert s.generate_many([s.tip], 2)[0].tokens == tuple(s.tokens[-2:])


def test_generate_many_with_a_dead_branch_starts_nothing(eng: Engine) -> None:
    with eng.session("abc") as s:
        a, b = s.fork("a", "1"), s.fork("b", "2")
        b.abort()
        with pytest.raises(NodeError, match="dead"):
            s.generate_many([a, b], 5)
        assert a.text == "1"
        assert eng.stats().queued == 0
        a.commit()


def test_generate_many_cancels_the_others_when_one_cannot_start(make: Make) -> None:
    eng = make(slow_ms=1)
    with eng.session("abc") as s:
        a, b = s.fork("a", "1"), s.fork("b", "2")
        b.speculate(guess="3", q=1.0)
        with pytest.raises(NodeError, match="guess"):
            s.generate_many([a, b], 500, ignore_eos=True)
        assert len(a.tokens) < 500
        a.commit()


def test_threads_on_branches_of_one_session(make: Make) -> None:
    eng = make()
    with eng.session("abc") as s:
        branches = [s.fork(text=f"way {n}") for n in range(6)]
        replies: dict[int, tuple[int, ...]] = {}

        def work(number: int) -> None:
            replies[number] = branches[number].generate(10, ignore_eos=True).tokens

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, branch in enumerate(branches):
            assert branch.tokens == [*f"way {number}".encode(), *replies[number]]


def test_threads_that_go_on_with_branches_of_their_own(make: Make) -> None:
    eng = make(slow_ms=1)
    with eng.session("abc") as s:
        branches = [s.fork(text=f"way {n}") for n in range(6)]
        errors: list[Exception] = []

        def work(branch: Branch) -> None:
            try:
                for turn in range(5):
                    branch.generate(3, ignore_eos=True)
                    branch.commit(f"seen {turn}")
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(branch,)) for branch in branches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert all(branch.text.endswith("seen 4") for branch in branches)


def test_closing_while_another_thread_waits(make: Make) -> None:
    eng = make(slow_ms=2)
    s = eng.session("abc")
    errors = []

    def work() -> None:
        try:
            s.generate(1000, ignore_eos=True)
        except SessionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: eng.stats().decode_steps)
    s.close()
    thread.join()
    assert "closed" in errors[0]


# ---------------------------------------------------------------- n attempts


def test_attempts_decode_in_shared_passes_and_one_wins(make: Make) -> None:
    eng = make()
    with eng.session("a prompt of some length") as s:
        s.generate(1)
        ways = s.attempts(5, "way")
        assert [way.name for way in ways] == ["way1", "way2", "way3", "way4", "way5"]
        before = eng.stats().forward_passes
        with ThreadPoolExecutor(1) as pool, held(eng):
            saying = pool.submit(s.generate_many, ways, 6, temperature=1.0, ignore_eos=True)
            wait_for(lambda: eng.stats().queued == 5)
        replies = saying.result()
        assert eng.stats().forward_passes - before <= 7
        assert len({reply.tokens for reply in replies}) == 5
        below = ways[2].attempts(2)
        more = s.generate_many(below, 2, temperature=1.0, ignore_eos=True)
        assert more[0].tokens != more[1].tokens
        below[1].commit()
        ways[2].commit()
        assert not any(way.alive for way in ways[:2] + ways[3:])
        assert s.tokens[-8:] == [*replies[2].tokens, *more[1].tokens]
        eng.check()


def test_attempts_draw_the_same_in_another_engine(make: Make) -> None:
    def run() -> list[tuple[int, ...]]:
        with make().session("prompt", seed=5) as s:
            return [r.tokens for r in s.generate_many(s.attempts(3), 5, temperature=1.0)]

    assert run() == run()


def test_a_line_draws_from_the_seed_that_is_documented(make: Make) -> None:
    """The main line from the session's, the attempt on line i from ``derive_seed(seed, i)``."""

    def alone(seed: int) -> tuple[int, ...]:
        with make().session("prompt") as fresh:
            return fresh.generate(8, temperature=1.0, seed=seed).tokens

    with make().session("prompt", seed=5) as s:
        ways = s.attempts(3)
        replies = s.generate_many(ways, 8, temperature=1.0)
        assert [s._tree.get(way.tip).line for way in ways] == [1, 2, 3]
        assert [r.tokens for r in replies] == [alone(derive_seed(5, i)) for i in (1, 2, 3)]
        assert s.generate(8, temperature=1.0).tokens == alone(5)
    assert len({r.tokens for r in replies}) == 3


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_attempts_of_a_wrong_number(eng: Engine, n: Any) -> None:
    with eng.session("prompt") as s:
        with pytest.raises(ConfigError, match="n="):
            s.attempts(n)
        assert s.tip.children == []
