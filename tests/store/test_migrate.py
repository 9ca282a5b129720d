"""A database that version 1 wrote: migrated, killed while it is, and what a newer one gets."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store, faults, schema
from forkserve.store.catalog import Catalog
from forkserve.store.rebuild import verify

from .engines import cold, engine

DATA = Path(__file__).parent / "data" / "v1"


def old_store(folder: Path) -> Path:
    """A store as ForkServe 0.1.0 left it: a session, a named state, one chunk."""
    folder.mkdir(parents=True)
    db = sqlite3.connect(folder / "catalog.db")
    db.executescript((DATA / "catalog.sql").read_text())
    db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    db.execute("PRAGMA user_version = 1")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    shutil.copytree(DATA / "chunks", folder / "chunks")
    for path in folder.rglob("*.kv"):  # a checkout has not the disk's blocks of the first one
        assert path.stat().st_blocks * 512 <= 8192
    return folder


def version(folder: Path) -> int:
    db = sqlite3.connect(folder / "catalog.db")
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    db.close()
    return found


def goes_on(folder: Path) -> None:
    """Everything that version 1 wrote is there and usable."""
    with Store(folder, restore="always") as store:
        assert verify(store.vault).clean
        eng = engine(store)
        assert eng.resume("old").cached_tokens == 256
        text = eng.tokens("old")
        assert text[:4] == [0, 7, 14, 21]
        assert text[303:306] == [1, 2, 3]
        assert eng.generate("old", 3) == cold(text, 3)
        assert eng.tokens(eng.restore("kept").id) == text[:306]
        assert eng._core.experience["old"].pause_ms("bash") == 12.5
        assert store.catalog.read("SELECT value FROM counter WHERE name = 'event_failed'") == [(1,)]
        eng.shutdown()


def test_version_1_is_migrated_and_loses_nothing(tmp_path: Path) -> None:
    folder = old_store(tmp_path / "s")
    with pytest.raises(StoreError, match="open it once for writing"):
        Catalog(folder, "reader")
    assert version(folder) == 1
    goes_on(folder)
    assert version(folder) == schema.VERSION
    goes_on(folder)


def test_a_migrated_schema_is_the_one_of_a_new_store(tmp_path: Path) -> None:
    Catalog(old_store(tmp_path / "old")).close()
    Catalog(tmp_path, "shared").close()

    def objects(folder: Path) -> list[tuple[str, ...]]:
        db = sqlite3.connect(folder / "catalog.db")
        found = db.execute("SELECT type, name FROM sqlite_schema ORDER BY 1, 2").fetchall()
        db.close()
        return [row for row in found if not row[1].startswith("sqlite_")]

    assert objects(tmp_path / "old") == objects(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("step", range(1, schema.VERSION))
@pytest.mark.parametrize("point", ["migrate.begin", "migrate.step", "migrate.done"])
def test_a_migration_that_fails_half_way_changes_nothing(
    tmp_path: Path, point: str, step: int
) -> None:
    folder = old_store(tmp_path / "s")
    reached_so_far: list[str] = []

    def hook(reached: str) -> None:
        reached_so_far.append(reached)
        if reached_so_far.count(point) == step:
            raise OSError("pulled the plug")

    faults.hook = hook
    with pytest.raises(StoreError, match="pulled the plug"):
        Catalog(folder)
    assert version(folder) == step + (point == "migrate.done")
    faults.hook = None
    goes_on(folder)


def test_a_newer_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    folder = old_store(tmp_path / "s")
    db = sqlite3.connect(folder / "catalog.db")
    db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    before = (folder / "catalog.db").read_bytes()
    for role in ("owner", "shared", "reader"):
        with pytest.raises(StoreError, match="use the newer ForkServe"):
            Store(folder, role)  # type: ignore[arg-type]
    assert (folder / "catalog.db").read_bytes() == before
