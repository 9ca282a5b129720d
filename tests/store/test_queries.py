"""The pages about the store: their programs run, their queries answer, no column is left out."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from forkserve import Engine, ForkServeConfig
from forkserve.cli.store import group
from forkserve.engine import MockBackend
from forkserve.store.catalog import Catalog

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORE, SQL = ((DOCS / name).read_text(encoding="utf-8") for name in ("store.md", "sql.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder after the first program of the page: a store in `states`, and an application."""
    program = tmp_path / "first.py"
    program.write_text(blocks(STORE, "python")[0], encoding="utf-8")
    run(program)
    with Engine(MockBackend(ForkServeConfig()), store=tmp_path / "states") as eng:
        h = eng.resume("case-17")
        eng.attempt("case-17", eng.fork("case-17", h.tip, "other", [1, 2]))
        other = eng.open(eng.tokens("case-17")[:600], session="case-18")
        eng.publish(other.id)
    db = sqlite3.connect(tmp_path / "app.db")
    db.execute("CREATE TABLE attempt (id INTEGER PRIMARY KEY, session TEXT, score REAL)")
    db.execute("INSERT INTO attempt VALUES (1, 'case-17', 0.5)")
    db.commit()
    db.close()
    return tmp_path


def run(program: Path) -> None:
    command = [sys.executable, "-W", "error", program]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_commands_do_is_done_from_python(home: Path) -> None:
    (source,) = (block for block in blocks(STORE, "python") if "collect(" in block)
    program = home / "next.py"
    program.write_text(source, encoding="utf-8")
    run(program)


def test_the_queries_of_the_page_answer(home: Path) -> None:
    shared, attempts, bills, joined = blocks(SQL, "sql")
    catalog = Catalog(home / "states", "reader")
    assert {row[0] for row in catalog.read(shared)} >= {"case-17"}
    assert catalog.read(attempts) == [("case-17", 1, 768), ("s1", 0, 768), ("case-18", 0, 512)]
    ((tenant, charged),) = catalog.read(bills)
    assert tenant == "default"
    assert charged > 0
    catalog.close()
    db = sqlite3.connect(":memory:")  # as Datasette does with --crossdb
    db.execute("ATTACH ? AS catalog", (str(home / "states" / "catalog.db"),))
    db.execute("ATTACH ? AS app", (str(home / "app.db"),))
    assert db.execute(joined).fetchall() == [(1, 0.5, "commit", "miss", 0)]
    db.close()


def test_the_queries_of_the_page_can_be_pasted_into_the_command(home: Path) -> None:
    *queries, _joined = blocks(SQL, "sql")
    for query in queries:
        assert query.startswith("-- "), "a comment, which looks like an option"
        done = CliRunner().invoke(group, ["-d", str(home / "states"), "--json", "sql", query])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)
    wrong = CliRunner().invoke(group, ["-d", str(home / "states"), "sql", "--jsn", "SELECT 1"])
    assert wrong.exit_code == 2
    assert "No such option" in wrong.output, "a mistyped one is still told"


def test_the_join_of_the_page_runs_with_sqlite_utils(home: Path) -> None:
    command = shlex.split(blocks(SQL, "sh")[0].replace("\\\n", " "))
    assert command[0] == "sqlite-utils"
    command[0] = str(Path(sys.executable).with_name("sqlite-utils"))
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    assert row == {"id": 1, "score": 0.5, "branch": "commit", "hit": "miss", "skipped": 0}


def test_every_table_and_column_is_on_the_page_and_no_other(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", SQL, re.MULTILINE)
    told = {table: set(re.findall(r"`([a-z_]+)`", cells)) for table, cells in rows}
    catalog = Catalog(tmp_path, "shared")
    names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    tables = [str(row[0]) for row in catalog.read(names)]
    assert sorted(told) == sorted(tables)
    for table in tables:
        columns = {str(row[1]) for row in catalog.read(f"PRAGMA table_info ({table})")}
        assert columns <= told[table], f"{table}: not on the page: {columns - told[table]}"
        # A value may stand in code style as well: those that are no column are named here.
        extra = told[table] - columns - {"charged", "store"}
        assert not extra, f"{table} has no {extra}"
    catalog.close()
