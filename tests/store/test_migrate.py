"""Databases of older versions of the schema: migrated, killed while they are, and newer ones."""

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

DATA = Path(__file__).parent / "data"
PINNED = sorted(int(path.name[1:]) for path in DATA.glob("v*"))
OLD = [version for version in PINNED if version < schema.VERSION]


def old_store(folder: Path, version: int = 1) -> Path:
    """A store as the code of that schema left it: a session, a named state, one chunk.

    From 2 on with what 1 did not know: a chunk that a further place is to get, a tool's output, a
    scrub, a move to memory (in 3 with its worth).
    """
    folder.mkdir(parents=True)
    db = sqlite3.connect(folder / "catalog.db")
    db.executescript((DATA / f"v{version}" / "catalog.sql").read_text())
    db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {version}")
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


def counts(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """What is stored beside the session."""
    asked = {
        "tools": "SELECT tool, hex(ids) FROM tool_output",
        "waiting": "SELECT content, place, tries, error FROM outbox",
        "hashed": "SELECT content, verified_at FROM replica",
        "worth": "SELECT verdict, reason, worth, against FROM decision WHERE what = 'move'",
        "events": "SELECT kind, count(*) FROM event GROUP BY kind ORDER BY kind",
        "totals": "SELECT substr(name, 7), value FROM counter ORDER BY name",
        "meter": "SELECT tenant, name, value FROM meter ORDER BY name",
    }
    db = sqlite3.connect(folder / "catalog.db")
    found = {what: db.execute(sql).fetchall() for what, sql in asked.items()}
    db.close()
    return found


def goes_on(folder: Path) -> None:
    """Everything that the old version wrote is there and usable."""
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
        failed = store.catalog.read("SELECT count(*) FROM event WHERE kind = 'failed'")
        assert failed[0][0] >= 1
        assert failed == store.catalog.read("SELECT value FROM counter WHERE name = 'event_failed'")
        eng.shutdown()


@pytest.mark.parametrize("old", OLD)
def test_an_older_version_is_migrated_and_loses_nothing(tmp_path: Path, old: int) -> None:
    folder = old_store(tmp_path / "s", old)
    with pytest.raises(StoreError, match="open it once for writing"):
        Catalog(folder, "reader")
    assert version(folder) == old
    before = counts(folder) if old > 2 else None  # those before lack what is asked for
    Catalog(folder, "shared").close()
    assert version(folder) == schema.VERSION
    after = counts(folder)
    assert before in (None, after)
    assert after["events"] == after["totals"]
    assert {value for _, _, value in after["meter"]} == {306.0 if old == 1 else 306.25}
    assert [place for _, place, *_ in after["waiting"]] == (["object"] if old > 1 else [])
    assert after["tools"] == ([("bash", "090000000800000007000000")] if old > 1 else [])
    goes_on(folder)
    goes_on(folder)


def test_there_is_a_fixture_of_every_version() -> None:
    """Whoever adds version N pins what N - 1 wrote: run its code, then `Connection.iterdump`."""
    assert [*range(1, schema.VERSION)] == OLD


@pytest.mark.parametrize("old", OLD)
def test_a_migrated_schema_is_the_one_of_a_new_store(tmp_path: Path, old: int) -> None:
    Catalog(old_store(tmp_path / "old", old)).close()
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
