"""Recorded workloads, read from beside the repository; every benchmark also runs without them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["absent", "load"]

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def load(name: str) -> list[dict[str, Any]] | None:
    """The objects of a recording; None if it is not there."""
    path = FOLDER / f"{name}.jsonl.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def absent(name: str) -> str:
    """What a report says instead."""
    return f"nothing measured: the recording ../shared/data/{name}.jsonl.gz is not there"
