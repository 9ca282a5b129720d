"""Peers in processes of their own, since their Python packages have no place in ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["LlamaCpp", "Vllm", "interpreter"]

HERE = Path(__file__).parent


def interpreter(module: str, variable: str) -> str | None:
    """The Python that has `module`: named by an environment variable, or this one; else None."""
    named = os.environ.get(variable)
    if named:
        return named
    return sys.executable if importlib.util.find_spec(module) else None


class _Worker:
    """A peer behind a pipe.  Every method gives seconds, taken in the worker."""

    module = variable = script = ""

    def __init__(self, *arguments: object) -> None:
        python = interpreter(self.module, self.variable)
        if python is None:
            raise RuntimeError(f"no {self.module}; set {self.variable} to a Python that has it")
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, str(HERE / self.script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
        )
        self.version = str(self._line()["ready"])

    @classmethod
    def there(cls) -> bool:
        """Whether a Python has the peer."""
        return interpreter(cls.module, cls.variable) is not None

    def prefill(self, tokens: list[int]) -> float:
        """A whole prompt, to the logits of its last token."""
        return self._ask("prefill", tokens=tokens)

    def decode(self, tokens: list[int], steps: int, k: int = 1) -> float:
        """`steps` tokens of k branches over `tokens`; the trunk's prefill does not count."""
        return self._ask("decode", tokens=tokens, steps=steps, k=k)

    def close(self) -> None:
        """End the worker."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, what: str, **arguments: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return float(self._line()["s"])

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker {self.script} ended with {self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        return value


class LlamaCpp(_Worker):
    """llama.cpp through `llama-cpp-python`: one context of unified KV."""

    module, variable = "llama_cpp", "FORKSERVE_LLAMACPP_PYTHON"
    script = "llamacpp_worker.py"

    def __init__(self, model: Path, *, threads: int, flash: bool, context: int) -> None:
        super().__init__(model, threads, int(flash), context)

    def fork(self, tokens: list[int], k: int) -> float:
        """``llama_memory_seq_cp``, for one of k branches."""
        return self._ask("fork", tokens=tokens, k=k)


class Vllm(_Worker):
    """vLLM on the CPU with automatic prefix caching.  model: a Hugging Face directory."""

    module, variable = "vllm", "FORKSERVE_VLLM_PYTHON"
    script = "vllm_worker.py"

    def __init__(self, model: Path, *, threads: int, dtype: str, context: int) -> None:
        super().__init__(model, threads, dtype, context)
