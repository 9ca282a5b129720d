"""Streamed text beside the full decode: characters split over tokens, commits and forks."""

from __future__ import annotations

import codecs
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend

Make = Callable[..., Engine]
LETTERS = "aé語🙂 \n"
RAW = st.lists(
    st.one_of(st.integers(0, 255), st.sampled_from([256, 257, 258, 700])), min_size=1, max_size=8
)


def engine(*replies: str | list[int]) -> Engine:
    return Engine(MockBackend(ForkServeConfig(page_size=4, capacity_pages=256), replies=replies))


def decode(eng: Engine, tokens: list[int]) -> bytes:
    return eng.backend.tokenizer.decode_bytes(tokens, skip_special=True)


@settings(max_examples=60)
@given(st.text(LETTERS, min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 20))
def test_pieces_across_generations_and_a_fork(text: str, first: int, second: int) -> None:
    """A generation, a fork in mid-character, another generation: nothing is lost or broken."""
    data = list(text.encode())
    first = min(first, len(data))
    eng = engine(data[:first], data[first:], data[first:])
    with eng.session("prompt: ") as s:
        s.generate(first)
        fork = s.attempts(1)[0]
        with s.stream(len(data) - first or 1) as stream:
            pieces = list(stream)
        other = fork.generate(len(data) - first or 1)
        whole = bytes(data[:first]).decode("utf-8", "ignore")
        assert "".join(pieces) == stream.reply.text
        if first < len(data):
            assert whole + other.text == whole + stream.reply.text == text
            assert all("\ufffd" not in piece for piece in pieces)
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
        if cut:
            s.generate(cut)
        else:
            eng.backend._replies.pop(0)  # type: ignore[attr-defined]
        before = decode(eng, prompt + reply[:cut])
        with s.stream(len(reply) - cut, ignore_eos=True) as stream:
            pieces = list(stream)
        after = decode(eng, reply[cut:])
        assert "".join(pieces) == stream.reply.text
        shown = codecs.getincrementaldecoder("utf-8")("replace").decode(before)
        assert shown + stream.reply.text == (before + after).decode("utf-8", "replace")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_committed_half_of_a_character(make: Make, cut: int) -> None:
    """What was observed ends inside a character, which the model completes."""
    data = "🙂".encode()
    eng = make([*data[cut:], 65])
    with eng.session("x") as s:
        s.commit(list(data[:cut]))
        assert s.generate(len(data) - cut + 1).text == "🙂A"
        assert s.text == "x🙂A"
