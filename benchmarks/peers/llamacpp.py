"""llama.cpp as a peer: a worker process, since its Python package has no place in ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["LlamaCpp", "python_with_llamacpp"]

VARIABLE = "FORKSERVE_LLAMACPP_PYTHON"
WORKER = Path(__file__).with_name("llamacpp_worker.py")


def python_with_llamacpp() -> str | None:
    """The interpreter that has `llama-cpp-python`: named by a variable, or this one; else None."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


class LlamaCpp:
    """One context in one process.  Every method gives seconds, taken in the worker."""

    def __init__(self, model: Path, *, threads: int, flash: bool, context: int) -> None:
        python = python_with_llamacpp()
        if python is None:
            raise RuntimeError(f"no llama-cpp-python; set {VARIABLE} to a Python that has it")
        command = [python, str(WORKER), str(model), str(threads), str(int(flash)), str(context)]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean
        )
        self.version = str(self._line()["ready"])

    def prefill(self, tokens: list[int]) -> float:
        """A whole prompt, to the logits of its last token."""
        return self._ask("prefill", tokens=tokens)

    def decode(self, tokens: list[int], steps: int, k: int = 1) -> float:
        """`steps` tokens of k branches over `tokens`; the trunk's prefill does not count."""
        return self._ask("decode", tokens=tokens, steps=steps, k=k)

    def fork(self, tokens: list[int], k: int) -> float:
        """``llama_memory_seq_cp``, for one of k branches."""
        return self._ask("fork", tokens=tokens, k=k)

    def close(self) -> None:
        """End the worker."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, what: str, **arguments: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return float(self._line()["s"])

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the llama.cpp worker ended with {self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        return value
