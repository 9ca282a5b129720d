"""The catalog: schema, ownership, look-up against a naive oracle, first writer wins, rebuild."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forkserve.errors import StoreError
from forkserve.store import schema
from forkserve.store.catalog import Catalog, CatalogFault
from forkserve.store.chunks import Header, build
from forkserve.store.identity import Link, fingerprint
from forkserve.store.rebuild import rebuild, verify
from forkserve.store.vault import Vault

from .rig import PRINT, SIZE, chain, files, good, rows, vault
from .test_identity import FIELDS

# -------------------------------------------------------------------- schema


def test_every_table_is_strict_and_made_to_be_joined(tmp_path: Path) -> None:
    import sqlite_utils

    catalog = Catalog(tmp_path)
    with catalog.locked() as db:
        tables = sqlite_utils.Database(db).tables
        assert len(tables) > 15
        assert all(table.strict for table in tables), "a table is not STRICT"
        assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert (tmp_path / "catalog.db").stat().st_mode & 0o077 == 0
    catalog.close()
    catalog.close()


def test_a_newer_schema_is_refused_and_not_touched(tmp_path: Path) -> None:
    Catalog(tmp_path).close()
    db = sqlite3.connect(tmp_path / "catalog.db")
    db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    for role in ("owner", "shared", "reader"):
        with pytest.raises(StoreError, match="use the newer ForkServe"):
            Catalog(tmp_path, role)  # type: ignore[arg-type]


def test_a_foreign_a_broken_and_a_missing_database_are_told_apart(tmp_path: Path) -> None:
    for name in ("foreign", "broken", "empty"):
        (tmp_path / name).mkdir()
    db = sqlite3.connect(tmp_path / "foreign" / "catalog.db")
    db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(StoreError, match="another program"):
        Catalog(tmp_path / "foreign")
    (tmp_path / "broken" / "catalog.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="cannot open the catalog"):
        Catalog(tmp_path / "broken")
    with pytest.raises(StoreError, match="is this the directory of a store"):
        Catalog(tmp_path / "empty", "reader")


def test_older_versions_are_migrated_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog(tmp_path).close()
    seen: list[int] = []

    def step(db: sqlite3.Connection) -> None:
        seen.append(1)
        db.execute("ALTER TABLE chunk ADD COLUMN note TEXT")

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, step])
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(StoreError, match="open it once for writing"):
        Catalog(tmp_path, "reader")
    for _ in range(2):
        catalog = Catalog(tmp_path)
        assert catalog.read("SELECT note FROM chunk") == []
        catalog.close()
    assert seen == [1]


def test_a_reader_reads_a_read_only_directory_and_writes_nothing(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = chain(range(8))
    v.put(PRINT, links, rows)
    reader = Catalog(tmp_path, "reader")
    assert len(reader.lookup(PRINT, links)) == 2
    with pytest.raises(StoreError, match="for reading only"):
        reader.record("disk", [])
    reader.event("ignored")
    reader.close()
    v.catalog.close()


# -------------------------------------------------------------------- ownership


def test_one_owner_at_a_time_and_any_number_of_others(tmp_path: Path) -> None:
    one = Catalog(tmp_path, "owner")
    assert one.own is not None
    assert one.own.epoch == 1
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        Catalog(tmp_path, "owner")
    others = [Catalog(tmp_path, "shared"), Catalog(tmp_path, "reader"), Catalog(tmp_path, "reader")]
    for other in others:
        other.close()
    one.close()
    two = Catalog(tmp_path, "owner")
    assert two.own is not None
    assert (two.own.epoch, two.own.taken_from) == (2, None)
    two.close()


def owning_child(folder: Path) -> subprocess.Popen[bytes]:
    code = f"""
import sys, time
from pathlib import Path
from forkserve.store.catalog import Catalog
c = Catalog(Path({str(folder)!r}), "owner")
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def test_a_dead_owner_is_replaced_and_the_take_over_is_on_record(tmp_path: Path) -> None:
    with owning_child(tmp_path) as child:
        with pytest.raises(StoreError, match=f"process {child.pid}"):
            Catalog(tmp_path, "owner")
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, and stays one
        mine = Catalog(tmp_path, "owner")
        assert mine.own is not None
        assert (mine.own.epoch, mine.own.taken_from) == (2, child.pid)
        assert mine.events("takeover")[0]["pid"] == child.pid
        mine.close()


def test_an_owner_that_was_replaced_can_write_no_session(tmp_path: Path) -> None:
    mine = Catalog(tmp_path, "owner")
    with mine.write() as db:
        db.execute("UPDATE owner SET token = 'other', pid = 1")
    with pytest.raises(StoreError, match="taken over by process 1"), mine.write(owned=True):
        pass
    with mine.write() as db:  # chunks it may still add
        db.execute("SELECT 1")
    mine.close()


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ("boot = 'other-boot/pid:[1]'", True),
        ("started = '1'", True),  # the pid was used again
        ("pid = 2147483646", True),
        ("boot = substr(boot, 1, instr(boot, '/')) || 'pid:[7]'", False),  # another container
    ],
)
def test_who_counts_as_dead(tmp_path: Path, change: str, taken: bool) -> None:
    first = Catalog(tmp_path, "owner")
    with first.write() as db:
        db.execute(f"UPDATE owner SET {change}")
    if taken:
        Catalog(tmp_path, "owner").close()
    else:
        with pytest.raises(StoreError, match="cannot be checked"):
            Catalog(tmp_path, "owner")
        Catalog(tmp_path, "owner", force=True).close()
    first.close()


# -------------------------------------------------------------------- look-up


def put_row(catalog: Catalog, link: Link, *, form: str = "raw", mark: int = 0) -> str:
    """A catalogued chunk without bytes: the catalog believes its caller."""
    header, _ = build(
        Header(
            fingerprint=PRINT.digest,
            meta=PRINT.text,
            parent=link.parent,
            chain=link.id,
            start=link.start,
            count=link.count,
            tokens=link.tokens,
            format=form,
            stored_bytes=4096 + mark,
            raw_bytes=4096,
            payload_hash=bytes(32),
        )
    )
    catalog.record("disk", [(header, header.file_bytes)])
    return header.content


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=40),
    st.lists(st.integers(0, 2), min_size=4, max_size=40),
    st.sets(st.integers(0, 9)),
)
def test_longest_prefix_equals_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory, stored: list[int], wanted: list[int], holes: set[int]
) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("c"))
    kept = {link.id for number, link in enumerate(chain(stored)) if number not in holes}
    for link in chain(stored):
        if link.id in kept:
            put_row(catalog, link)
    links, expected = chain(wanted), 0
    while expected < len(links) and links[expected].id in kept:
        expected += 1
    queries: list[str] = []
    catalog.known_fingerprint(PRINT)
    with catalog.locked() as db:
        db.set_trace_callback(queries.append)
    assert len(catalog.lookup(PRINT, links)) == expected
    assert len(queries) <= 1
    catalog.close()


@pytest.mark.parametrize("column", ["parent = 'x'", "start = 99", "tokens = 5"])
def test_a_row_that_disagrees_ends_the_prefix(tmp_path: Path, column: str) -> None:
    catalog = Catalog(tmp_path)
    links = chain(range(12))
    for link in links:
        put_row(catalog, link)
    with catalog.write() as db:
        db.execute(f"UPDATE chunk SET {column} WHERE chain = ?", (links[1].id.hex(),))
    assert len(catalog.lookup(PRINT, links)) == 1
    catalog.close()


@pytest.mark.parametrize("field", FIELDS)
def test_one_changed_identity_field_never_hits(tmp_path: Path, field: str) -> None:
    catalog = Catalog(tmp_path)
    links = chain(range(8))
    for link in links:
        put_row(catalog, link)
    fields: dict[str, Any] = {k: v for k, v in PRINT.fields.items() if k != "format"}
    assert len(catalog.lookup(fingerprint(fields), links)) == 2
    value = fields[field]
    if isinstance(value, dict):
        inner = next(k for k in value if k != "determinism")
        fields[field] = {**value, inner: "changed"}
    else:
        fields[field] = "changed"
    assert catalog.lookup(fingerprint(fields), links) == []
    assert catalog.lookup(PRINT, chain(range(8), "other salt")) == []
    catalog.close()


def test_lossless_is_preferred_and_lossy_served_only_on_request(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    (link,) = chain(range(SIZE))
    put_row(catalog, link, form="int8")
    assert catalog.lookup(PRINT, [link]) == []
    assert [f.format for f in catalog.lookup(PRINT, [link], lossy=True)] == ["int8"]
    put_row(catalog, link, form="zstd")
    assert [f.format for f in catalog.lookup(PRINT, [link], lossy=True)] == ["zstd"]
    put_row(catalog, link)
    assert [f.format for f in catalog.lookup(PRINT, [link])] == ["raw"]
    catalog.close()


# -------------------------------------------------------------------- rows and bytes


def test_the_first_writer_wins_and_the_divergence_is_on_record(tmp_path: Path) -> None:
    v = vault(tmp_path)
    (link,) = chain(range(SIZE))
    v.put(PRINT, [link], rows)
    kept = files(tmp_path)
    other = Vault(Catalog(tmp_path), list(v.depots.values()))
    other._store([other.pack(PRINT, link, rows(chain(range(1, 1 + SIZE))[0]))])
    assert files(tmp_path) == kept, "the loser's file is named by nothing: it is gone"
    assert good(v, [link]) == 1
    assert len(v.catalog.events("divergence")) == 1
    other.catalog.close()
    v.catalog.close()


def test_totals_are_kept_without_a_scan_and_rows_go_with_their_last_bytes(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = chain(range(40))
    v.put(PRINT, links, rows)
    used = sum(path.stat().st_blocks * 512 for path in files(tmp_path))
    assert v.catalog.usage() == {"disk": (used, 10)}
    found = v.catalog.lookup(PRINT, links)
    v.catalog.forget("disk", [f.content for f in found[4:]])
    assert v.catalog.usage()["disk"][1] == 4
    assert [v.catalog.read(f"SELECT count(*) FROM {t}")[0][0] for t in ("chunk", "part")] == [4, 4]
    assert verify(v).problems == []
    v.catalog.close()


def test_a_deleted_database_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    v = vault(tmp_path)
    for base in (0, 100, 200):
        v.put(PRINT, chain(range(base, base + 20)), rows)
    wanted = "SELECT chain, parent, start, tokens, content, format, bytes, place, used FROM chunk"
    wanted += " JOIN part ON chunk = chunk.id JOIN replica USING (content) ORDER BY 1"
    before = v.catalog.read(wanted)
    v.catalog.close()
    for path in tmp_path.glob("catalog.db*"):
        path.unlink()
    v = vault(tmp_path)
    assert good(v, chain(range(20))) == 0
    report = rebuild(v)
    assert (report.checked, report.adopted, report.faults) == (15, 15, [])
    assert v.catalog.read(wanted) == before
    assert good(v, chain(range(100, 120))) == 5
    assert rebuild(v).adopted == 0
    assert verify(v).clean
    v.catalog.close()


def test_rebuild_sets_damage_aside_and_strikes_rows_without_files(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = chain(range(20))
    v.put(PRINT, links, rows)
    paths = {
        f.link.start: v.depots["disk"]._path(f.content) for f in v.catalog.lookup(PRINT, links)
    }
    paths[16].unlink()
    data = bytearray(paths[12].read_bytes())
    data[100] ^= 1
    paths[12].write_bytes(data)
    (tmp_path / "chunks" / "zz").mkdir()
    report = rebuild(v)
    assert [kind for _, _, kind in report.faults] == ["header"]
    assert report.dangling == 2
    assert good(v, links) == 3
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert verify(v).clean
    v.catalog.close()


# -------------------------------------------------------------------- company


def test_a_wedged_writer_gives_a_typed_error(tmp_path: Path) -> None:
    one, other = Catalog(tmp_path), Catalog(tmp_path)
    with other.locked() as db:
        db.execute("PRAGMA busy_timeout = 50")
    with one.write(), pytest.raises(CatalogFault, match="locked"):
        other.set_setting("x", "y")
    other.set_setting("x", "y")
    assert one.setting("x") == "y"
    one.close()
    other.close()
