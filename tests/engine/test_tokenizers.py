"""Tokenizers from GGUF and tokenizer.json, and text that streams out of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from forkserve.control.text import TextStream
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.engine.mock import ByteTokenizer
from forkserve.errors import ConfigError, ModelError
from forkserve.prompt_text import plain

CORPUS = [
    "An agent step is a tree: a trunk of tokens, branches that each add a few, one winner.",
    "the other thing there and then, 12 3456  78\n\n  naïve café é; rang, ring; doing, gone",
    "def fork(self, node: int) -> int:\n    return self.tree.fork(node)  # no page is touched\n",
] * 3
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = st.text(
    st.one_of(st.sampled_from("the oingrad  \n\t0123<>[]/|_"), st.characters(codec="utf-8")),
    max_size=40,
)


@cache
def pieces() -> tuple[str, ...]:
    """Merged pieces of a SentencePiece-like vocabulary, the most frequent first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab = tokenizer.get_vocab()
    return tuple(sorted((p for p in vocab if len(p) > 1), key=lambda p: vocab[p]))


@cache
def sentencepiece(prefix: bool) -> tuple[LocalTokenizer, dict[str, Any]]:
    tokens = ["<unk>", "<s>", "</s>"]
    kinds = [UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{i:02X}>" for i in range(256)]
    kinds += [BYTE] * 256
    tokens += ["[INST]", "   "]
    kinds += [CONTROL, USER_DEFINED]
    plain = [*pieces(), *(chr(i) for i in range(33, 127)), "▁", "é"]
    # The pieces of which "</s>" could be made, if markers were made like other pieces.
    plain += ["</", "s>"]
    tokens += plain
    kinds += [NORMAL] * len(plain)
    scores = [0.0] * (len(tokens) - len(plain)) + [-float(i) for i in range(len(plain))]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return LocalTokenizer.from_gguf(meta, "here"), meta


@cache
def byte_level(pre: str = "default") -> tuple[LocalTokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<|im_start|>", "<|im_end|>"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
    }
    return LocalTokenizer.from_gguf(meta, "here"), meta


def merged(text: str, meta: dict[str, Any]) -> list[str]:
    """SentencePiece's algorithm as written down: merge the best pair, the leftmost first."""
    kinds = meta["tokenizer.ggml.token_type"]
    score = {
        token: value
        for token, value, kind in zip(
            meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"], kinds, strict=True
        )
        if kind == NORMAL
    }
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        piece
        for symbol in symbols
        for piece in ([symbol] if symbol in score else [f"<0x{b:02X}>" for b in symbol.encode()])
    ]


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_sentencepiece_merges_by_score(text: str) -> None:
    for prefix in (False, True):
        tokenizer, meta = sentencepiece(prefix)
        ids = tokenizer.encode(text, special=False)
        if "   " not in text:  # a piece of its own, split off before
            given_text = f" {text}" if prefix and text else text
            got = [meta["tokenizer.ggml.tokens"][i] for i in ids]
            assert got == merged(given_text, meta)
            assert tokenizer.decode_bytes(ids).decode() == given_text


def test_markers_and_runs_of_spaces() -> None:
    tokenizer, meta = sentencepiece(False)
    tokens = meta["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("<s>[INST] the   x</s>")
    assert [tokens[i] for i in ids][:2] == ["<s>", "[INST]"]
    assert tokens.index("   ") in ids
    assert ids[-1] == tokens.index("</s>")
    assert tokenizer.decode_bytes(ids) == b"<s>[INST] the   x</s>"
    assert tokenizer.decode_bytes(ids, skip_special=True) == b" the   x"
    literal = tokenizer.encode("<s>[INST]</s>", special=False)
    assert not {tokens.index(name) for name in ("<s>", "</s>", "[INST]")} & set(literal)
    assert tokenizer.decode_bytes(literal) == b"<s>[INST]</s>"


def test_a_space_is_put_before_every_text_between_markers() -> None:
    tokenizer, _ = sentencepiece(True)
    assert tokenizer.decode_bytes(tokenizer.encode("the<s>the")) == b" the<s> the"
    assert tokenizer.encode("") == []


def test_template_names_default_to_those_of_sentencepiece() -> None:
    _, meta = sentencepiece(True)
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}"}
    tokenizer = LocalTokenizer.from_gguf({**meta, **template}, "here")
    assert tokenizer.render([]) == "<s></s><unk>"
    named = LocalTokenizer.from_gguf({**meta, **template, "tokenizer.ggml.bos_token_id": 2}, "here")
    assert named.render([]) == "</s></s><unk>"


def test_a_vocabulary_without_scores_is_refused() -> None:
    _, meta = sentencepiece(True)
    with pytest.raises(ModelError, match="pieces and 0 scores"):
        LocalTokenizer.from_gguf({**meta, "tokenizer.ggml.scores": None}, "here")
    with pytest.raises(ModelError, match="tokenizer 'bert' is not supported"):
        LocalTokenizer.from_gguf({**meta, "tokenizer.ggml.model": "bert"}, "here")


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_a_tokenizer_json_of_the_same_vocabulary_agrees(
    kind: str, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    tokenizer, _ = sentencepiece(True) if kind == "sentencepiece" else byte_level()
    folder = tmp_path_factory.getbasetemp() / kind
    if not folder.exists():
        folder.mkdir()
        tokenizer._backend.save(str(folder / "tokenizer.json"))
    twin = LocalTokenizer.from_folder(folder)
    ids = tokenizer.encode(text)
    assert twin.encode(text) == ids
    assert twin.decode_bytes(ids) == tokenizer.decode_bytes(ids)


def split(pre: str, text: str) -> list[str]:
    """Words before merging, as bytes of the vocabulary's single pieces."""
    tokenizer, _ = byte_level(pre)
    words = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[a:b] for _, (a, b) in words]


def test_pre_tokenizers() -> None:
    text = "I'LL pay 12345  x\n\n y"
    assert split("default", text) == ["I", "'", "LL", " pay", " 12345", " ", " x", "\n\n", " y"]
    assert split("llama-bpe", text) == [
        "I", "'LL", " pay", " ", "123", "45", " ", " x", "\n\n", " y",
    ]  # fmt: skip
    assert split("qwen2", text) == [
        "I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " ", " x", "\n\n", " y",
    ]  # fmt: skip
    assert split("smollm", "ab 123")[1:] == [" ", "1", "2", "3"]
    assert split("tekken", "don't aReadMe/2024 X\n") == [
        "don", "'t", " a", "Read", "Me", "/", "2", "0", "2", "4", " X", "\n",
    ]  # fmt: skip
    for other, same in (
        *(("llama-v3", "llama-bpe"), ("falcon3", "llama-bpe"), ("pixtral", "llama-bpe")),
        ("deepseek-r1-qwen", "qwen2"),
    ):
        assert split(other, text) == split(same, text)


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_words_that_no_merges_make(pre: str, whole: bool) -> None:
    """Llama 3 and Tekken take a word of the vocabulary as it is."""
    _, meta = byte_level(pre)
    tokens = [*meta["tokenizer.ggml.tokens"], "Ġzyx"]
    kinds = [*meta["tokenizer.ggml.token_type"], NORMAL]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = LocalTokenizer.from_gguf({**meta, **more}, "here")
    assert (tokenizer.encode(" zyx") == [len(tokens) - 1]) is whole
    assert tokenizer.decode_bytes(tokenizer.encode(" zyx")) == b" zyx"


def test_files_that_name_no_split() -> None:
    """Those of before May 2024: told by the architecture, or by a token that only Llama 3 has."""
    text = "I'LL pay 12345"
    for pre in ("qwen2", "llama-bpe", "default"):
        named, meta = byte_level(pre)
        bare = {key: value for key, value in meta.items() if key != "tokenizer.ggml.pre"}
        if pre == "llama-bpe":
            bare["tokenizer.ggml.tokens"] = [*meta["tokenizer.ggml.tokens"], "<|begin_of_text|>"]
        bare["general.architecture"] = "qwen3" if pre == "qwen2" else "llama"
        assert LocalTokenizer.from_gguf(bare, "here").encode(text) == named.encode(text)


# -- streams ---------------------------------------------------------------------------------


def makers() -> Sequence[LocalTokenizer]:
    return [sentencepiece(True)[0], sentencepiece(False)[0], byte_level()[0]]


@given(text=TEXTS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_is_the_whole_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    for tokenizer in makers():
        ids = tokenizer.encode(text, special=False)
        cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
        stream = TextStream(tokenizer.decode_bytes)
        got = [stream.push(ids[a:b]) for a, b in pairwise([0, *sorted(cuts), len(ids)])]
        got.append(stream.finish())
        whole = tokenizer.decode_bytes(ids).decode()
        assert "".join(got) == whole
        assert whole in (text, f" {text}")
        assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


@given(seed=st.data())
@settings(max_examples=100, deadline=None)
def test_any_ids_stream_to_their_decode(seed: st.DataObject) -> None:
    """Ids that form no text: broken characters are replaced as in the whole, but for the last."""
    for tokenizer in makers():
        ids = seed.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        stream = TextStream(tokenizer.decode_bytes)
        got = "".join(stream.push([i]) for i in ids) + stream.finish()
        whole = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
        assert whole in (got, f"{got}\ufffd")


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    for tokenizer in (*makers(), ByteTokenizer()):
        for text in ("a\ud800", plain("a\udfff"), "</s>\ud800" + plain("</s>"), "<|eos|>\ud800"):
            for special in (True, False):
                with pytest.raises(ConfigError, match=r"not valid Unicode.*position [0-9]"):
                    tokenizer.encode(text, special=special)
