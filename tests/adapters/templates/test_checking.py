"""Where templates of real families break the prefix, and what is known while a tool runs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from forkserve.adapters.checking import Conversation, Report, check_template, read_conversation
from forkserve.adapters.templates import common
from forkserve.errors import ConfigError, ModelError

from .chats import FAMILIES, NO_SYSTEM, ODD, QWEN, SeamTokenizer
from .test_templates import TOOLS, USER, calling, result

SYSTEM = {"role": "system", "content": "Be kind."}
# The family of Qwen 3 beyond its template above: reasoning is written for the turns after the last
# user message.
THINKING = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' + said }}",
    "{%- set ns = namespace(last=0) %}"
    "{%- for n in messages %}{% if n.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{%- endfor %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{- said }}",
)


def check(source: str, *messages: Any, tools: Any = TOOLS) -> Report:
    tokenizer = SeamTokenizer({**FAMILIES, **ODD}.get(source, source))
    return check_template(tokenizer, Conversation(messages, tools))


def builtin() -> Conversation:
    text = (files("forkserve.cli") / "tool_conversation.json").read_text("utf-8")
    return read_conversation(json.loads(text), "built in")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_as_the_template_writes_it_keeps_the_prefix(family: str) -> None:
    report = check(family, SYSTEM, USER, calling({"at": 1}), result("there"))
    (step,) = report.steps
    assert step.ok
    assert report.ok
    assert (step.then, step.again, step.kept) == ("tool", 0, step.held)
    assert step.added == step.prompt - step.held > step.known > 0
    assert step.wrapper.startswith("<|im_end|>")
    assert step.close.startswith(("<|im_end|>", "\n</tool_response>", '"'))
    assert not step.drift


def test_counts_are_those_of_the_rendered_prompts() -> None:
    report = check("qwen", USER, calling({"at": 1}), result("there"))
    tokenizer = SeamTokenizer(QWEN)
    messages = [USER, calling({"at": 1}), result("there")]
    prompt = tokenizer.encode(tokenizer.render(messages, tools=TOOLS))
    (step,) = report.steps
    assert step.prompt == len(prompt)
    assert tokenizer.decode_bytes(prompt[step.kept :]).startswith(step.wrapper.encode())
    rest = tokenizer.decode_bytes(prompt[step.kept + step.known :]).decode()
    assert rest.endswith(step.close)
    assert "there" in rest


def test_what_the_model_wrote_is_taken_where_it_was_recorded() -> None:
    """Other spaces in the arguments: the break is at the first of them."""
    call = {**calling({"at": 1}), "raw": '<tool_call>\n{"name": "look", "arguments": {"at":1}}'}
    (step,) = check("qwen", USER, call, result("there")).steps
    assert not step.ok
    assert not step.assumed
    assert step.inside == "turn"
    assert (step.before[0], step.after[:2]) == ("1", " 1")
    assert step.before != step.after
    assert step.again == step.held - step.kept > 0
    assert step.known > 10  # the rewritten call, then the header


def test_reasoning_that_the_template_drops() -> None:
    """At once, or from the turns before the last user message: then earlier text changes too."""
    turn = {"role": "assistant", "content": "It is there.", "reasoning_content": "hm, where"}
    (step,) = check(QWEN, USER, turn, USER).steps
    assert step.inside == "turn"
    assert step.before.startswith("<think>")
    assert step.after.startswith("It is")
    call = {**calling({"at": 1}), "reasoning_content": "I look"}
    report = check(THINKING, USER, call, result("there"), turn, USER)
    first, second = report.steps
    assert first.ok  # still after the last user message
    assert second.inside == "prompt"
    assert "I look" in second.before


def test_raw_is_never_shown_to_the_template() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    (step,) = check(source, USER, {"role": "assistant", "content": "x", "raw": "y"}, USER).steps
    assert "raw" not in step.after


def test_several_results_are_open_at_once() -> None:
    (step,) = check("qwen", USER, calling({"at": 1}, {"at": 2}), result("a"), result("b", 2)).steps
    assert step.ok
    assert step.wrapper.endswith("<tool_response>")
    assert step.close == "\n</tool_response>\n<tool_response>\n"


def test_a_template_that_looks_into_results_leaves_nothing_known() -> None:
    (step,) = check("repeats", USER, calling({"at": 1}), result("there")).steps
    assert step.known == 0
    assert "2 times" in step.drift


def test_a_refusal_ends_the_steps() -> None:
    two = calling({"at": 1}, {"at": 2})
    report = check("llama", USER, two, result("a"), result("b", 2), USER)
    assert [step.refused[-18:] for step in report.steps] == ["one call at a time"]
    assert not report.ok
    with pytest.raises(ModelError, match="refused"):
        check("{{ raise_exception('never') }}", USER, calling({}), result("x"))


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("", (0, 1, 2)),
        ("<|im_start|>assistant\n", (0, 1, 2)),
        (QWEN.replace("for m in messages", "for m in messages[:1]"), (1, 2)),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", (0, 2)),
    ],
)
def test_a_template_that_leaves_messages_out(source: str, lost: tuple[int, ...]) -> None:
    talk = [USER, {"role": "assistant", "content": "There."}, {**USER, "content": "And you?"}]
    report = check(source, *talk, tools=())
    assert not report.ok
    assert [step.lost for step in report.steps] == [lost]


def test_what_a_template_trims_or_escapes_is_not_left_out() -> None:
    said = '{{ m.role }}: {{ {"said": m.content | trim} | tojson }}\n'
    talk = [{"role": "user", "content": ' "Where"\nis é? '}, {"role": "assistant", "content": "A."}]
    source = "{% for m in messages %}" + said + "{% endfor %}"
    (step,) = check(source, *talk, USER, tools=()).steps
    assert step.lost == ()
    thought = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nThere."}
    (step,) = check("qwen", USER, thought, USER, tools=()).steps
    assert step.lost == ()


def test_a_template_without_system_messages() -> None:
    report = check(NO_SYSTEM, SYSTEM, USER, {"role": "assistant", "content": "There."}, USER)
    assert report.folded
    assert report.ok
    (step,) = check(NO_SYSTEM, USER, calling({}), SYSTEM, tools=()).steps
    assert "no system" in step.refused


@pytest.mark.parametrize("family", [*FAMILIES, THINKING])
def test_the_built_in_conversation(family: str) -> None:
    """Every step obeys the counts; the next prompt begins with what was kept."""
    tokenizer = SeamTokenizer(FAMILIES.get(family, family))
    report = check_template(tokenizer, builtin())
    assert len(report.steps) == (3 if family == "llama" else 5)  # that one takes one call a turn
    for step in report.steps:
        if not step.refused:
            assert 0 < step.kept <= min(step.held, step.prompt)
            assert step.ok == (step.kept == step.held) == (not step.inside)
            assert common(step.before, step.after) < max(len(step.before), 1)
            assert (step.known > 0) == (step.then == "tool")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({}, "no messages"),
        (3, "no messages"),
        ([], "no turn"),
        ([USER], "no turn"),
        ([USER, {"role": "assistant", "content": "x"}], "no turn"),
        ([{"role": "robot"}], "role 'robot'"),
        (["x"], "message 0 has the role None"),
        ([USER, {"role": "assistant", "tool_calls": [{}]}, USER], "without a function"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, USER], "without a name"),
        ({"messages": [USER], "tools": {}}, "no turn"),
        ({"messages": [USER, {"role": "assistant"}, USER], "tools": "x"}, "no list"),
    ],
)
def test_conversations_are_checked(value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_conversation(value, "here")
