"""Models from GGUF: the same logits as from safetensors, in every tensor type."""

from __future__ import annotations

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

from .conftest import LLAMA3, VOCAB, Checkpoints, assert_close, reference, tiny_config, tiny_model
from .gguf_files import write_gguf

TEXT = [3, 5, 250, 17, 80] * 20
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

TWINS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama", "llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama", "llama", {"head_dim": 80}),
    ("mistral", "llama", {"sliding_window": 20}),
    ("qwen2", "qwen2", {"rope_parameters": YARN}),
    ("qwen2", "qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    ("gemma2", "gemma2", {"sliding_window": 20, "tie_word_embeddings": True}),
    (
        "gemma3",
        "gemma3",
        {"num_hidden_layers": 7, "sliding_window": 20, "tie_word_embeddings": True}
        | {"rope_parameters": GLOBAL},
    ),
]


def logits(path: Path) -> np.ndarray:
    backend = LocalBackend(tiny_config(), path)
    assert backend.info.vocab_size == VOCAB
    assert backend.info.eos_ids == (257,)
    work = Work("s", 0, TEXT, 0, (), None, all_logits=True)
    got = backend.execute(Batch([work])).results[0].logits
    backend.close()
    assert got is not None
    return got


@pytest.mark.parametrize(("family", "arch", "changes"), TWINS)
def test_twins(
    checkpoint: Checkpoints, tmp_path: Path, family: str, arch: str, changes: dict[str, Any]
) -> None:
    model, folder = checkpoint(family, **changes)
    from_gguf = logits(write_gguf(tmp_path / "m.gguf", model, arch))
    np.testing.assert_allclose(from_gguf, logits(folder), atol=1e-5, rtol=0)
    assert_close(from_gguf, reference(model, TEXT))


def test_rope_factors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Llama 3 in GGUF: its rotary scaling comes as a tensor of divisors."""
    model, _ = checkpoint("llama", rope_parameters=LLAMA3)
    plain = 1e4 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    got = logits(write_gguf(tmp_path / "m.gguf", model, rope_factors=factors))
    assert_close(got, reference(model, TEXT))


# -- tensor types ----------------------------------------------------------------------------

BLOCK_TYPES = {  # where a block has its float16 scales
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}
PACKED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def random_blocks(array: np.ndarray, kind: Any, scales: slice) -> np.ndarray:
    """Blocks of random weights: for these types the package can only unpack."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(array.size)
    blocks = draw.integers(0, 256, (array.size // block, size), dtype=np.uint8)
    width = scales.stop - scales.start
    tiny = np.full((len(blocks), width // 2), 5e-5, np.float16)
    blocks[:, scales] = tiny.view(np.uint8).reshape(len(blocks), width)
    return blocks.reshape(array.shape[0], -1)


@pytest.mark.parametrize("name", [*PACKED, *BLOCK_TYPES])
def test_a_model_of_every_type(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    # Rows of 256 values: one block of the largest type.
    model = tiny_model("qwen2", hidden_size=256, intermediate_size=256)
    packed: dict[bytes, np.ndarray] = {}

    def pack(array: np.ndarray) -> np.ndarray:
        if name in BLOCK_TYPES:
            blocks = random_blocks(array, kind, BLOCK_TYPES[name])
        else:
            blocks = gguf.quants.quantize(array, kind)
        packed[array.tobytes()] = gguf.quants.dequantize(blocks, kind).reshape(array.shape)
        return blocks

    path = write_gguf(tmp_path / "m.gguf", model, "qwen2", kind=kind, pack=pack)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.tensor(packed[parameter.numpy().tobytes()]))
    assert_close(logits(path), reference(model, TEXT))

    file = GGUFFile(path)
    want = model.state_dict()["model.layers.1.mlp.gate_proj.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(want.shape, dtype=dtype)
        file.read("blk.1.ffn_gate.weight", out)
        torch.testing.assert_close(out, want.to(dtype), rtol=0, atol=0)


def write_one(path: Path, blocks: np.ndarray, kind: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ2_S", "TQ2_0", "MXFP4"])
def test_what_the_package_unpacks_beyond(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 60, (8, 16 * size), dtype=np.uint8)
    want = torch.tensor(gguf.quants.dequantize(blocks, kind))
    out = torch.empty(want.shape)
    GGUFFile(write_one(tmp_path / "m.gguf", blocks, kind)).read("x", out)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def test_a_type_that_nobody_unpacks(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.I32
    file = GGUFFile(write_one(tmp_path / "m.gguf", np.zeros((4, 4), np.int32), kind))
    with pytest.raises(ModelError, match="'x' has type I32: not supported"):
        file.read("x", torch.empty(4, 4))
