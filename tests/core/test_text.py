"""Tokens to text while they arrive."""

from __future__ import annotations

import codecs
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.text import TextStream

SAMPLES = ["plain", "naïve café", "日本語テキスト", "🙂🙃 mixed é 語", "a\u0301 combining", ""]


def raw(ids: Sequence[int]) -> bytes:
    return bytes(ids)


def stream(
    data: bytes, cuts: Sequence[int], stop: Sequence[str] = ()
) -> tuple[TextStream, list[str]]:
    """Feed the bytes in pieces cut at the given places."""
    out = TextStream(raw, stop)
    edges = [0, *sorted(cuts), len(data)]
    pieces = [out.push(data[a:b]) for a, b in pairwise(edges)]
    return out, [*pieces, out.finish()]


@pytest.mark.parametrize("text", SAMPLES)
def test_split_at_every_byte(text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        out, pieces = stream(data, [cut])
        assert "".join(pieces) == out.text == text
        assert all("\ufffd" not in piece for piece in pieces)
    out, pieces = stream(data, range(len(data)))
    assert "".join(pieces) == out.text == text


def whole(data: bytes) -> str:
    """The decode of the bytes without a character at their end that is not all there."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def test_an_unfinished_character_at_the_end_is_left_to_what_goes_on() -> None:
    out, pieces = stream("né".encode()[:2], [])
    assert pieces == ["n", ""]
    assert out.text == "n"
    out, pieces = stream(b"n\xc3(", [])  # a broken one that something follows
    assert out.text == "n\ufffd("


@pytest.mark.parametrize("stop", ["STOP", "é", "\n\n", "OP"])
def test_a_stop_string_never_shows(stop: str) -> None:
    text = f"before ST {stop[:-1]} x{stop}after"
    data = text.encode()
    for cut in range(len(data) + 1):
        out, pieces = stream(data, [cut], [stop])
        assert "".join(pieces) == out.text == text[: text.index(stop)]
        assert out.stopped == stop


def test_the_first_stop_string_wins() -> None:
    out, _ = stream(b"one two three", [], ["three", "two"])
    assert (out.text, out.stopped) == ("one ", "two")
    out, _ = stream(b"abcd", range(4), ["bcd", "bc"])
    assert out.text == "a"


def test_only_a_possible_beginning_is_held_back() -> None:
    out = TextStream(raw, ["STOP"])
    assert out.push(b"abc ST") == "abc "
    assert out.push(b"A") == "STA"
    assert out.push(b"STSTO") == "ST"
    assert out.push(b"P tail") == ""
    assert (out.text, out.stopped) == ("abc STAST", "STOP")
    assert out.push(b"more") == ""
    assert out.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    out = TextStream(raw, ["STOP"])
    assert out.push(b"x STO") == "x "
    assert out.finish() == "STO"
    assert (out.text, out.stopped) == ("x STO", None)


def first_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the stop string that is complete first; of two, the longer one."""
    ends = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


@given(
    st.text(st.sampled_from("abé🙂 "), max_size=30),
    st.lists(st.integers(0, 99), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_the_text_does_not_depend_on_the_pieces(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    data = text.encode()
    out, pieces = stream(data, [min(cut, len(data)) for cut in cuts], stops)
    assert "".join(pieces) == out.text == first_stop(text, stops)
    assert (out.stopped is not None) == any(s in text for s in stops)


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=12))
def test_any_bytes_give_what_decoding_them_at_once_gives(data: bytes, cuts: list[int]) -> None:
    """Broken sequences too: each is replaced as often as a whole decode replaces it."""
    out, pieces = stream(data, [min(cut, len(data)) for cut in cuts])
    assert "".join(pieces) == out.text == whole(data)
    assert data.decode("utf-8", "replace") in (out.text, out.text + "\ufffd")
    assert out.length == len(out.text)


@given(st.text(st.sampled_from("aé語🙂\ufffd"), max_size=20), st.integers(0, 60))
def test_a_cut_anywhere_loses_no_character(text: str, cut: int) -> None:
    data = text.encode()
    before, after = data[:cut], data[cut:]
    out = TextStream(raw, (), before)
    out.push(after)
    out.finish()
    _, pieces = stream(before, [])
    assert "".join(pieces) + out.text == text


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_what_came_before_is_only_a_beginning(before: bytes, after: bytes) -> None:
    """Even of bytes that are no text: the two parts make the whole decode."""
    first, _ = stream(before, [])
    out = TextStream(raw, (), before)
    pieces = [out.push(after[i : i + 1]) for i in range(len(after))]
    pieces.append(out.finish())
    assert first.text + "".join(pieces) == whole(before + after)


@given(
    st.text(st.sampled_from("aé🙂"), min_size=1, max_size=12),
    st.lists(st.text("aé🙂", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_a_stop_string_begins_after_the_cut(text: str, stops: list[str], cut: int) -> None:
    data = text.encode()
    cut = min(cut, len(data))
    before, after = data[:cut].decode("utf-8", "ignore"), data[cut:]
    out = TextStream(raw, stops, data[:cut])
    pieces = [out.push(after[i : i + 1]) for i in range(len(after))]
    pieces.append(out.finish())
    assert "".join(pieces) == out.text == first_stop(text[len(before) :], stops)


def test_text_that_is_read_while_more_comes() -> None:
    """A background loop pushes while whoever streams reads: nothing may be lost between."""
    stream = TextStream(bytes)

    class Growing(list[str]):
        """Grows while it is put together, as by another thread."""

        def __iter__(self) -> Iterator[str]:
            yield from super().__iter__()
            if len(self) == 2:
                stream.push(b"c")

    stream._parts = Growing()
    stream.push(b"a")
    stream.push(b"b")
    seen = stream.text
    assert seen in ("ab", "abc")
    if len(stream._parts) == 2:  # nobody walked over the list itself
        stream.push(b"c")
    assert stream.text == "abc"
    assert stream.length == 3


def test_pieces_of_two_threads() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        stream, size = TextStream(bytes), 3000
        pusher = threading.Thread(target=lambda: [stream.push(b"a") for _ in range(size)])
        pusher.start()
        seen = 0
        while pusher.is_alive():
            text = stream.text
            assert len(text) >= seen
            seen = len(text)
        pusher.join()
    finally:
        sys.setswitchinterval(before)
    assert stream.text == "a" * size
