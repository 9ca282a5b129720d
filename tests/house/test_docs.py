"""The documentation names what the code has, its links lead somewhere, and its programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import click
import pytest

from forkserve import SamplingParams, errors
from forkserve.config import ForkServeConfig
from forkserve.control.generation import FinishReason
from scripts import reference

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")])
BOOK = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md")
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


def mentioned(word: str) -> bool:
    """Whether a page has `word` as a whole word in code style."""
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", BOOK) is not None


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ForkServeConfig.model_fields)
def test_setting_is_documented(name: str) -> None:
    assert mentioned(name)
    assert ForkServeConfig.model_fields[name].description, "say its meaning and its unit"


@pytest.mark.parametrize("name", errors.__all__)
def test_error_is_documented(name: str) -> None:
    assert mentioned(name)


def verbs() -> list[str]:
    """Public members of Engine, Session and Branch; one sentinel where they cannot be imported."""
    try:
        return [f"{face}.{name}" for face in reference.FACES for name in reference.methods(face)]
    except (ImportError, AttributeError):
        return ["Engine"]


def command_names() -> list[str]:
    """Commands of the program; one sentinel where they cannot be imported."""
    try:
        return list(reference.commands())
    except (ImportError, AttributeError, StopIteration):
        return ["demo"]


@pytest.mark.parametrize("verb", verbs())
def test_verb_is_documented(verb: str) -> None:
    face, _, name = verb.partition(".")
    member = reference.methods(face)[name]
    assert re.search(rf"(?<!\w){name}\b", BOOK)
    assert reference.first_paragraph(member), f"{verb} has no docstring"


@pytest.mark.parametrize("name", command_names())
def test_command_is_documented(name: str) -> None:
    command = reference.commands()[name]
    assert f"forkserve {name}" in BOOK
    assert command.help, "a command without help"
    for option in command.params:
        argument = isinstance(option, click.Argument)
        assert argument or getattr(option, "help", None), f"forkserve {name}: {option.name}"


def test_sampling_is_explained() -> None:
    """Every parameter and every way to end has a row with a meaning."""
    rows = "\n".join(reference.sampling_section())
    names = [field.name for field in fields(SamplingParams)]
    for name in [*names, *get_args(FinishReason)]:
        row = next(line for line in rows.splitlines() if line.startswith(f"| `{name}` |"))
        assert len(row.split("|")[-2]) > 10, row


def test_reference_page_is_up_to_date() -> None:
    # In a process of its own: click remembers help options of commands that ran in this one.
    command = [sys.executable, ROOT / "scripts" / "reference.py", "--check"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run: make docs\n{done.stdout}{done.stderr}"


def shell_lines() -> Iterator[str]:
    """Commands shown in fenced blocks."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match[2] in ("sh", "bash", "shell", "console"):
                yield from (line.strip().removeprefix("$ ") for line in match[3].splitlines())


def test_shown_commands_exist() -> None:
    """`make X` and `forkserve X` in the pages are real targets and commands."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    top = {name.split()[0] for name in reference.commands()}
    shown = re.findall(r"`make ([a-z]+)", BOOK)
    shown += [m[1] for line in shell_lines() if (m := re.match(r"make ([a-z]+)", line))]
    assert set(shown) - targets == set()
    called = re.findall(r"`forkserve ([a-z][\w-]*)", BOOK)
    called += [m[1] for line in shell_lines() if (m := re.match(r"forkserve ([a-z][\w-]*)", line))]
    assert set(called) - top == set()


# --- links ------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Heading anchors of a page, as forges make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+\s+(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    links = re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", text)
    links += re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, re.MULTILINE)
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert broken == []


# --- programs ---------------------------------------------------------------------------------
# A line `<!-- run: no -->` right above a block says that it is a fragment; `<!-- run: model -->`
# that it needs SmolLM2.  All others run on the mock, each alone.


@dataclass(frozen=True)
class Block:
    """A fenced program: its source, the line it starts on, and how it is to be run."""

    source: str
    line: int
    how: str


def blocks(page: Path) -> list[Block]:
    """The Python programs of a page."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = []
    for match in FENCE.finditer(text):
        if match[2] == "python":
            mark = re.search(r"<!-- run: (\w+)[^\n]*-->\s*$", text[: match.start()])
            line = text.count("\n", 0, match.start(3))
            found.append(Block(match[3], line, mark[1] if mark else "mock"))
    return found


PRELUDE = """
system_and_user_tokens = list(range(5, 205))
wrap, recov, observation = [7] * 12, [8] * 9, list(range(30, 90))
"""


def run_blocks(chosen: list[Block], folder: Path) -> None:
    """Run programs one after the other in one fresh interpreter; faults show the README line."""
    program = "namespace = {'__name__': '__main__'}\n"
    program += f"exec({PRELUDE!r}, namespace)\n"
    for block in chosen:
        padded = "\n" * block.line + block.source
        program += f"exec(compile({padded!r}, {str(README)!r}, 'exec'), namespace)\n"
    script = folder / "readme.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_programs_run_on_the_mock(tmp_path: Path) -> None:
    chosen = [block for block in blocks(README) if block.how == "mock"]
    assert chosen, "README.md shows no program"
    for block in chosen:  # each alone: a reader copies one
        run_blocks([block], tmp_path)


@pytest.mark.model
def test_readme_programs_run_on_the_model(tmp_path: Path) -> None:
    run_blocks([block for block in blocks(README) if block.how == "model"], tmp_path)


def test_readme_marks_are_known() -> None:
    assert {block.how for block in blocks(README)} <= {"mock", "model", "no"}
