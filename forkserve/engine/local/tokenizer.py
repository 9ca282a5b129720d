"""Tokenizer and chat template of a model, from GGUF metadata or tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from forkserve.engine.local.chat import ChatTemplate
from forkserve.errors import ModelError

__all__ = ["LocalTokenizer"]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
_PLAIN = ("gpt-2", "gpt2", "default")
_DIGITS = ("smollm",)

# Names under which models mark the end of a turn or text.
_END_MARKERS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "</s>",
)
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LocalTokenizer:
    """Satisfies `forkserve.engine.protocol.Tokenizer`."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        chat_template: str | None,
        named: Mapping[str, str],
        where: str,
    ) -> None:
        """named: special tokens by role ("bos_token"), as a chat template sees them."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._where = where
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes = self._token_bytes({i: token.content for i, token in added.items()})
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, named, where)
        )

    # -- Tokenizer protocol ----------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; adds nothing at either end."""
        backend = self._backend if special else self._literal
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
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
        add_generation_prompt: bool = True,
    ) -> str:
        """Chat messages as text, by the model's own template."""
        if self._template is None:
            raise ModelError(f"{self._where} has no chat template; give the prompt as text")
        return self._template.render(messages, tools, add_generation_prompt)

    # -- beyond the protocol ---------------------------------------------------------------

    def end_markers(self) -> list[int]:
        """Special ids whose names usually end a turn or a text."""
        ids = [self._backend.token_to_id(name) for name in _END_MARKERS]
        return [i for i in ids if i is not None and i in self._special]

    @cached_property
    def _literal(self) -> Tokenizer:
        """A twin that reads markers as plain text (a mode of the object, not of the call)."""
        twin = Tokenizer.from_str(self._backend.to_str())
        twin.encode_special_tokens = True
        return twin

    def _token_bytes(self, added: Mapping[int, str]) -> dict[int, bytes]:
        byte_level = b"ByteLevel" in _state(self._backend.decoder)
        byte_level = byte_level or b"ByteLevel" in _state(self._backend.pre_tokenizer)
        to_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
        table = {i: to_bytes(token) for token, i in self._backend.get_vocab(True).items()}
        table.update((i, content.encode()) for i, content in added.items())
        return table

    # -- sources ---------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], where: str) -> LocalTokenizer:
        """Byte-level BPE from ``tokenizer.ggml.*``."""
        kind = meta.get("tokenizer.ggml.model")
        tokens = meta.get("tokenizer.ggml.tokens")
        if kind is None or not tokens:
            raise ModelError(f"{where} has no tokenizer in its metadata")
        if kind != "gpt2":
            raise ModelError(
                f"{where}: tokenizer '{kind}' is not supported from GGUF; byte-level BPE ('gpt2') "
                "is, or use a directory with tokenizer.json"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
        split = meta.get("tokenizer.ggml.pre", "default")
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            model = models.BPE(vocab, merges, ignore_merges=split in ("llama-bpe", "llama3"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{where}: vocabulary and merges disagree: {error}") from error
        backend = Tokenizer(model)
        backend.pre_tokenizer = _pre_tokenizer(split, where)
        if split == "qwen2":
            backend.normalizer = normalizers.NFC()
        kinds = meta.get("tokenizer.ggml.token_type", [])
        for flag, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            group = [tokens[i] for i, k in enumerate(kinds) if k == flag and i < len(tokens)]
            backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in group])
        named = {}
        for role in ("bos", "eos", "unknown", "padding"):
            index = meta.get(f"tokenizer.ggml.{role}_token_id")
            if index is not None and index < len(tokens):
                short = {"unknown": "unk", "padding": "pad"}.get(role, role)
                named[f"{short}_token"] = tokens[index]
        template = meta.get("tokenizer.chat_template")
        return cls(backend, chat_template=template, named=named, where=where)

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
        config: dict[str, Any] = {}
        settings = folder / "tokenizer_config.json"
        if settings.exists():
            try:
                config = json.loads(settings.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ModelError(f"cannot read {settings}: {error}") from error
        named = {}
        for role, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                named[role] = text
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            by_name = {entry["name"]: entry["template"] for entry in template}
            template = by_name.get("default")
        separate = folder / "chat_template.jinja"
        if separate.exists():
            template = separate.read_text(encoding="utf-8")
        return cls(backend, chat_template=template, named=named, where=str(folder))


def _pre_tokenizer(split: str, where: str) -> Any:
    if split in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in _DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if split in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(sorted([*_PLAIN, *_DIGITS, *_SPLITS]))
    raise ModelError(f"{where}: pre-tokenizer '{split}' is not supported; {known} are")


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
