"""The token that some models want before every text: who puts it there, and who doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from forkserve import Engine, PromptText, plain
from forkserve.engine.local import LocalBackend
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.engine.mock import ByteTokenizer
from forkserve.engine.prompting import opening_ids
from forkserve.errors import NodeError
from forkserve.types import SamplingParams

from .conftest import Checkpoints, tiny_config, tiny_tokenizer
from .test_tokenizers import byte_level, sentencepiece

BEGIN = 256  # <|im_start|> of the tiny tokenizer
END = 257


def folder_tokenizer(
    folder: Path, *, frame: tuple[str, ...] = (), named: bool = True, **config: Any
) -> LocalTokenizer:
    """frame: what the post-processor writes around a text."""
    folder.mkdir(exist_ok=True)
    tiny_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    if frame:
        ids = {"<|im_start|>": BEGIN, "<|im_end|>": END}
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(frame), special_tokens=list(ids.items())
        )
    backend.save(path)
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text()) | config
    if named:
        known["bos_token"] = "<|im_start|>"
    settings.write_text(json.dumps(known))
    return LocalTokenizer.from_folder(folder)


BOTH = ("<|im_start|>", "$A")


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize(
    ("frame", "named", "begins"),
    [
        ((), True, False),  # SmolLM2, Qwen
        (BOTH, True, True),  # Llama, Mistral, Gemma
        ((*BOTH, "<|im_end|>"), True, True),
        (("$A", "<|im_end|>"), True, False),
        (BOTH, False, False),  # no token has the role
    ],
)
def test_folders(
    tmp_path: Path, frame: tuple[str, ...], named: bool, begins: bool, said: bool | None
) -> None:
    """As Hugging Face: by the post-processor of tokenizer.json, whatever add_bos_token says."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": said}
    config = {key: value for key, value in config.items() if value is not None}
    tokenizer = folder_tokenizer(tmp_path, frame=frame, named=named, **config)
    assert tokenizer.begin_ids == ((BEGIN,) if begins else ())
    assert BEGIN not in tokenizer.encode("text")
    if named:
        theirs = AutoTokenizer.from_pretrained(tmp_path)("text")["input_ids"]
        assert opening_ids(tokenizer, "text") == [i for i in theirs if i != END]


def test_gguf() -> None:
    """By the file, or as llama.cpp has it for the kind of tokenizer."""

    def begin(meta: dict[str, Any], **keys: Any) -> tuple[int, ...]:
        more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        return LocalTokenizer.from_gguf({**meta, **more}, "here").begin_ids

    pieces, words = sentencepiece(True)[1], byte_level("smollm")[1]
    assert begin(pieces) == (1,)
    assert begin(pieces, add_bos_token=False) == ()
    assert begin(words) == begin(words, bos_token_id=5) == ()
    assert begin(words, bos_token_id=5, add_bos_token=True) == (5,)
    assert begin(byte_level("tekken")[1], bos_token_id=5) == (5,)
    assert begin(byte_level("llama-bpe")[1], bos_token_id=5) == (5,)
    assert begin(byte_level("llama-bpe")[1], bos_token_id=5, add_bos_token=False) == ()
    assert begin(byte_level("llama-bpe")[1]) == ()
    assert begin(pieces, bos_token_id=10**6) == ()


def test_once_and_before_plain_texts_alone(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, frame=BOTH)
    encode, text = tokenizer.encode, "a tree"
    assert opening_ids(tokenizer, text) == [BEGIN, *encode(text)]
    assert opening_ids(tokenizer, plain(text)) == [BEGIN, *encode(text)]
    assert opening_ids(tokenizer, plain("<|im_start|>")) == [
        BEGIN,
        *encode("<|im_start|>", special=False),
    ]
    assert opening_ids(tokenizer, f"<|im_start|>{text}") == [BEGIN, *encode(text)]
    framed = PromptText("user: ") + plain(text)
    assert opening_ids(tokenizer, framed) == encode(framed)
    assert opening_ids(tokenizer, "") == []
    assert opening_ids(ByteTokenizer(), text) == ByteTokenizer().encode(text)


@pytest.mark.parametrize("trusted", [True, False])
def test_sessions(checkpoint: Checkpoints, tmp_path: Path, trusted: bool) -> None:
    """What Hugging Face computes for a text, and nothing before a chat or what is added later."""
    model, weights = checkpoint("llama")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(weights / name)
    folder_tokenizer(tmp_path, frame=BOTH)
    config = tiny_config(split_special_tokens=not trusted)
    with Engine(LocalBackend(config, tmp_path)) as eng:
        text = [BEGIN, *eng.backend.tokenizer.encode("a tree")]
        with eng.session("a tree") as s:
            assert s.tokens == text
            s.append(" grows")
            s.commit("!")
            assert s.tokens.count(BEGIN) == 1
            reply = s.generate(4, SamplingParams(ignore_eos=True))
            import torch

            given = torch.tensor([s.tokens[:-4]])
            with torch.no_grad():
                want = model.generate(given, max_new_tokens=4, do_sample=False, eos_token_id=None)
            assert list(reply.tokens) == want[0, given.shape[1] :].tolist()
        with eng.session("a tree") as s:  # the whole text again, and longer
            s.commit("a tree grows", full=True)
            assert s.tokens == [BEGIN, *eng.backend.tokenizer.encode("a tree grows")]
            with eng.session(s.text) as same:  # which names the token
                assert same.tokens == s.tokens
        with eng.session(text[1:]) as s:  # begun without, as by ids or a template
            assert s.tokens == text[1:]
            s.commit("a tree grows", full=True)
            assert s.tokens == eng.backend.tokenizer.encode("a tree grows")
            with pytest.raises(NodeError, match="does not extend"):
                s.commit("a bush", full=True)
        with eng.session([{"role": "user", "content": "hi"}]) as s:
            assert s.text == "[user] hi\n"
