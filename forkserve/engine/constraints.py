"""Constraints on sampling: a list of choices, a JSON schema, a regular expression, a grammar.

Each satisfies `forkserve.types.Constraint`: what may follow depends on the tokens generated so
far and on nothing else, so a constraint may be shared by branches and asked in any order.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ConfigError, MissingExtra
from forkserve.types import IntArray, Tokens

__all__ = ["ChoiceConstraint", "GrammarConstraint"]


class ChoiceConstraint:
    """The text must be one of `choices`.

    Follows each choice's own tokenisation through a trie.  After a whole choice `eos_ids` may
    follow; without any, generation ends there.  Where one choice begins another, `eos_ids` let the
    model stop at the shorter one.
    """

    def __init__(
        self, tokenizer: Tokenizer, choices: Sequence[str], eos_ids: Sequence[int] = ()
    ) -> None:
        if isinstance(choices, str) or not choices or not all(choices):
            raise ConfigError("choices must be a list of at least one string, none of them empty")
        self._eos = tuple(eos_ids)
        self._next: dict[tuple[int, ...], list[int]] = {}
        for choice in choices:
            ids = [*tokenizer.encode(choice, special=False)]
            for i in range(len(ids) + 1):
                follow = self._next.setdefault(tuple(ids[:i]), [])
                more = ids[i : i + 1] or self._eos
                follow.extend(token for token in more if token not in follow)

    def allowed(self, generated: Tokens) -> Sequence[int]:
        """Ids that continue a choice; empty after the end and off the list."""
        return tuple(self._next.get(tuple(generated), ()))


class GrammarConstraint:
    """The text must match a grammar, kept by llguidance.

    vocab_size: `ModelInfo.vocab_size`.  eos_ids: what may follow a complete text, at least one.
    Raises `MissingExtra` without llguidance and `ConfigError` for a grammar it refuses.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammar: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        """grammar: as `llguidance.LLMatcher.grammar_from_*` give it."""
        if not eos_ids:
            raise ConfigError("a grammar needs at least one end id; pass eos_ids=info.eos_ids")
        guidance = _guidance()
        self._eos = tuple(eos_ids)
        self._vocab_size = vocab_size
        shared = _grammar_tokenizer(tokenizer, vocab_size, self._eos)
        fault = guidance.LLMatcher.validate_grammar(grammar, shared)
        if fault and not fault.startswith("WARNING"):
            raise ConfigError(f"the grammar is refused: {fault.strip().splitlines()[0]}")
        self._matcher = guidance.LLMatcher(shared, grammar, log_level=0)
        self._consumed: list[int] = []
        self._lock = threading.Lock()  # one matcher, moved to and fro

    @classmethod
    def from_json_schema(
        cls,
        tokenizer: Tokenizer,
        schema: Mapping[str, Any] | str,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> GrammarConstraint:
        """JSON that a schema accepts; no free white space, in which small models ramble."""
        guidance = _guidance()
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            grammar = guidance.LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_flexible": False}
            )
        except ValueError as error:
            raise ConfigError(f"the JSON schema is refused: {error}") from error
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_regex(
        cls, tokenizer: Tokenizer, regex: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> GrammarConstraint:
        """Text that a regular expression matches as a whole."""
        grammar = _guidance().LLMatcher.grammar_from_regex(regex)
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_lark(
        cls, tokenizer: Tokenizer, lark: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> GrammarConstraint:
        """Text of the rule `start` of a Lark grammar, in llguidance's dialect of Lark."""
        grammar = _guidance().LLMatcher.grammar_from_lark(lark)
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_ebnf(
        cls, tokenizer: Tokenizer, ebnf: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> GrammarConstraint:
        """Text of the rule `root` of an EBNF grammar in GBNF notation (``root ::= "a" [0-9]+``)."""
        convert = _guidance("llguidance.gbnf_to_lark")
        try:
            lark = convert.gbnf_to_lark(ebnf)
        except Exception as error:  # of no kind of its own for a rule that is missing
            raise ConfigError(f"the EBNF grammar is refused: {error}") from error
        return cls.from_lark(tokenizer, lark, vocab_size=vocab_size, eos_ids=eos_ids)

    def allowed(self, generated: Tokens) -> Sequence[int] | IntArray:
        """Ids that keep the text within the grammar; empty after the end and outside it."""
        generated = list(generated)
        if generated and generated[-1] in self._eos:
            return ()
        with self._lock:
            if not self._move_to(generated):
                return ()
            if self._matcher.is_stopped():
                return self._eos
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            complete = self._matcher.is_accepting()
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=self._vocab_size))
        # The library knows one end id; a model may have several.
        return np.union1d(ids, self._eos) if complete else ids

    def _move_to(self, generated: list[int]) -> bool:
        """Bring the matcher to `generated`; False if the grammar does not admit it."""
        common = 0
        for ours, theirs in zip(self._consumed, generated, strict=False):
            if ours != theirs:
                break
            common += 1
        surplus = len(self._consumed) - common
        if surplus and not self._matcher.rollback(surplus):
            self._matcher.reset()
            common = 0
        more = generated[common:]
        taken = self._matcher.try_consume_tokens(more) if more else 0
        self._consumed = generated[: common + taken]
        return taken == len(more)


def _guidance(module: str = "llguidance") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra("constrained decoding by a grammar", "engine", "llguidance") from error


class _Vocabulary:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = [tokenizer.decode_bytes([i]) for i in range(vocab_size)]
        self.special_token_ids = [
            i
            for i, text in enumerate(self.tokens)
            if text and not tokenizer.decode_bytes([i], skip_special=True)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)


# Building llguidance's table takes about 0.3 s for 50k ids, so the last few are kept.
_TABLES: list[tuple[Tokenizer, int, int, Any]] = []
_TABLES_LOCK = threading.Lock()
_TABLES_KEPT = 4


def _grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    with _TABLES_LOCK:
        for known, size, eos, table in _TABLES:
            if known is tokenizer and size == vocab_size and eos == eos_ids[0]:
                return table
        guidance = _guidance()
        wrapper = guidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_ids[0]))
        table = guidance.LLTokenizer(wrapper, n_vocab=vocab_size)
        _TABLES[:] = [*_TABLES, (tokenizer, vocab_size, eos_ids[0], table)][-_TABLES_KEPT:]
        return table
