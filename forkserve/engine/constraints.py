"""Constraints on sampling: a list of choices, a JSON schema, a regular expression, a grammar.

Each satisfies `forkserve.types.Constraint`: what may follow depends on the tokens generated so
far and on nothing else, so a constraint may be shared by branches and asked in any order.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from forkserve.engine.protocol import Tokenizer
from forkserve.errors import ConfigError, MissingExtra
from forkserve.types import IntArray, Tokens

__all__ = ["ChoiceConstraint", "GrammarConstraint"]

_DEAD_END = "NoExtension"  # llguidance's word for: no token goes on from here
_FOLLOWERS = 16  # branches of one constraint that are followed without going to and fro


class ChoiceConstraint:
    """The text must be one of `choices`.

    Follows each choice's own tokenisation through a trie.  After a whole choice `eos_ids` may
    follow; without any, generation ends there.  Where one choice begins another, `eos_ids` let the
    model stop at the shorter one.
    """

    def __init__(
        self, tokenizer: Tokenizer, choices: Sequence[str], eos_ids: Sequence[int] = ()
    ) -> None:
        given = isinstance(choices, Iterable) and not isinstance(choices, str)
        texts = list(choices) if given else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError("choices must be a list of at least one string, none of them empty")
        self._eos = tuple(eos_ids)
        self._next: dict[tuple[int, ...], list[int]] = {}
        for choice in texts:
            # A tokenizer that writes a text otherwise (Qwen 2's composes accents) decides.
            ids = _exact(tokenizer, _checked("choice", choice))
            ids = tokenizer.encode(choice, special=False) if ids is None else ids
            for i in range(len(ids) + 1):
                follow = self._next.setdefault(tuple(ids[:i]), [])
                more = ids[i : i + 1] or self._eos
                follow.extend(token for token in more if token not in follow)

    def allowed(self, generated: Tokens) -> Sequence[int]:
        """Ids that continue a choice; empty after the end and off the list."""
        return tuple(self._next.get(tuple(generated), ()))


def _exact(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Ids whose bytes are the text, if the tokenizer can be brought to give them.

    Llama 2's and Mistral's put a space before what they are given; so it is given behind something
    that no piece of their vocabularies joins.
    """
    ids, wanted = tokenizer.encode(text, special=False), text.encode()
    if tokenizer.decode_bytes(ids) == wanted:
        return ids
    for before in ("\n", "\x00"):
        longer = tokenizer.encode(before + text, special=False)
        for begin in range(1, len(longer)):
            if tokenizer.decode_bytes(longer[begin:]) == wanted:
                return longer[begin:]
    return None


class GrammarConstraint:
    """The text must match a grammar, kept by llguidance.

    vocab_size: `ModelInfo.vocab_size`.  eos_ids: what may follow a complete text, at least one.
    Raises `MissingExtra` without llguidance and `ConfigError` for a grammar that it refuses or that
    no text matches.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammar: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        """grammar: as `llguidance.LLMatcher.grammar_from_*` give it."""
        if not eos_ids:
            raise ConfigError("a grammar needs at least one end id; pass eos_ids=info.eos_ids")
        self._grammar = _checked("grammar", grammar)
        self._eos = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._shared = _grammar_tokenizer(tokenizer, vocab_size, self._eos)
        self._lock = threading.Lock()
        self._restart()
        if self._ask([]) is None:
            fault = self._fault()
            if fault.startswith(_DEAD_END):
                fault = "no text that this tokenizer can write matches it"
            raise ConfigError(f"the grammar is refused: {fault}")

    @classmethod
    def from_json_schema(
        cls,
        tokenizer: Tokenizer,
        schema: Mapping[str, Any] | str | bool,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> Self:
        """JSON that a schema accepts; no free white space, in which small models ramble."""
        text = _schema_text(schema)
        matcher = _guidance().LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(
                text, defaults={"whitespace_flexible": False}
            )
        except ValueError as error:
            raise ConfigError(f"the JSON schema is refused: {error}") from error
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_regex(
        cls, tokenizer: Tokenizer, regex: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> Self:
        """Text that a regular expression matches as a whole."""
        grammar = _guidance().LLMatcher.grammar_from_regex(_checked("regular expression", regex))
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_lark(
        cls, tokenizer: Tokenizer, lark: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> Self:
        """Text of the rule `start` of a Lark grammar, in llguidance's dialect of Lark."""
        grammar = _guidance().LLMatcher.grammar_from_lark(_checked("Lark grammar", lark))
        return cls(tokenizer, grammar, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_ebnf(
        cls, tokenizer: Tokenizer, ebnf: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> Self:
        """Text of the rule `root` of an EBNF grammar in GBNF notation (``root ::= "a" [0-9]+``)."""
        convert = _guidance("llguidance.gbnf_to_lark")
        _checked("EBNF grammar", ebnf)
        try:
            lark = convert.gbnf_to_lark(ebnf)
        except Exception as error:  # of no kind of its own for a rule that is missing
            raise ConfigError(f"the EBNF grammar is refused: {error}") from error
        return cls.from_lark(tokenizer, lark, vocab_size=vocab_size, eos_ids=eos_ids)

    def allowed(self, generated: Tokens) -> Sequence[int] | IntArray:
        """Ids that keep the text within the grammar; empty after the end and outside it.

        Raises ConfigError where the library gives up: the grammar is too complex for its limits,
        or a rule can't be completed from here.  Other texts may be asked about afterwards.
        """
        generated = list(generated)
        if generated and generated[-1] in self._eos:
            return ()
        with self._lock:
            found = self._ask(generated)
            if found is None:
                # Its limits count all that it was ever asked.  What one text alone, token by
                # token, would meet decides, so that branches beside it make no difference.
                self._restart()
                for end in range(len(generated) + 1):
                    found = self._ask(generated[:end])
                    if found is None:
                        break
            if found is not None:
                return found
            fault = self._fault()
            self._restart()
        if fault.startswith(_DEAD_END):
            raise ConfigError(
                f"the grammar leads to a dead end after {len(generated)} tokens: "
                "nothing matches the rest of the rule that they began"
            )
        raise ConfigError(
            f"the grammar could not be followed past {len(generated)} tokens: {fault}; "
            "simplify it: fewer alternatives that stay open side by side, smaller repeat counts"
        )

    def _restart(self) -> None:
        """Begin anew: a matcher that has failed stays so, and so do its copies."""
        matcher = _guidance().LLMatcher(self._shared, self._grammar, log_level=0)
        self._followers = [_Follower(matcher, [])]

    def _fault(self) -> str:
        """What the library says, without its own state and the whole grammar."""
        said = self._followers[-1].matcher.get_error().strip().splitlines() or ["no reason given"]
        why = [line.removeprefix("error: ") for line in said[1:] if line.startswith("error: ")]
        return " ".join([said[0], *why[:1]])  # of a regular expression the second has the reason

    def _ask(self, generated: list[int]) -> Sequence[int] | IntArray | None:
        """What may follow; None if the matcher has failed."""
        follower = self._follower(generated)
        matcher = follower.matcher
        if not follower.move_to(generated):
            return None if matcher.is_error() else ()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # its mask holds the end id then
            return None
        complete = matcher.is_accepting()
        if matcher.is_stopped():  # or a rule's own limit of tokens was reached
            return self._eos if complete else ()
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=self._vocab_size))
        # The library knows one end id; a model may have several.
        return np.union1d(ids, self._eos) if complete else ids

    def _follower(self, generated: list[int]) -> _Follower:
        """The one that shares most with `generated`, or a copy where it would have to go back."""
        followers = self._followers
        best = max(followers, key=lambda one: one.common(generated))
        if best.common(generated) == len(best.taken):
            followers.remove(best)
        else:  # another branch goes on from there
            best = best.copy()
            del followers[: max(len(followers) + 1 - _FOLLOWERS, 0)]
        followers.append(best)  # the last is the latest used
        return best


class _Follower:
    """A matcher and the tokens that it has taken."""

    def __init__(self, matcher: Any, taken: list[int]) -> None:
        self.matcher = matcher
        self.taken = taken

    def copy(self) -> _Follower:
        """Takes microseconds; what the library has learnt of the grammar is shared."""
        return _Follower(self.matcher.deep_copy(), self.taken)

    def common(self, tokens: list[int]) -> int:
        """How many tokens both begin with."""
        taken = self.taken
        if tokens[: len(taken)] == taken:
            return len(taken)
        pairs = enumerate(zip(taken, tokens, strict=False))
        return next((i for i, (ours, theirs) in pairs if ours != theirs), len(tokens))

    def move_to(self, tokens: list[int]) -> bool:
        """Whether the grammar admits the tokens; False also if the matcher fails."""
        common = self.common(tokens)
        surplus = len(self.taken) - common
        if surplus and not self.matcher.rollback(surplus):
            self.matcher.reset()
            common = 0
        more = tokens[common:]
        took = self.matcher.try_consume_tokens(more) if more else 0
        self.taken = tokens[: common + took]
        return bool(took == len(more))


def _checked(what: str, text: object) -> str:
    """A string that the library can take."""
    if not isinstance(text, str):
        raise ConfigError(f"the {what} is refused: it is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {what} is refused: it is no Unicode text: {error}") from error
    return text


def _schema_text(schema: object) -> str:
    """A JSON schema as the library takes it: an object, in JSON."""
    refused = "the JSON schema is refused: "
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{refused}{error}") from error
    if value is False:
        raise ConfigError(f"{refused}no JSON matches the schema false")
    if value is True:
        return "{}"
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{refused}it is {type(value).__name__}; a schema is an object, true or false"
        )
    return text


def _as_dict(value: object) -> dict[str, Any]:
    """Mappings that are no dict, for `json`."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


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
        self._by_bytes: dict[bytes, int] | None = None
        self._most = 0  # bytes of the longest of them

    def __call__(self, text: str) -> list[int]:
        """Ids of exactly these bytes: the library panics over any others."""
        ids = _exact(self._tokenizer, text)
        return self._longest(text.encode()) if ids is None else ids

    def _longest(self, text: bytes) -> list[int]:
        """The longest token at each place: for a text that the tokenizer would change."""
        if self._by_bytes is None:
            special = frozenset(self.special_token_ids)
            plain = [i for i, text in enumerate(self.tokens) if text and i not in special]
            self._by_bytes = {self.tokens[i]: i for i in plain}
            self._most = max(map(len, self._by_bytes), default=0)
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._most, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._by_bytes), 0)
            if not size:  # a byte that no token has
                break
            ids.append(self._by_bytes[text[at : at + size]])
            at += size
        return ids


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
