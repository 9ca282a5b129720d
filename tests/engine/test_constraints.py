"""Choice and grammar constraints over a byte-level tokenizer."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forkserve.engine.constraints import ChoiceConstraint, GrammarConstraint, _Vocabulary
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.errors import ConfigError, MissingExtra
from forkserve.types import Constraint

from .conftest import tiny_tokenizer
from .test_tokenizers import byte_level, sentencepiece

EOS = (257,)
SIZE = 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return LocalTokenizer.from_folder(folder)


def walk(constraint: Constraint, draw: random.Random, limit: int = 200) -> list[int]:
    """Random tokens that the constraint allows, to its end."""
    out: list[int] = []
    while len(out) < limit:
        allowed = constraint.allowed(out)
        assert allowed is not None
        if not len(allowed):
            return out
        out.append(draw.choice(list(allowed)))
    return out


def test_choices_are_the_only_texts(tokenizer: LocalTokenizer) -> None:
    choices = ["yes", "no", "nothing", "naïve"]
    constraint = ChoiceConstraint(tokenizer, choices, EOS)
    draw, seen = random.Random(0), set()
    for _ in range(100):
        out = walk(constraint, draw)
        assert out[-1] == EOS[0]
        seen.add(tokenizer.decode_bytes(out[:-1]).decode())
    assert seen == set(choices)


def test_a_choice_that_begins_another_may_end(tokenizer: LocalTokenizer) -> None:
    constraint = ChoiceConstraint(tokenizer, ["no", "nothing"], EOS)
    t, no = tokenizer.encode("t")[0], tokenizer.encode("no")
    assert set(constraint.allowed(no)) == {t, *EOS}
    assert constraint.allowed([*no, *EOS]) == ()
    assert constraint.allowed(tokenizer.encode("x")) == ()


def test_choices_without_an_end_id_just_stop(tokenizer: LocalTokenizer) -> None:
    constraint = ChoiceConstraint(tokenizer, ["a", "b"])
    assert constraint.allowed(tokenizer.encode("a")) == ()


@pytest.mark.parametrize("prefix", [True, False])
def test_choices_are_written_as_they_are(prefix: bool) -> None:
    """Also with a tokenizer that puts a space before a text."""
    tokenizer, _ = sentencepiece(prefix)
    choices = ["the other", "there", "né", "\x00", "</s>", " the", "\n\ndoing", "[INST]"]
    constraint = ChoiceConstraint(tokenizer, choices, (2,))
    draw = random.Random(0)
    seen = {tokenizer.decode_bytes(walk(constraint, draw)[:-1]).decode() for _ in range(200)}
    assert seen == set(choices)


@pytest.mark.parametrize("make", [partial(sentencepiece, True), partial(byte_level, "qwen2")])
def test_texts_that_the_tokenizer_writes_otherwise(make: Any) -> None:
    """A space before a text, accents that are composed: the library wants the very bytes."""
    tokenizer, _ = make()
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_ids": (2,)}
    draw = random.Random(0)
    for texts in (
        ["the other", "there"],
        ["e\u0301nd", "e\u0301x"],
        [" e\u0301\n", " e\u0301 the"],
        ["\U0001f600e\u0301", "\U0001f600 "],
        ["</s>", "</s>e\u0301"],
        ["<|im_end|>e\u0301", "<|im_end|>e"],
    ):
        rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        grammar = GrammarConstraint.from_ebnf(tokenizer, f"root ::= {rule}", **sizes)
        outs = [walk(grammar, draw) for _ in range(60)]
        assert all(out[-1] == 2 and not tokenizer._special & {*out[:-1]} for out in outs)
        assert {tokenizer.decode_bytes(out[:-1]).decode() for out in outs} == set(texts)


def test_what_the_library_is_given_has_the_bytes_and_no_control_token() -> None:
    for tokenizer in (sentencepiece(True)[0], byte_level("qwen2")[0]):
        vocabulary = _Vocabulary(tokenizer, tokenizer.vocab_size, 2)
        for text in ("</s>e\u0301", "<|im_end|>e\u0301", "the", " the", "\u6f22", ""):
            ids = vocabulary(text)
            assert tokenizer.decode_bytes(ids) == text.encode()
            assert not tokenizer._special & {*ids}


@pytest.mark.parametrize("choices", [[], [""], ["a", ""], "abc"])
def test_bad_choices(tokenizer: LocalTokenizer, choices: list[str]) -> None:
    with pytest.raises(ConfigError, match="choices"):
        ChoiceConstraint(tokenizer, choices)


def test_json_schema(tokenizer: LocalTokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"tool": {"enum": ["search", "calc"]}, "n": {"type": "integer"}},
        "required": ["tool", "n"],
        "additionalProperties": False,
    }
    constraint = GrammarConstraint.from_json_schema(tokenizer, schema, vocab_size=SIZE, eos_ids=EOS)
    draw = random.Random(1)
    for _ in range(5):
        out = walk(constraint, draw)
        value = json.loads(tokenizer.decode_bytes(out, skip_special=True))
        assert value["tool"] in ("search", "calc")
        assert isinstance(value["n"], int)


def test_regex_in_any_order_of_calls(tokenizer: LocalTokenizer) -> None:
    """Pure: answers do not depend on what was asked before."""
    pattern = r"[0-9]{3}-(yes|no)"
    constraint = GrammarConstraint.from_regex(tokenizer, pattern, vocab_size=SIZE, eos_ids=EOS)
    draw = random.Random(2)
    texts = [walk(constraint, draw) for _ in range(4)]
    for out in texts:
        assert re.fullmatch(pattern, tokenizer.decode_bytes(out[:-1]).decode())
    prefixes = [out[:i] for out in texts for i in range(len(out) + 1)]
    prefixes.append(tokenizer.encode("12x"))
    answers = [tuple(constraint.allowed(prefix)) for prefix in prefixes]
    order = list(range(len(prefixes)))
    draw.shuffle(order)
    for i in order:
        assert tuple(constraint.allowed(prefixes[i])) == answers[i]
    assert answers[-1] == ()


ARITHMETIC_LARK = """
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""
ARITHMETIC_EBNF = """
root ::= term (("+" | "-") term)*
term ::= [0-9]{1,3} | "(" root ")"
"""


@pytest.mark.parametrize(
    ("make", "grammar"),
    [
        (GrammarConstraint.from_lark, ARITHMETIC_LARK),
        (GrammarConstraint.from_ebnf, ARITHMETIC_EBNF),
    ],
)
def test_grammars_with_recursion(tokenizer: LocalTokenizer, make: Any, grammar: str) -> None:
    constraint = make(tokenizer, grammar, vocab_size=SIZE, eos_ids=EOS)
    draw, done = random.Random(3), 0
    for _ in range(40):
        out = walk(constraint, draw, 60)
        if out[-1] == EOS[0]:
            text = tokenizer.decode_bytes(out[:-1]).decode()
            assert re.fullmatch(r"[0-9()+-]+", text)
            eval(re.sub(r"\b0+(?=\d)", "", text))  # Python agrees on where brackets go
            done += 1
    assert done > 5


def test_forced_text_has_masks_of_one_id(tokenizer: LocalTokenizer) -> None:
    """What lets the engine append it without asking the model."""
    constraint = GrammarConstraint.from_regex(
        tokenizer, "the same (yes|no) again", vocab_size=SIZE, eos_ids=EOS
    )
    out: list[int] = []
    while len(allowed := constraint.allowed(out)) == 1:
        out.append(int(allowed[0]))
    assert tokenizer.decode_bytes(out) == b"the same "
    assert len(allowed) == 2


def test_refused_grammars(tokenizer: LocalTokenizer) -> None:
    with pytest.raises(ConfigError, match="refused"):
        GrammarConstraint.from_regex(tokenizer, "(((", vocab_size=SIZE, eos_ids=EOS)
    for schema in ('{"type": "nonsense"}', "no json"):
        with pytest.raises(ConfigError, match="refused"):
            GrammarConstraint.from_json_schema(tokenizer, schema, vocab_size=SIZE, eos_ids=EOS)
    for make, grammars in (
        (GrammarConstraint.from_lark, ('start: "a', "other: /a/", "start: missing", "")),
        (
            GrammarConstraint.from_ebnf,
            ("root ::= (", 'other ::= "a"', "root ::= missing", "", "\0"),
        ),
    ):
        for grammar in grammars:
            with pytest.raises(ConfigError, match="refused"):
                make(tokenizer, grammar, vocab_size=SIZE, eos_ids=EOS)
    with pytest.raises(ConfigError, match="end id"):
        GrammarConstraint.from_regex(tokenizer, "a", vocab_size=SIZE, eos_ids=())


def test_without_the_library(tokenizer: LocalTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[engine\]"):
        GrammarConstraint(tokenizer, "{}", vocab_size=SIZE, eos_ids=EOS)
    for make, grammar in (
        (GrammarConstraint.from_json_schema, "{}"),
        (GrammarConstraint.from_regex, "a"),
        (GrammarConstraint.from_lark, 'start: "a"'),
        (GrammarConstraint.from_ebnf, 'root ::= "a"'),
    ):
        with pytest.raises(MissingExtra, match=r"pip install .*\[engine\]"):
            make(tokenizer, grammar, vocab_size=SIZE, eos_ids=EOS)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    from forkserve.errors import ModelError

    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        LocalTokenizer.from_folder(tmp_path)
