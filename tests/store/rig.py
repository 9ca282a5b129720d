"""Stores for tests: a fingerprint, a chain, rows that are a function of the tokens, a vault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forkserve.store.catalog import Catalog, Role
from forkserve.store.depots import Depot, LocalDepot
from forkserve.store.identity import Fingerprint, Link, fingerprint, plan_chain
from forkserve.store.vault import Loaded, Vault

from .test_identity import FIELDS

PRINT = fingerprint({**FIELDS, "layout": {"dtype": "float32", "vector": 8, "row_bytes": 32}})
SIZE = 4  # tokens of a chunk in these tests


def rows(link: Link) -> bytes:
    """The payload of a link: 8 floats a token, different for every chain."""
    seed = int.from_bytes(link.id[:8], "little")
    return np.random.default_rng(seed).normal(size=(link.count, 8)).astype(np.float32).tobytes()


def chain(tokens: Sequence[int], salt: str = "") -> list[Link]:
    return plan_chain(tokens, salt, SIZE)


def vault(
    folder: Path, role: Role = "shared", depots: Sequence[Depot] | None = None, **options: Any
) -> Vault:
    folder.mkdir(exist_ok=True)
    catalog = Catalog(folder, role)
    return Vault(catalog, depots or [LocalDepot(folder / "chunks")], **options)


def load(v: Vault, links: Sequence[Link], made: Fingerprint = PRINT) -> list[Loaded]:
    """Every chunk that can be had, root first, up to the first that can't."""
    out = []
    for found in v.find(made, links):
        loaded = v.load(found)
        if loaded is None:
            break
        out.append(loaded)
    return out


def good(v: Vault, links: Sequence[Link]) -> int:
    """How many chunks load, each compared with what was put in."""
    loaded = load(v, links)
    for one in loaded:
        assert bytes(one.payload) == rows(one.found.link)
    return len(loaded)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "chunks").rglob("*.kv"))
