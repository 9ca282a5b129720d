"""`forkserve template-check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forkserve.installing import install_extra

from .conftest import Run

pytest.importorskip("tokenizers")

QUESTION = {"role": "user", "content": "Where is it?"}
ANSWER = {"role": "assistant", "content": "There."}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a template, and nothing else."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def test_a_prefix_that_holds(run: Run, model: Path, tmp_path: Path) -> None:
    talk = write(tmp_path / "talk.json", [QUESTION, ANSWER, QUESTION])
    result = run("template-check", str(model), talk)
    assert result.exit_code == 0, result.output
    assert "turn 1, then the user: " in result.stdout
    assert " 0 written anew" in result.stdout
    assert "The prefix holds after all 1 turns." in result.stdout


def test_the_built_in_conversation_shows_what_breaks(run: Run, model: Path) -> None:
    result = run("template-check", str(model))
    assert result.exit_code == 1, result.output
    assert "turn 1, then a tool's result" in result.stdout
    assert "the prefix breaks inside the turn" in result.stdout
    assert "- " in result.stdout
    assert "hink>\\nI have" in result.stdout
    assert "known while the tool runs" in result.stdout
    assert "RESULT" in result.stdout
    assert "The prefix breaks after 4 of 5 turns" in result.stdout


def test_a_template_that_writes_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text("")
    talk = write(tmp_path / "talk.json", [QUESTION, ANSWER, QUESTION])
    result = run("template-check", str(model), talk)
    assert result.exit_code == 1, result.output
    assert "leaves out the text of message 0, 1, 2 (from 0)" in result.stdout
    assert "The template leaves out the text of 3 messages." in result.stdout
    result = run("template-check", str(model), talk, "--json")
    assert json.loads(result.stdout)["steps"][0]["lost"] == [0, 1, 2]


def test_json(run: Run, model: Path, tmp_path: Path) -> None:
    raw = {**ANSWER, "raw": "There it is."}
    talk = write(tmp_path / "talk.json", {"messages": [QUESTION, raw, QUESTION]})
    result = run("template-check", str(model), talk, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    (step,) = report["steps"]
    assert step["again"] == step["held"] - step["kept"] == len(" it is.")
    assert (step["before"], step["assumed"], step["inside"]) == (" it is.", False, "turn")
    assert step["after"].startswith(".<|im_end|>")


def test_what_cannot_be_read(run: Run, model: Path, tmp_path: Path) -> None:
    for arguments, match in (
        ([str(tmp_path / "none.gguf")], "a folder with tokenizer.json, or"),
        ([str(tmp_path)], "no tokenizer.json"),
        ([str(model), str(tmp_path / "none.json")], "cannot read the conversation"),
        ([str(model), write(tmp_path / "talk.json", [QUESTION])], "no turn"),
        ([str(model), write(tmp_path / "other.json", {"a": 1})], "no messages"),
    ):
        result = run("template-check", *arguments)
        assert result.exit_code == 2, result.output
        assert match in result.stderr
    (model / "chat_template.jinja").unlink()
    result = run("template-check", str(model))
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    (tmp_path / "bad.json").write_text("{")
    result = run("template-check", str(model), str(tmp_path / "bad.json"))
    assert "cannot read the conversation" in result.stderr


def test_without_the_engine_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("forkserve.engine.local")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("template-check", "smollm2")
    assert result.exit_code == 2
    assert "needs the module 'torch'" in result.stderr
    assert install_extra("engine") in result.stderr


@pytest.mark.model
def test_smollm2(run: Run) -> None:
    result = run("template-check", "smollm2", "--json")
    assert result.exit_code == 1
    steps = json.loads(result.stdout)["steps"]
    assert [step["then"] for step in steps] == ["tool", "user", "tool", "tool", "user"]
    assert steps[-1]["ok"]  # the one turn without reasoning
    assert all(step["known"] > 10 for step in steps if step["then"] == "tool")
