"""The scanner: each call once, at the earliest moment, at any split, in linear time."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from forkserve.adapters.scanner import ParsedToolCall, ScanError, Scanner, TextScanner
from forkserve.errors import AdapterError

Found = list[tuple[str, dict[str, Any]]]


def run(text: str, sizes: list[int] | None = None, **options: Any) -> tuple[Any, ...]:
    """All that a scanner says about a text that comes in pieces."""
    scanner = Scanner(**options)
    calls: list[ParsedToolCall] = []
    at = 0
    for size in [*(sizes or []), len(text)]:
        calls += scanner.feed(text[at : at + size])
        at += size
    calls += scanner.finish()
    return calls, scanner.faults, scanner.content(text), scanner.steps


def names(text: str, **options: Any) -> Found:
    return [(c.name, c.arguments) for c in run(text, **options)[0]]


NESTED = {"q": 'a "quoted" {brace} \\ \n', "deep": {"a": [{"b": {"c": []}}, 1.5e3, None, True]}}
CALL = json.dumps({"name": "find", "arguments": NESTED})
EMOJI = '{"name": "say", "arguments": {"text": "\\ud83d\\ude00 \u00e9 \U0001f600 \\ud800"}}'
OPENAI = json.dumps(
    {
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "find", "arguments": json.dumps(NESTED)},
            },
            {"function": {"name": "stop", "arguments": ""}, "id": "c2"},
        ]
    }
)
CASES: dict[str, tuple[str, Found, str]] = {
    "bare": (f"So: {CALL} and on", [("find", NESTED)], "So:  and on"),
    "list": (f"[{CALL}, {CALL}]", [("find", NESTED)] * 2, ""),
    "openai": (OPENAI, [("find", NESTED), ("stop", {})], ""),
    "openai legacy": (
        '{"function_call": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
        [("f", {"a": 1})],
        "",
    ),
    "openai one": (
        '{"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": {}}}}',
        [("f", {"a": {}})],
        "",
    ),
    "hermes": (
        f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
        [("find", NESTED)] * 2,
        "I look.",
    ),
    "hermes, arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    "llama": ('{"name": "f", "parameters": {"x": "1"}}', [("f", {"x": "1"})], ""),
    "llama, two": (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 2}}',
        [("f", {}), ("g", {"a": 2})],
        "",
    ),
    "llama, program": ("<|python_tag|>print({1: 2})", [], "<|python_tag|>print({1: 2})"),
    "llama, function": (
        '<function=f>{"a": 1}</function> <function=g></function>',
        [("f", {"a": 1}), ("g", {})],
        "",
    ),
    "qwen coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx < y > z\n</parameter>\n"
        "<parameter=b>2</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "x < y > z", "b": "2"})],
        "",
    ),
    "mistral": (
        f'Text[TOOL_CALLS][{CALL}, {{"name": "g", "arguments": {{}}, "id": "abcdefghi"}}]',
        [("find", NESTED), ("g", {})],
        "Text",
    ),
    "mistral, new": (
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]xyz[ARGS]{}',
        [("f", {"a": 1}), ("g", {})],
        "",
    ),
    "no arguments between markers": ('<tool_call>{"name": "f"}</tool_call>', [("f", {})], ""),
    "unicode": (EMOJI, [("say", {"text": "\U0001f600 é \U0001f600 \ufffd"})], ""),
    "garbage": (
        f'{{ }} {{{{ "a": }} [ {{"x": [}}] \\" {{"a" {CALL} }} {{"open": "\n',
        [("find", NESTED)],
        '{ } {{ "a": } [ {"x": [}] \\" {"a"  } {"open": "',
    ),
    "a quote that opens a string": (f'{{"he said: {CALL}', [("find", NESTED)], '{"he said:'),
    "not inside arguments": (
        json.dumps({"name": "f", "arguments": {"name": "g", "arguments": {}}}),
        [("f", {"name": "g", "arguments": {}})],
        "",
    ),
    "not inside a string": (
        json.dumps({"name": "f", "arguments": {"text": CALL}}),
        [("f", {"text": CALL})],
        "",
    ),
    "not a definition": (
        '{"name": "f", "parameters": {"type": "object", "properties": {}}}',
        [],
        '{"name": "f", "parameters": {"type": "object", "properties": {}}}',
    ),
    "not any object": ('{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
}


@pytest.mark.parametrize("case", CASES)
def test_each_notation_at_every_split(case: str) -> None:
    text, want, content = CASES[case]
    whole = run(text)
    assert [(c.name, c.arguments) for c in whole[0]] == want
    assert whole[2] == content
    for call in whole[0]:
        begin, end = call.span
        assert 0 <= begin < end <= len(text)
        if call.source:
            assert text[:end].endswith(call.source)
    for at in range(len(text) + 1):
        assert run(text, [at]) == whole, at
    assert run(text, [1] * len(text)) == whole


@pytest.mark.parametrize("case", CASES)
def test_a_call_comes_with_its_last_character(case: str) -> None:
    text, want, _ = CASES[case]
    scanner = Scanner()
    seen = []
    for number, char in enumerate(text):
        for call in scanner.feed(char):
            seen.append((call.name, call.arguments))
            assert call.span[1] == number + 1
    assert scanner.finish() == []
    assert seen == want


@pytest.mark.parametrize("case", CASES)
def test_bytes_may_be_cut_inside_a_character(case: str) -> None:
    text, want, _ = CASES[case]
    scanner, calls = Scanner(), []
    for byte in text.encode():
        calls += scanner.feed(bytes([byte]))
    calls += scanner.finish()
    assert [(c.name, c.arguments) for c in calls] == want


def test_ids_are_kept() -> None:
    assert [c.id for c in run(OPENAI)[0]] == ["c1", "c2"]
    assert [c.id for c in run(CASES["mistral"][0])[0]] == [None, "abcdefghi"]
    assert [c.id for c in run(CASES["mistral, new"][0])[0]] == [None, "xyz"]


def test_bare_json_must_name_a_tool_that_exists() -> None:
    text = '{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}'
    assert names(text, names={"b"}) == [("b", {})]
    assert names(f"<tool_call>{text}</tool_call>", names={"b"}) == [("a", {}), ("b", {})]


def test_thoughts_hold_no_calls() -> None:
    text = f"<think>I could {CALL} <tool_call>{CALL}</tool_call></think>{CALL}"
    whole = run(text)
    assert [c.span[0] for c in whole[0]] == [text.rindex('{"name": "find"')]
    assert whole[1] == []
    for at in range(len(text) + 1):
        assert run(text, [at]) == whole
    begun = text.removeprefix("<think>")
    assert len(run(begun)[0]) == 3
    assert len(run(begun, thinking=True)[0]) == 1
    assert run(f"<think>{CALL}")[0] == []


FAULTS = {
    "malformed": '<tool_call>{"name": oops}</tool_call> more',
    "malformed ": "<tool_call>nothing<tool_call>",
    "malformed  ": "[TOOL_CALLS] none",
    "arguments": '<tool_call>{"name": "f", "arguments": "{broken"}</tool_call>',
    "arguments ": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "truncated": '<tool_call>{"name": "f", "arguments": {"a": "b',
    "truncated ": '<function=f>{"a": "b',
    "truncated  ": "<function=f><parameter=a>b",
    "too_long": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 90 + '"}}</tool_call>',
    "too_long ": "<function=f><parameter=a>" + "x" * 90 + "</parameter></function>",
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_marked_and_no_call_is_a_typed_fault(case: str) -> None:
    text = FAULTS[case]
    whole = run(text, limit=80)
    assert whole[0] == []
    assert whole[1][0].reason == case.strip()
    for at in range(len(text) + 1):
        assert run(text, [at], limit=80) == whole, at
    scanner = Scanner(limit=80)
    scanner.feed(text)
    scanner.finish()
    with pytest.raises(ScanError, match="characters"):
        scanner.check()
    assert issubclass(ScanError, AdapterError)


def test_bare_text_is_never_a_fault() -> None:
    for text in ("{", '{"name": "f", "arguments": {', "}{][", '{"a": {"b": [tru', "</tool_call>"):
        assert run(text)[:2] == ([], [])


PIECES = st.sampled_from(
    [
        *'{}[]",:\\<> a1\n',
        '{"',
        '{"a": {"b',
        '"name"',
        '{"name": "f", "arguments": {"x": 1}}',
        '{"function": {"name": "f", "arguments": "{}"}}',
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=p>",
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "\\ud83d\\ude00",
        "é\U0001f600",
    ]
)


@given(st.lists(PIECES, max_size=30), st.lists(st.integers(1, 9), max_size=40))
def test_any_text_at_any_split(pieces: list[str], sizes: list[int]) -> None:
    text = "".join(pieces)
    whole = run(text, limit=60)
    assert run(text, sizes, limit=60) == whole
    assert run(text, [1] * len(text), limit=60) == whole
    spans = [c.span for c in whole[0]]
    assert spans == sorted(spans)
    assert len(set(spans)) == len(spans)


@pytest.mark.parametrize(
    "unit",
    [
        "{",
        '{"',
        '{"a{',
        '{"k":',
        "[{",
        '{"{"a":1',
        "<tool_call>{",
        "<function=f>",
        '{"a":"{',
        "x",
        '\\"{',
    ],
)
def test_time_is_linear(unit: str) -> None:
    """Counted in characters, not in seconds."""
    for count in (2_000, 8_000):
        text = unit * count
        assert run(text)[3] <= 5 * len(text), unit


def test_many_calls_are_linear_in_time_and_bounded_in_memory() -> None:
    text = CALL * 2_000
    scanner = Scanner()
    found = sum(len(scanner.feed(text[i : i + 997])) for i in range(0, len(text), 997))
    assert found == 2_000
    assert scanner.steps == len(text)
    scanner.feed("y" * 5_000_000)
    assert sum(map(len, scanner._raw)) + len(scanner._tail) < 1_000


# --- Thought / Action / Observation ---------------------------------------------------------------


def run_text(text: str, sizes: list[int] | None = None, **options: Any) -> tuple[Any, ...]:
    scanner = TextScanner(**options)
    calls: list[ParsedToolCall] = []
    at = 0
    for size in [*(sizes or []), len(text)]:
        calls += scanner.feed(text[at : at + size])
        at += size
    calls += scanner.finish()
    return [(c.name, c.arguments, c.text, c.span) for c in calls], scanner.faults, scanner.steps


THOUGHTS: dict[str, tuple[str, list[tuple[str, dict[str, Any], str | None]], list[str]]] = {
    "json": (
        'Thought: x\nAction: f\nAction Input: {"a": {"b": "}"}}',
        [("f", {"a": {"b": "}"}}, None)],
        [],
    ),
    "json below": ('Action: `f`\nAction Input:\n{"a": 1}\nrest', [("f", {"a": 1}, None)], []),
    "plain": ("Action: f\nAction Input: two words\nObservation: x", [("f", {}, "two words")], []),
    "lines": ("Action: f\nAction Input: a\n  b\nThought: c", [("f", {}, "a\n  b")], []),
    "at the end": ("Action: f\nAction Input: a", [("f", {}, "a")], []),
    "empty at the end": ("Action: f\nAction Input:", [("f", {}, "")], []),
    "not JSON": ("Action: f\nAction Input: {x} + {y}\n", [("f", {}, "{x} + {y}")], []),
    "two": (
        'Action: f\nAction Input: {}\nAction: g\nAction Input: {"a": 1}',
        [("f", {}, None), ("g", {"a": 1}, None)],
        [],
    ),
    "no input": ("Action: f\nThought: never mind\n", [], ["malformed"]),
    "cut": ('Action: f\nAction Input: {"a": "', [], ["truncated"]),
    "none": ("Thought: I know.\nFinal Answer: {42}", [], []),
    "too long": ("Action: f\nAction Input: " + "y" * 99, [], ["too_long"]),
    "too long, JSON": ('Action: f\nAction Input: {"a": "' + "y" * 99 + '"}', [], ["too_long"]),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_text_form_at_every_split(case: str) -> None:
    text, want, faults = THOUGHTS[case]
    whole = run_text(text, limit=80)
    assert [c[:3] for c in whole[0]] == want
    assert [f.reason for f in whole[1]] == faults
    for at in range(len(text) + 1):
        assert run_text(text, [at], limit=80) == whole, at
    assert run_text(text, [1] * len(text), limit=80) == whole


@given(
    st.lists(
        st.sampled_from(
            [
                "Action: f\n",
                "Action Input:",
                " {",
                '{"a": 1}',
                "x",
                "\n",
                "Observation:",
                "Thought:",
            ]
        ),
        max_size=24,
    ),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_text_form_any_text_at_any_split(pieces: list[str], sizes: list[int]) -> None:
    text = "".join(pieces)
    whole = run_text(text, limit=30)
    assert run_text(text, sizes, limit=30) == whole
    assert run_text(text, [1] * len(text), limit=30) == whole
    assert whole[2] <= 3 * len(text)
