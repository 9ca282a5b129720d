"""The programs of docs/sessions.md, engine.md and models.md run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import LocalBackend, MockBackend
from forkserve.engine.prompting import render_prompt
from forkserve.engine.protocol import Backend

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


def programs(page: Path = GUIDE) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(source: str, tmp_path: Path) -> str:
    script = tmp_path / "guide.py"
    script.write_text(source, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    root = {"PYTHONPATH": str(GUIDE.parents[1])}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, env=root
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_of_the_guide_run(tmp_path: Path) -> None:
    assert len(programs()) > 5
    run("\n".join(programs()), tmp_path)


@pytest.mark.model
def test_the_program_of_the_engine_page_runs(tmp_path: Path) -> None:
    (source,) = programs(GUIDE.with_name("engine.md"))
    assert "Paris" in run(source, tmp_path)


@pytest.mark.model
def test_the_program_of_the_models_page_runs(tmp_path: Path) -> None:
    (source,) = programs(GUIDE.with_name("models.md"))
    assert len(run(source, tmp_path).splitlines()) >= 3, "three answers"


def turns(backend: Backend, asked: str, lengths: dict[int, str]) -> None:
    """`next_turn` of the guide writes what the template writes, however the reply ended."""
    (source,) = (program for program in programs() if "def next_turn" in program)
    defined: dict[str, Any] = {}
    exec(source[: source.index("\nwith ")], defined)
    with Engine(backend) as eng:
        for length, reason in lengths.items():
            talk = [{"role": "user", "content": asked}]
            with eng.session(talk) as s:
                reply = s.generate(length)
                assert reply.finish_reason == reason
                defined["next_turn"](s, "Why? <|im_end|>")
                talk += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": "Why? <|im_end|>"},
                ]
                assert s.text == str(render_prompt(backend.tokenizer, talk))
                ends = s.tokens.count(backend.tokenizer.encode("<|im_end|>")[0])
                assert ends == s.text.count("<|im_end|>") - 1, "what the user said ends no turn"


def test_the_next_turn_is_closed_once_on_the_mock() -> None:
    said = MockBackend(ForkServeConfig()).tokenizer.encode("fine<|im_end|>")
    turns(MockBackend(ForkServeConfig(), replies=[said]), "How?", {len(said): "length"})
    turns(MockBackend(ForkServeConfig(), replies=["fine"]), "How?", {2: "length"})


@pytest.mark.model
def test_the_next_turn_is_closed_once_on_a_model() -> None:
    backend = LocalBackend(ForkServeConfig(capacity_pages=64))
    turns(backend, "Say hello.", {4: "length", 48: "eos"})
