"""A tokenizer from a GGUF's metadata: byte-level BPE, or SentencePiece with byte fallback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from forkserve.errors import ModelError

__all__ = ["begin_of_text", "from_metadata", "named_tokens"]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Mistral's from Nemo on: words part before a capital, digits stand alone.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# They take whole words of the vocabulary, and put begin-of-text first [llama.cpp, llama-vocab.cpp].
_WHOLE_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    "tekken": _TEKKEN,
}
_SPLITS = {**_WHOLE_WORDS, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_PLAIN = ("gpt-2", "gpt2", "default")
_DIGITS = ("smollm",)
_UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2"}  # split by architecture, in files that name none

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_FRAMES = frozenset(
    (
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|assistant|>", "<|user|>"),
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"),
    )
)
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file names none


def from_metadata(meta: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of ``tokenizer.ggml.*``.  `ModelError` if there is none, or of another kind."""
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ModelError(f"{where} has no tokenizer in its metadata")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers:
        raise ModelError(
            f"{where}: tokenizer '{kind}' is not supported from GGUF; {', '.join(makers)} are, or "
            "use a directory with tokenizer.json"
        )
    try:
        backend = makers[kind](meta, tokens, where)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{where}: vocabulary and merges disagree: {error}") from error
    kinds = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    frames = _frames(meta, tokens)
    typed = list(zip(tokens, kinds, strict=False))
    control = [token for token, kind in typed if kind == _CONTROL or token in frames]
    users = [token for token, kind in typed if kind == _USER_DEFINED and token not in frames]
    for group, special in ((control, True), (users, False)):
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in group])
    return backend


def _frames(meta: Mapping[str, Any], tokens: Sequence[str]) -> set[str]:
    """Tokens that begin or end a turn or a text.

    Some files have them as ordinary or user-defined ones; then any text could write them.
    """
    found = {name for name in tokens if name in _FRAMES}
    for role in ("bos", "eos", "eot", "eom"):
        index = _role(meta, role)
        if index is not None and 0 <= index < len(tokens):
            found.add(tokens[index])
    return found


def named_tokens(meta: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role ("bos_token"), as a chat template sees them."""
    tokens: Sequence[str] = meta.get("tokenizer.ggml.tokens", ())
    named = {}
    for role, short in _ROLES.items():
        index = _role(meta, role)
        if index is not None and index < len(tokens):
            named[f"{short}_token"] = tokens[index]
    return named


def begin_of_text(meta: Mapping[str, Any]) -> int | None:
    """The token that stands before every text, if the file or its kind of tokenizer wants one."""
    kind, split = meta.get("tokenizer.ggml.model"), _split(meta)
    wanted = meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or split in _WHOLE_WORDS)
    index = _role(meta, "bos") if wanted else None
    return index if index is not None and 0 <= index < len(meta["tokenizer.ggml.tokens"]) else None


def _role(meta: Mapping[str, Any], role: str) -> int | None:
    index: int | None = meta.get(f"tokenizer.ggml.{role}_token_id")
    if index is None and meta.get("tokenizer.ggml.model") == "llama":
        index = _SENTENCEPIECE_IDS.get(role)
    return index


# -- byte-level BPE --------------------------------------------------------------------------


def _byte_level(meta: Mapping[str, Any], tokens: Sequence[str], where: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
    split = _split(meta)
    pre = _pre_tokenizer(split, where)
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab, merges, ignore_merges=split in _WHOLE_WORDS)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _split(meta: Mapping[str, Any]) -> str:
    """How a text is split into words.  Files of before May 2024 don't say."""
    named: str | None = meta.get("tokenizer.ggml.pre")
    if named is None and "<|begin_of_text|>" in meta.get("tokenizer.ggml.tokens", ()):
        return "llama-bpe"
    return named or _UNNAMED.get(meta.get("general.architecture", ""), "default")


def _pre_tokenizer(split: str, where: str) -> Any:
    if split in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in _DIGITS:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        second = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split in _SPLITS:
        first = pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        known = ", ".join(sorted([*_PLAIN, *_DIGITS, *_SPLITS]))
        raise ModelError(f"{where}: pre-tokenizer '{split}' is not supported; {known} are")
    return pre_tokenizers.Sequence([first, second])


# -- SentencePiece ---------------------------------------------------------------------------


def _sentencepiece(meta: Mapping[str, Any], tokens: Sequence[str], where: str) -> Tokenizer:
    """Llama 2, Mistral, Gemma: pieces are merged by their scores, the rest are bytes.

    A space is written as U+2581, and one is put before a text unless the file says otherwise.
    """
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        count = 0 if scores is None else len(scores)
        raise ModelError(f"{where}: the tokenizer has {len(tokens)} pieces and {count} scores")
    kinds = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = _role(meta, "unknown")
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        list(_merges(tokens, scores, kinds)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    else:
        backend.normalizer = space
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Every way to make a piece of two others, the piece of the highest score first.

    Control pieces are never made: a marker in a text stays text.
    """
    normal = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _NORMAL
    }
    for token in sorted(normal, key=lambda token: (-scores[normal[token]], normal[token])):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                yield left, right
