"""The real model: parity with Hugging Face, text, tokenizer, speed-critical properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forkserve.config import ForkServeConfig
from forkserve.engine.local import LocalBackend
from forkserve.engine.protocol import Tokenizer
from forkserve.types import Batch, Work

from .conftest import assert_close, reference
from .rig import Rig, greedy

# One worker, so that Hugging Face's model and tokenizer are made once: for the session, because
# tests on one kind of kernels run before those of another, and other modules' between them.
pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]

TEXT = (
    "A tree, not a prompt: a trunk of L tokens, k children that each add a few, one winner. "
    "def fork(self, node: int) -> int:\n    return self.tree.fork(node)  # 2 words, no page\n"
)


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="session")
def hugging_face(smollm2_file: Path) -> Any:
    """transformers' Llama with the weights as gguf's own reader gives them.

    (`from_pretrained(gguf_file=)` would need the package accelerate for the same.)
    """
    import gguf
    import transformers
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    state = {}
    for tensor in gguf.GGUFReader(smollm2_file).tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        *prefix, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = weight.view(-1, 32, 2, 576).swapaxes(1, 2).reshape(weight.shape)
        name = f"model.layers.{prefix[1]}.{_HF_NAMES[part]}" if prefix else _HF_NAMES[part]
        state[f"{name}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):  # no time for a random initialisation
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="session")
def their_tokenizer(smollm2_file: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name
    )


def test_parity(smollm2: LocalBackend, hugging_face: Any) -> None:
    """Prefill in one shot and in chunks, decode, and two children of one trunk."""
    model = hugging_face
    rig = Rig(smollm2)
    text = smollm2.tokenizer.encode(TEXT)
    want = reference(model, text)
    whole, chunked = rig.root(), rig.root()
    (got,) = rig.logits(rig.work(whole, text))
    assert_close(got, want)
    for low, high in ((0, 17), (17, 40), (40, 41), (41, len(text))):
        (got,) = rig.logits(rig.work(chunked, text[low:high]))
        assert_close(got, want[low:high])
    a, b = smollm2.tokenizer.encode("The winner is"), smollm2.tokenizer.encode("\n\ndef")
    left, right = rig.fork(whole), rig.fork(whole, 30)
    got_left, got_right = rig.logits(rig.work(left, a), rig.work(right, b))
    want = reference(model, text + a)[-len(a) :]
    assert_close(got_left, want)
    want = reference(model, text[:30] + b)[-len(b) :]
    assert_close(got_right, want)


def test_children_beside_each_other_or_alone(smollm2: LocalBackend) -> None:
    """Eight children decode in one pass, in fours, and one by one: the same logits."""
    rig = Rig(smollm2)
    trunk = rig.root()
    rig.run(rig.work(trunk, smollm2.tokenizer.encode(TEXT) * 3))
    works = [rig.work(rig.fork(trunk), [1000 + i]) for i in range(8)]
    together = rig.logits(*works)
    fours = rig.logits(*works[:4]) + rig.logits(*works[4:])
    alone = [rig.logits(work)[0] for work in works]
    for a, b, c in zip(together, fours, alone, strict=True):
        assert_close(a, c)
        assert_close(b, c)


def answer(backend: LocalBackend, question: str, limit: int = 16) -> str:
    tokenizer = backend.tokenizer
    rig, out = Rig(backend), []
    node = rig.root()
    feed = tokenizer.encode(tokenizer.render([{"role": "user", "content": question}]))
    while len(out) < limit:
        token = rig.run(rig.work(node, feed, sample=greedy()))[0].token
        if token in backend.info.eos_ids:
            break
        out.append(token)
        feed = [token]
    return tokenizer.decode_bytes(out).decode()


def test_it_answers(smollm2: LocalBackend) -> None:
    assert "Paris" in answer(smollm2, "What is the capital of France? Answer in one word.")


def test_openais_null_content(smollm2: LocalBackend) -> None:
    """Its template would add None to a text."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    user, tool = {"role": "user", "content": "Look."}, {"role": "tool", "content": "42"}
    said = {"role": "assistant", "tool_calls": [call]}
    render = smollm2.tokenizer.render
    want = render([user, {**said, "content": ""}, tool], add_generation_prompt=True)
    for lacking in (said, {**said, "content": None}):
        assert render([user, lacking, tool], add_generation_prompt=True) == want


def test_bfloat16(smollm2: LocalBackend) -> None:
    """bf16 weights and KV, by the vector route and by the widened one, near float32."""
    kernels = smollm2.info.extra["kernels"]
    small = LocalBackend(ForkServeConfig(capacity_pages=64), dtype="bfloat16", kernels=kernels)
    text = small.tokenizer.encode(TEXT)
    work = Work("s", 0, text, 0, (), None, all_logits=True)
    want = smollm2.execute(Batch([work])).results[0].logits
    wide = small.execute(Batch([work])).results[0].logits
    rig = Rig(small)
    node = rig.root()
    rig.run(rig.work(node, text[:-4]))
    narrow = [rig.logits(rig.work(node, [token]))[0][0] for token in text[-4:]]
    for got, against in ((wide, want), (np.stack(narrow), want[-4:])):
        assert np.linalg.norm(got - against) / np.linalg.norm(against) < 3e-2
        assert (got.argmax(-1) == against.argmax(-1)).mean() > 0.9
    assert small.info.kv_bytes_per_token * 2 == smollm2.info.kv_bytes_per_token == 46080
    small.close()


@pytest.mark.parametrize("variant", ["int8", "w8a16"])
def test_eight_bits_choose_as_float32_does(smollm2: LocalBackend, variant: str) -> None:
    kernels = smollm2.info.extra["kernels"]
    if (variant, kernels) == ("w8a16", "torch"):
        pytest.skip(f"{variant} has native kernels only")
    small = LocalBackend(ForkServeConfig(capacity_pages=64), dtype=variant, kernels=kernels)
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    work = Work("s", 0, small.tokenizer.encode(page)[:400], 0, (), None, all_logits=True)
    want = smollm2.execute(Batch([work])).results[0].logits
    got = small.execute(Batch([work])).results[0].logits
    assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.95  # 0.98 over 2,048 positions
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.03
    small.close()


def test_info(smollm2: LocalBackend) -> None:
    info = smollm2.info
    assert (info.vocab_size, info.max_context, info.device) == (49152, 8192, "cpu")
    assert [smollm2.tokenizer.decode_bytes([i]) for i in info.eos_ids] == [
        b"<|im_end|>",
        b"<|endoftext|>",
    ]


CORPUS = [
    "",
    "Hello, world! It's we've I'LL don't",
    "x = 12345+6789; for i in range(10):\n\t\tprint(f'{i:03d}')  # ok\n",
    "  leading, trailing and   inner   spaces  \n\n\n \t\t \r\n end ",
    "naïve café — “quotes” … ½ price, 3²",
    "你好，世界 こんにちは 안녕하세요 مرحبا שלום हिन्दी ไทย",
    "🙂🙃👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    '{"a": [1, 2.50, -3e-7], "b": null}',
    "https://example.org/a?b=c&d=%20e 2026-11-30T01:02:03Z 0xDEADBEEF",
]


def test_tokenizer_agrees_with_transformers(smollm2: LocalBackend, their_tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    theirs = their_tokenizer
    # transformers' conversion from GGUF drops the split into single digits that the model was
    # trained with (tokenizer.ggml.pre = "smollm"); llama.cpp and the original keep it.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in CORPUS:
        want = theirs.encode(text, add_special_tokens=False)
        assert smollm2.tokenizer.encode(text) == want, text
        assert smollm2.tokenizer.decode_bytes(want) == text.encode()


def test_tokenizer_round_trip_and_concatenation(smollm2: LocalBackend) -> None:
    tokenizer = smollm2.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    for text in CORPUS:
        for special in (True, False):
            ids = tokenizer.encode(text, special=special)
            assert tokenizer.decode_bytes(ids) == text.encode()
            for cut in range(len(ids) + 1):
                parts = tokenizer.decode_bytes(ids[:cut]) + tokenizer.decode_bytes(ids[cut:])
                assert parts == text.encode()


def test_special_tokens(smollm2: LocalBackend) -> None:
    tokenizer = smollm2.tokenizer
    text = "<|im_start|>hi<|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode_bytes(ids, skip_special=True) == b"hi"
    literal = tokenizer.encode(text, special=False)
    assert not {1, 2} & set(literal)
    assert tokenizer.decode_bytes(literal, skip_special=True) == text.encode()
    assert tokenizer.encode("12345") == [tokenizer.encode(c)[0] for c in "12345"]


def test_chat_template_agrees_with_transformers(
    smollm2: LocalBackend, their_tokenizer: Any
) -> None:
    theirs = their_tokenizer
    user = {"role": "user", "content": "a\n  b"}
    for messages in (
        [user],
        [{"role": "system", "content": "s"}, user, {"role": "assistant", "content": "x"}, user],
    ):
        for prompt in (True, False):
            want = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert smollm2.tokenizer.render(messages, add_generation_prompt=prompt) == want
