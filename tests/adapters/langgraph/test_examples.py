"""The examples run, and show what they promise."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
BACKENDS = [
    "mock",
    pytest.param("smollm2", marks=[pytest.mark.model, pytest.mark.xdist_group("smollm2")]),
]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # string annotations are looked up there
    spec.loader.exec_module(module)
    return module


def run(name: str, backend: str, capsys: pytest.CaptureFixture[str]) -> str:
    main = load(name).main
    if inspect.iscoroutinefunction(main):
        asyncio.run(main(backend))
    else:
        main(backend)
    return capsys.readouterr().out


@pytest.mark.parametrize("backend", BACKENDS)
def test_map_reduce(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("langgraph_map_reduce", backend, capsys)
    rows, alone = (int(n) for n in re.findall(r"(?<=: )\d+(?= rows)|(?<=would be )\d+", out))
    assert rows < alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_time_travel(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("langgraph_time_travel", backend, capsys)
    rows, more = (int(n) for n in re.findall(r"(\d+)(?: more)? rows", out))
    assert more < rows / 3
    assert "sessions opened: 1" in out


@pytest.mark.parametrize("backend", BACKENDS)
def test_agent(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain.agents")
    out = run("langgraph_agent", backend, capsys)
    assert "turn: " in out
    if backend == "mock":  # a model of 135M parameters may answer without looking
        assert "The next train leaves at 14:09." in out
        turns = re.findall(r"'prompt_tokens': (\d+), 'cached_tokens': (\d+)", out)
        prompt, cached = map(int, turns[1])
        assert cached > 0.8 * prompt
