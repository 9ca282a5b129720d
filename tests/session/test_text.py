"""Streamed text beside the full decode: characters split over tokens, commits and forks."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine, ForkServeConfig, Session
from forkserve.engine import MockBackend
from forkserve.reply import Reply

Make = Callable[..., Engine]
LETTERS = "aé語🙂 \n"
RAW = st.lists(
    st.one_of(st.integers(0, 255), st.sampled_from([256, 257, 258, 700])), min_size=1, max_size=8
)


def engine(*replies: str | list[int]) -> Engine:
    return Engine(MockBackend(ForkServeConfig(page_size=4, capacity_pages=256), replies=replies))


def decode(eng: Engine, tokens: list[int]) -> bytes:
    return eng.backend.tokenizer.decode_bytes(tokens, skip_special=True)


def whole(data: bytes) -> str:
    """The decode of the bytes without a character at their end that is not all there."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@settings(max_examples=60)
@given(st.text(LETTERS, min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 20))
def test_pieces_across_generations_and_a_fork(text: str, first: int, second: int) -> None:
    """A generation, a fork in mid-character, another generation: nothing is lost or broken."""
    data = list(text.encode())
    first = min(first, len(data))
    eng = engine(data[:first], data[first:], data[first:])
    with eng.session("prompt: ") as s:
        begin = s.generate(first)
        fork = s.attempts(1)[0]
        with s.stream(len(data) - first or 1) as stream:
            pieces = list(stream)
        other = fork.generate(len(data) - first or 1)
        assert "".join(pieces) == stream.reply.text
        if first < len(data):
            assert begin.text + other.text == begin.text + stream.reply.text == text
            assert all("\ufffd" not in piece for piece in [begin.text, *pieces])
        assert s.text == "prompt: " + text + ("<|eos|>" if first == len(data) else "")


@settings(max_examples=60)
@given(RAW, RAW, st.integers(0, 20))
def test_any_tokens_concatenate_to_the_full_decode(
    prompt: list[int], reply: list[int], cut: int
) -> None:
    """Bytes that are no text, special tokens and ids without text in between."""
    cut = min(cut, len(reply) - 1)
    eng = engine(reply[:cut] or [0], reply[cut:])
    with eng.session(prompt) as s:
        shown = whole(decode(eng, prompt))
        if cut:
            shown += s.generate(cut, ignore_eos=True).text
        else:
            eng.backend._replies.pop(0)  # type: ignore[attr-defined]
        with s.stream(len(reply) - cut, ignore_eos=True) as stream:
            pieces = list(stream)
        assert "".join(pieces) == stream.reply.text
        assert shown + stream.reply.text == whole(decode(eng, prompt + reply))


class Ends:
    """A constraint after which nothing may follow."""

    def allowed(self, generated: Sequence[int]) -> Sequence[int] | None:
        return [] if len(generated) == HALF else None


HALF = len(b"A") + 2  # and half of a character of four bytes
REST = [*"🙂".encode()[2:], 66]


@pytest.mark.parametrize("how", ["generate", "stream", "agenerate", "astream"])
@pytest.mark.parametrize("reason", ["length", "eos", "stop_ids", "stop", "constraint", "context"])
def test_however_a_reply_ends(make: Make, reason: str, how: str) -> None:
    """What is not all there comes with the next reply, on the line and on a fork of it."""
    begin = list("A🙂".encode()[:HALF])
    if reason == "stop":
        begin[:1] = list(b"A##")  # shown up to the stop string
    limit = HALF if reason == "length" else 50
    context = {"max_context": 4 + HALF} if reason == "context" else {}
    eng = make([*begin, *([700] if reason == "stop_ids" else [])], REST, REST, **context)
    options: dict[str, Any] = {
        "eos": {},
        "stop_ids": {"stop_ids": (700,)},
        "stop": {"stop": ("##",)},
        "constraint": {"constraint": Ends()},
    }.get(reason, {"ignore_eos": True})

    async def later(s: Session) -> Reply:
        if how == "agenerate":
            return await s.agenerate(limit, **options)
        async with s.astream(limit, **options) as stream:
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.reply.text
        return stream.reply

    with eng.session("abcd") as s:
        if how == "generate":
            reply = s.generate(limit, **options)
        elif how == "stream":
            with s.stream(limit, **options) as stream:
                assert "".join(stream) == stream.reply.text
            reply = stream.reply
        else:
            reply = asyncio.run(later(s))
        assert reply.finish_reason == {"stop_ids": "eos"}.get(reason, reason)
        assert reply.text == "A"
        if reason == "context":
            return
        if reason == "stop":  # it ended before the half character came
            s.append([*begin[3:]])
        fork = s.attempts(1)[0]
        assert s.generate(3).text == fork.generate(3).text == "🙂B"


def test_a_cancelled_reply() -> None:
    eng = engine("A🙂", REST)
    with eng.session("abc") as s:
        generation = eng.start(s.id, 50)
        for count, _ in enumerate(generation, 1):
            if count == HALF:
                generation.cancel()
        reply = Reply.of(generation)
        assert (reply.text, reply.finish_reason, len(reply.tokens)) == ("A", "cancelled", HALF)
        assert s.generate(3).text == "🙂B"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_committed_half_of_a_character(make: Make, cut: int) -> None:
    """What was observed ends inside a character, which the model completes."""
    data = "🙂".encode()
    eng = make([*data[cut:], 65])
    with eng.session("x") as s:
        s.commit(list(data[:cut]))
        assert s.generate(len(data) - cut + 1).text == "🙂A"
        assert s.text == "x🙂A"
