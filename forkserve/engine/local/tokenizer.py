"""Tokenizer and chat template of a model, from GGUF metadata or tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from forkserve.engine.local.chat import ChatTemplate
from forkserve.engine.local.literal import Literal
from forkserve.engine.local.vocabulary import begin_of_text, from_metadata, named_tokens
from forkserve.errors import ModelError
from forkserve.prompt_text import Piece, PromptText, occurrences, pattern_of, plain
from forkserve.values import utf8

__all__ = ["LocalTokenizer"]

# Names under which models mark the end of a turn or text.
_END_MARKERS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LocalTokenizer:
    """Satisfies `forkserve.engine.protocol.Tokenizer`.

    A SentencePiece tokenizer may put a space before the text that it is given; where it does, the
    bytes of a text's ids begin with it.
    split_special_tokens: what looks like a control token in a conversation is content, and is split
    into plain tokens; False trusts all of it.
    """

    split_special_tokens = True

    def __init__(
        self,
        backend: Tokenizer,
        *,
        templates: Mapping[str, str],
        named: Mapping[str, str],
        where: str,
        begin: int | None = None,
    ) -> None:
        """templates: chat templates by name, "default" and perhaps "tool_use".

        named: special tokens by role ("bos_token"), as a chat template sees them.
        begin: the token that stands before every text, if one does.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._where = where
        self.begin_ids: tuple[int, ...] = () if begin is None else (begin,)
        added = backend.get_added_tokens_decoder()
        control = {i: token for i, token in added.items() if token.special}
        self._special = frozenset(control)
        names = [token.content for token in control.values()]
        self._controls = pattern_of(names)
        # What is normalised may become the name of a control token.
        folding = backend.normalizer is not None
        self._folding = folding and any(token.normalized for token in control.values())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes = self._token_bytes({i: token.content for i, token in added.items()})
        self._templates = {
            name: ChatTemplate(source, named, where, names) for name, source in templates.items()
        }

    # -- Tokenizer protocol ----------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; adds nothing at either end.

        special=False: of the whole text as content.  Of a `PromptText` what is marked is content.
        Raises ConfigError for half of a surrogate pair, which is no text.
        """
        try:
            return self._encoded(text if special else plain(text))
        except TypeError:  # the library's word for it
            utf8(text)
            raise

    def _encoded(self, text: str) -> list[int]:
        own: list[Piece] = []
        pattern = self._controls if isinstance(text, PromptText) else None
        if pattern is not None and (self._folding or text.plain):  # type: ignore[attr-defined]
            found = list(occurrences(text, pattern))
            own = [piece for piece, free in found if free]
            if len(own) < len(found):
                return self._literal.encode(str(text), own)
        ids: list[int] = self._backend.encode(str(text), add_special_tokens=False).ids
        unsafe = pattern is not None and self._folding
        if unsafe and sum(i in self._special for i in ids) > len(own):
            return self._literal.encode(str(text), own)
        return ids

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """The exact bytes of `ids`; each id has its own, so that parts concatenate."""
        table = self._bytes
        if skip_special:
            return b"".join([table.get(i, b"") for i in ids if i not in self._special])
        return b"".join([table.get(i, b"") for i in ids])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Chat messages as text, by the model's own template: its "tool_use" one given tools.

        A `PromptText`: control tokens are those that the template writes (`ChatTemplate.render`),
        unless contents are trusted.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ModelError(f"{self._where} has no chat template; give the prompt as text")
        text = template.render(
            messages,
            tools,
            documents,
            add_generation_prompt,
            split_special_tokens=self.split_special_tokens,
        )
        return text if self.split_special_tokens else str(text)

    # -- beyond the protocol ---------------------------------------------------------------

    def end_markers(self) -> list[int]:
        """Special ids whose names usually end a turn or a text."""
        ids = [self._backend.token_to_id(name) for name in _END_MARKERS]
        return [i for i in ids if i is not None and i in self._special]

    @cached_property
    def _literal(self) -> Literal:
        """Built when content is first encoded as such: a second tokenizer."""
        return Literal(self._backend)

    def _token_bytes(self, added: Mapping[int, str]) -> dict[int, bytes]:
        byte_level = b"ByteLevel" in _state(self._backend.decoder)
        byte_level = byte_level or b"ByteLevel" in _state(self._backend.pre_tokenizer)
        to_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
        table = {i: to_bytes(token) for token, i in self._backend.get_vocab(True).items()}
        for i, content in added.items():
            # Added pieces of SentencePiece, such as runs of spaces, are written like its others.
            plain = byte_level or i in self._special
            table[i] = content.encode() if plain else _sentencepiece_bytes(content)
        return table

    # -- sources ---------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], where: str) -> LocalTokenizer:
        """The tokenizer of ``tokenizer.ggml.*``, with the file's chat templates."""
        name = "tokenizer.chat_template"
        templates = {"default": meta[name]} if name in meta else {}
        if f"{name}.tool_use" in meta:
            templates["tool_use"] = meta[f"{name}.tool_use"]
        backend = from_metadata(meta, where)
        named, begin = named_tokens(meta), begin_of_text(meta)
        return cls(backend, templates=templates, named=named, where=where, begin=begin)

    @classmethod
    def from_folder(cls, folder: Path) -> LocalTokenizer:
        """tokenizer.json, with the template of tokenizer_config.json or chat_template.jinja."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{folder} has no tokenizer.json")
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {path}: {error}") from error
        settings = folder / "tokenizer_config.json"
        config = _settings(settings) if settings.exists() else {}
        named = {}
        for role, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                named[role] = text
        _declare(backend, config, named.values())
        return cls(
            backend,
            templates=_templates(folder, config),
            named=named,
            where=str(folder),
            begin=_begin_of_text(backend, named),
        )


def _begin_of_text(backend: Tokenizer, named: Mapping[str, str]) -> int | None:
    """The token that the post-processor of a tokenizer.json puts before a text.

    Hugging Face asks nothing else: with such a file ``add_bos_token`` has no say [transformers 5].
    """
    bos: int | None = backend.token_to_id(named.get("bos_token", ""))
    return bos if backend.encode("a").ids[:1] == [bos] else None


def _declare(backend: Tokenizer, config: Mapping[str, Any], roles: Iterable[str]) -> None:
    """Add the tokens that tokenizer_config.json alone knows of, as Hugging Face does.

    Those that have no id in the vocabulary, nor the next one, are left out: a model has no row for
    them.  roles: special tokens by name.
    """
    special = {*roles}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        found = config.get(name) or ()
        for one in found.values() if isinstance(found, dict) else found:
            special.add(one["content"] if isinstance(one, dict) else str(one))
    declared = config.get("added_tokens_decoder") or {}
    wanted = {entry["content"]: (int(i), entry) for i, entry in declared.items()}
    for content in sorted(special - wanted.keys()):
        wanted[content] = (-1, {"content": content})
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content, (place, entry) in sorted(wanted.items(), key=lambda item: item[1][0]):
        there = backend.token_to_id(content)
        if (
            content
            and content not in known
            and (there is not None or place == backend.get_vocab_size(with_added_tokens=True))
        ):
            flags = {name: bool(entry.get(name)) for name in _FLAGS}
            flags["special"] = content in special or bool(entry.get("special"))
            backend.add_tokens([AddedToken(content, **flags)])


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A folder's chat templates by name: files win over what the configuration holds."""
    held = config.get("chat_template")
    beside = folder / "chat_template.json"  # where models that see images have it
    if held is None and beside.exists():
        held = _settings(beside).get("chat_template")
    if isinstance(held, list):
        found = {entry["name"]: entry["template"] for entry in held}
    else:
        found = {} if held is None else {"default": held}
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        found[path.stem] = _text(path)
    separate = folder / "chat_template.jinja"
    if separate.exists():
        found["default"] = _text(separate)
    return found


def _settings(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _state(part: Any) -> bytes:
    """A tokenizer part as JSON bytes, or empty."""
    return b"" if part is None else bytes(part.__getstate__())


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in plain]
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
