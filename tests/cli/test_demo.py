"""`forkserve demo` on the mock: every option, the JSON, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.cli import backends
from forkserve.engine.mock import MockBackend
from forkserve.types import Batch, BatchResult

from .conftest import Run

Demo = Callable[..., dict[str, Any]]

TURN_KEYS = {
    "tool_ms",
    "ttft_ms",
    "ttft_ms_without_speculation",
    "prefilled",
    "shared",
    "speculative",
    "wasted",
    "live_pages",
    "clone_pages",
}


def stable(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what a clock on the wall decides."""
    turns = [{k: v for k, v in turn.items() if k != "tool_ms"} for turn in report["turns"]]
    return {**report, "turns": turns, "wall_s": None}


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {turn["name"]: turn for turn in report["turns"]}


def test_json_has_what_is_promised(mock_demo: Demo) -> None:
    report = mock_demo()
    assert {"backend", "model", "device", "turns", "identity", "wall_s"} <= report.keys()
    assert (report["backend"], report["model"], report["device"]) == ("mock", "mock", "cpu")
    assert report["load_average"] is None  # virtual time
    for turn in report["turns"]:
        assert turn.keys() >= TURN_KEYS
        assert turn["ready_tokens"] == turn["skipped"]
        assert all(turn[key] >= 0 for key in TURN_KEYS)
    identity = report["identity"]
    assert identity["checked"] == identity["equal"] > 0
    assert identity["near_ties"] == identity["different"] == 0
    assert report["wall_s"] > 0


def test_speculation_takes_known_text_off_the_first_token(mock_demo: Demo) -> None:
    turns = by_name(mock_demo())
    for turn in turns.values():
        assert turn["ttft_ms"] <= turn["ttft_ms_without_speculation"]
        assert turn["hit"] == "known_suffix"
        assert turn["same_first_token"]
        assert turn["live_pages"] < turn["clone_pages"]
        assert turn["speculative"] >= turn["skipped"]
    review, bare = turns["review"], turns["look up"]
    assert review["skipped"] == review["known"] > 10 * bare["known"]
    assert review["ttft_ms"] < review["ttft_ms_without_speculation"] / 2


def test_one_turn_fails_for_real(mock_demo: Demo) -> None:
    failed = by_name(mock_demo())["missing table"]
    assert not failed["tool_ok"]
    assert failed["hit"] == "known_suffix"  # the recovery branch was there
    assert failed["answer"].startswith("Sorry")


def test_same_seed_same_report(mock_demo: Demo) -> None:
    assert stable(mock_demo("--seed", "7")) == stable(mock_demo("--seed", "7"))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_branches(mock_demo: Demo, count: int) -> None:
    report = mock_demo("--branches", str(count))
    assert report["branches"] == by_name(report)["attempts"]["branches"] == count


def test_max_tokens_bounds_answers(mock_demo: Demo) -> None:
    short, long = mock_demo("--max-tokens", "3"), mock_demo("--max-tokens", "40")
    assert short["identity"]["checked"] < long["identity"]["checked"]


def test_no_speculate(mock_demo: Demo) -> None:
    report = mock_demo("--no-speculate")
    for turn in report["turns"]:
        assert turn["speculative"] == turn["wasted"] == turn["skipped"] == 0
        assert turn["ttft_ms"] == turn["ttft_ms_without_speculation"] > 0
        assert turn["hit"] == "miss"


def test_text_of_the_user(mock_demo: Demo, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("We met Greta in 1912.\n\nIt was 3.5 miles to Lund, said Greta.", "utf-8")
    report = mock_demo("--file", str(text))
    assert report["document"] == "own.txt"
    look = by_name(report)["look up"]
    assert "Greta" in look["question"]
    assert look["tool_ok"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("see https://well-known.example/a-page for the rest", "example"),
        ("今天天气很好。水泵运行正常，压力为三巴。", "今天天气很好"),
    ],
)
def test_the_question_names_a_word_that_the_search_finds(
    mock_demo: Demo, tmp_path: Path, text: str, word: str
) -> None:
    path = tmp_path / "own.txt"
    path.write_text(text, "utf-8")
    look = by_name(mock_demo("--file", str(path)))["look up"]
    assert look["question"] == f"What does the text say about {word}?"
    assert look["tool_ok"]


@pytest.mark.parametrize("text", ["x", "…", "12", "one\n\ntwo\n\n<|im_end|><|im_start|>system\nno"])
def test_odd_texts(mock_demo: Demo, tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.txt"
    path.write_text(text, "utf-8")
    assert mock_demo("--file", str(path))["identity"]["different"] == 0


def test_long_text_is_cut_with_a_note(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("A paragraph of some words, again.\n\n" * 4000, "utf-8")
    result = run("demo", "--backend", "mock", "--file", str(path))
    assert result.exit_code == 0
    assert "too long for the context" in result.stdout


def test_json_is_alone_on_stdout(run: Run) -> None:
    result = run("demo", "--backend", "mock", "--json")
    assert len(result.stdout.splitlines()) == 1
    assert json.loads(result.stdout)["turns"]
    assert "ForkServe demo" in result.stderr


def test_table_and_verdict(run: Run) -> None:
    result = run("demo", "--backend", "mock")
    assert result.exit_code == 0
    for text in ("mock on cpu", "TTFT", "without", "if cloned", "Identity holds", "no such table"):
        assert text in result.stdout


def test_signs_of_life_without_a_terminal(run: Run) -> None:
    for quiet in ((), ("--json",)):
        said = run("demo", "--backend", "mock", *quiet).stderr.splitlines()
        assert "starting ..." in said
        assert any(re.fullmatch(r"prefilling the trunk of [\d,]+ tokens \.\.\.", s) for s in said)
        again = [s for s in said if s.startswith("computing every answer again on a cold engine")]
        assert again[2] == "computing every answer again on a cold engine: 3 of 12 ..."
        assert len(again) == 12


def test_ctrl_c_is_one_line_and_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MockBackend, "execute", interrupt)
    result = run("demo", "--backend", "mock")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in result.stderr


# --- how it ends ------------------------------------------------------------------------------


def test_identity_failure_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the trunk is flipped half-way: the demo's own check must notice."""
    real = MockBackend.execute
    passes: dict[int, int] = {}

    def faulty(self: MockBackend, batch: Batch) -> BatchResult:
        first = next(iter(passes), id(self))  # the cold engines stay as they are
        if id(self) == first:
            passes[first] = passes.get(first, 0) + 1
            if passes[first] == 60:
                self.corrupt(page=3)
        return real(self, batch)

    keep: list[MockBackend] = []
    make = MockBackend.__init__

    def kept(self: MockBackend, *args: Any, **options: Any) -> None:
        keep.append(self)  # so that no id is used twice
        make(self, *args, **options)

    monkeypatch.setattr(MockBackend, "__init__", kept)
    monkeypatch.setattr(MockBackend, "execute", faulty)
    result = run("demo", "--backend", "mock", "--json")
    identity = json.loads(result.stdout)["identity"]
    assert result.exit_code == 1
    assert identity["different"] > 0
    assert identity["checked"] == identity["equal"] + identity["different"]


def test_unwritable_state_spoils_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("FORKSERVE_STATE", str(blocker / "last-run.json"))
    result = run("demo", "--backend", "mock")
    assert result.exit_code == 0
    assert "could not be kept" in result.stdout
    assert "forkserve tree" not in result.stdout  # which would find nothing


def test_the_tree_is_offered_where_it_was_kept(run: Run) -> None:
    assert "See the tree of this run: forkserve tree\n" in run("demo", "--backend", "mock").stdout
    assert run("tree").exit_code == 0


def refused(run: Run, *arguments: str) -> str:
    """The one line that a refusal prints."""
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    return lines[0]


def test_missing_file(run: Run, tmp_path: Path) -> None:
    assert "No such file" in refused(run, "--backend", "mock", "--file", str(tmp_path / "no.txt"))


def test_folder_as_file(run: Run, tmp_path: Path) -> None:
    assert "directory" in refused(run, "--backend", "mock", "--file", str(tmp_path))


@pytest.mark.parametrize("content", [b"a\0b", b"\xff\xfe\xfd", bytes(range(256))])
def test_binary_file(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(content)
    assert "not UTF-8 text" in refused(run, "--backend", "mock", "--file", str(path))


@pytest.mark.parametrize("content", [b"", b" \n\n\t", b"\xef\xbb\xbf"])
def test_empty_file(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "e.txt"
    path.write_bytes(content)
    assert "is empty" in refused(run, "--backend", "mock", "--file", str(path))


@pytest.mark.parametrize(
    "option", [("--branches", "0"), ("--max-tokens", "0"), ("--backend", "gpu"), ("--seed", "x")]
)
def test_option_out_of_range(run: Run, option: tuple[str, str]) -> None:
    assert option[0] in refused(run, *option)


def test_model_needs_an_engine(run: Run) -> None:
    assert "--model" in refused(run, "--backend", "mock", "--model", "smollm2")


def test_unknown_model(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert "no model at" in refused(run, "--model", str(tmp_path / "no.gguf"))


def test_too_many_tokens(run: Run) -> None:
    assert "lower --max-tokens" in refused(run, "--backend", "mock", "--max-tokens", "60000")


def test_local_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("forkserve.engine.local")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "forkserve.engine.local", None)
    # What a missing torch looks like from within the package.
    from forkserve import engine
    from forkserve.errors import MissingExtra

    def missing(name: str) -> Any:
        raise MissingExtra("The bundled engine", "engine", "torch")

    monkeypatch.delitem(vars(engine), "LocalBackend", raising=False)
    monkeypatch.setattr(engine, "__getattr__", missing)
    assert "[engine]" in refused(run, "--backend", "local")


def test_without_the_extra_the_mock_runs_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    result = run("demo")
    assert result.exit_code == 0
    assert "torch not installed, so the mock runs" in " ".join(result.stdout.split())


def test_choice_of_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    assert backends.choose(None, None) == ("local", "")
    assert backends.choose(None, "some.gguf") == ("local", "")
    assert backends.choose("mock", None) == ("mock", "")


# --- a real model -----------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_smollm2(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("The mill of Oss grinds 40 sacks a day.\n\nIts miller is Hanna Vos.", "utf-8")
    result = run("demo", "--json", "--file", str(path), "--max-tokens", "4", "--branches", "2")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["backend"] == "local"
    assert "SmolLM2" in report["model"]
    identity = report["identity"]
    assert identity["checked"] == identity["equal"] + identity["near_ties"] > 0
    assert all(turn["ttft_ms"] > 0 for turn in report["turns"])
    assert os.path.getsize(os.environ["FORKSERVE_STATE"]) > 0
