"""Grammars that nothing matches, that lead nowhere, or that are too much for the library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.constraints import constraint_for
from forkserve.engine import MockBackend
from forkserve.engine import constraints as module
from forkserve.engine.constraints import ChoiceConstraint, GrammarConstraint
from forkserve.engine.local.checkpoint import open_tokenizer
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ConfigError

from .conftest import tiny_tokenizer

SIZES = {"vocab_size": 258, "eos_ids": (257,)}
# Lexer states multiply while several of these are open side by side.
TOO_MUCH = "(.*a.{20}b|.*c.{22}d|.*e.{25}f)"
TEXT = "xx yy zz aaaaaaaaa cccccccccccccccc"
DEAD_END = 'start: "x" X | "y" /[0-9]{3}/\nX: /[0-9]+/ & /[a-z]+/'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return LocalTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def real(smollm2_file: Path) -> Tokenizer:
    """A vocabulary large enough to make the library give up."""
    return open_tokenizer(str(smollm2_file))


def too_much(real: Tokenizer) -> GrammarConstraint:
    return GrammarConstraint.from_regex(real, TOO_MUCH, vocab_size=49152, eos_ids=(2, 0))


def falls_at(constraint: GrammarConstraint, ids: list[int]) -> int:
    """Where the library gives up on a text."""
    end = 0
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        for end in range(len(ids) + 1):
            assert not {2, 0} & {*map(int, constraint.allowed(ids[:end]))}
    assert f"past {end} tokens: lexer error: too many expressions" in str(caught.value)
    assert "<state>" not in str(caught.value)
    return end


@pytest.mark.model
def test_a_failure_is_no_end_and_leaves_others_alone(real: Tokenizer) -> None:
    constraint = too_much(real)
    bad, good = real.encode(TEXT, special=False), real.encode("zz", special=False)
    first, after = [*constraint.allowed([])], [*constraint.allowed(good)]
    assert len(first) > 1000
    end = falls_at(constraint, bad)
    assert [*constraint.allowed([])] == first
    assert [*constraint.allowed(good)] == after
    assert len(constraint.allowed(bad[: end - 1])) > 1000
    assert falls_at(constraint, bad) == end


@pytest.mark.model
def test_what_others_asked_decides_nothing(real: Tokenizer) -> None:
    """A matcher that another text has broken is no answer to this one."""
    bad = real.encode(TEXT, special=False)
    end = falls_at(too_much(real), bad)
    worn = too_much(real)
    broken = worn._followers[0].matcher.deep_copy()
    broken.try_consume_tokens(bad[:end])
    broken.compute_bitmask()
    assert broken.is_error()
    worn._followers = [module._Follower(broken, bad[:end])]
    assert [*worn.allowed(bad[: end - 1])] == [*too_much(real).allowed(bad[: end - 1])]


@pytest.mark.parametrize("background", [False, True])
def test_a_generation_ends_with_the_error(background: bool) -> None:
    """No reply that breaks the grammar comes back as a finished one."""
    backend = MockBackend(ForkServeConfig(background=background), replies=["xx", "y123"])
    engine, info = Engine(backend), backend.info
    constraint = GrammarConstraint.from_lark(
        backend.tokenizer, DEAD_END, vocab_size=info.vocab_size, eos_ids=info.eos_ids
    )
    with engine.session("prompt") as s:
        with s.stream(9, constraint=constraint) as stream:
            with pytest.raises(ConfigError, match="dead end after 1 tokens"):
                list(stream)
            assert (stream.reply.finish_reason, stream.reply.text) == ("error", "x")
        reply = s.generate(9, constraint=constraint)
        assert (reply.finish_reason, reply.text) == ("eos", "y123")
    engine.check()
    engine.shutdown()


@pytest.mark.parametrize(
    ("make", "grammar"),
    [
        (GrammarConstraint.from_regex, r"[^\s\S]"),
        (GrammarConstraint.from_regex, r"abc[^\s\S]"),
        (GrammarConstraint.from_json_schema, {"$ref": "#"}),
        (GrammarConstraint.from_json_schema, False),
        (GrammarConstraint.from_json_schema, "false"),
        (GrammarConstraint.from_json_schema, {"enum": []}),
        (GrammarConstraint.from_ebnf, "root ::= root"),
        (GrammarConstraint.from_lark, "start: X\nX: /[0-9]+/ & /[a-z]+/"),
        (GrammarConstraint.from_regex, "\U0001f600{0}[^\\s\\S]"),
    ],
)
def test_what_nothing_matches_is_refused(
    tokenizer: LocalTokenizer, make: Callable[..., GrammarConstraint], grammar: Any
) -> None:
    with pytest.raises(ConfigError, match=r"refused: (no |Unsatisfiable)"):
        make(tokenizer, grammar, **SIZES)


def test_a_dead_end_is_an_error_of_its_own(tokenizer: LocalTokenizer) -> None:
    constraint = GrammarConstraint.from_lark(tokenizer, DEAD_END, **SIZES)
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    assert {*constraint.allowed([])} == {*x, *y}
    for _ in range(2):
        with pytest.raises(ConfigError, match="dead end after 1 tokens"):
            constraint.allowed(x)
        assert len(constraint.allowed(y)) == 10


def test_a_limit_of_tokens_in_a_rule(tokenizer: LocalTokenizer) -> None:
    """Of the library's dialect: the rule ends there, the grammar goes on."""
    grammar = 'start: x "!"\nx[max_tokens=3]: /[a-z]*/'
    constraint = GrammarConstraint.from_lark(tokenizer, grammar, **SIZES)
    assert {*tokenizer.encode("!")} == {*constraint.allowed(tokenizer.encode("xyz"))}


def test_the_reason_of_a_refused_expression(tokenizer: LocalTokenizer) -> None:
    with pytest.raises(ConfigError, match="look-ahead and look-behind, is not supported"):
        GrammarConstraint.from_regex(tokenizer, "a(?=b)b", **SIZES)


def test_schemas_are_objects_true_or_false(tokenizer: LocalTokenizer) -> None:
    for schema in (True, "true", {}, "{}"):
        anything = GrammarConstraint.from_json_schema(tokenizer, schema, **SIZES)
        assert {*tokenizer.encode("{"), *tokenizer.encode("7")} < {*anything.allowed([])}
    nested = MappingProxyType({"anyOf": [MappingProxyType({"const": 7})]})
    seven = GrammarConstraint.from_json_schema(tokenizer, nested, **SIZES)
    assert [*seven.allowed([])] == tokenizer.encode("7")
    for schema, match in (
        ("5", "it is int; a schema is an object"),
        ([1], "it is list"),
        (None, "it is NoneType"),
        ({"const": {1}}, "set is no JSON"),
        ({"const": b"a"}, "bytes is no JSON"),
    ):
        with pytest.raises(ConfigError, match=match):
            GrammarConstraint.from_json_schema(tokenizer, schema, **SIZES)


def test_grammars_are_strings(tokenizer: LocalTokenizer) -> None:
    for make in (
        GrammarConstraint,
        GrammarConstraint.from_regex,
        GrammarConstraint.from_lark,
        GrammarConstraint.from_ebnf,
    ):
        for wrong, match in ((None, "NoneType, not str"), (b"a", "bytes"), ("\ud800", "Unicode")):
            with pytest.raises(ConfigError, match=match):
                make(tokenizer, wrong, **SIZES)  # type: ignore[operator]
    for choices in ([1, 2], None, [b"a"], ["a", None], ["\ud800"], 3):
        with pytest.raises(ConfigError, match="choice"):
            ChoiceConstraint(tokenizer, choices)  # type: ignore[arg-type]


def test_a_request_without_a_schema() -> None:
    engine = Engine(MockBackend(ForkServeConfig()))
    for inner in ({}, {"json_schema": None}, {"json_schema": {"schema": "x"}}):
        with pytest.raises(ConfigError, match="holds no schema"):
            constraint_for(engine, (), None, {"type": "json_schema", **inner})
    with pytest.raises(ConfigError, match="JSON schema is refused"):
        constraint_for(
            engine, (), None, {"type": "json_schema", "json_schema": {"schema": {"const": {1}}}}
        )
    engine.shutdown()


def test_many_branches_and_threads(tokenizer: LocalTokenizer) -> None:
    """More branches than are followed at a time, from several threads, dead ends among them."""
    grammar = 'start: /[a-z]{1,9}/ "-" /[0-9]+/ | "X" Y\nY: /[0-9]+/ & /[a-z]+/'
    shared = GrammarConstraint.from_lark(tokenizer, grammar, **SIZES)
    words = ["abc-12", "abd-7", "z-1", "zz-123", "qwertyuio-1", "X", "ab", "a-"]
    words += [f"{chr(97 + n)}-{n}" for n in range(24)]
    paths = [tokenizer.encode(word) for word in words]

    def answers(constraint: GrammarConstraint) -> list[list[int] | str]:
        found: list[list[int] | str] = []
        for step in range(12):
            for path in paths:
                try:
                    found.append([*map(int, constraint.allowed(path[:step]))])
                except ConfigError as error:
                    found.append(str(error))
        return found

    want = answers(GrammarConstraint.from_lark(tokenizer, grammar, **SIZES))
    assert any(isinstance(answer, str) for answer in want)
    got: list[list[list[int] | str]] = []
    threads = [threading.Thread(target=lambda: got.append(answers(shared))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 4
    assert len(shared._followers) <= module._FOLLOWERS


def test_branches_in_turns_go_back_for_nothing(
    tokenizer: LocalTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the library takes: each once, though branches ask in turns."""
    constraint = GrammarConstraint.from_regex(tokenizer, "[a-z]*", **SIZES)
    taken = 0
    move_to = module._Follower.move_to

    def counting(self: Any, tokens: list[int]) -> bool:
        nonlocal taken
        taken += len(tokens) - self.common(tokens)
        return move_to(self, tokens)

    monkeypatch.setattr(module._Follower, "move_to", counting)
    letters = "abcdefghijklmnopqrstuvwxyz"[: module._FOLLOWERS]
    paths = [tokenizer.encode(letter * 40) for letter in letters]
    for step in range(41):
        for path in paths:
            constraint.allowed(path[:step])
    assert taken == len(letters) * 40
