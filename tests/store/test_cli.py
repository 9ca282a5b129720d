"""`forkserve store` from end to end: what it prints, and how it exits."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forkserve.cli.store import group
from forkserve.cli.store_text import tree_lines

from .engines import PROMPT, engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    eng = engine(tmp_path / "store")
    h = eng.open(PROMPT, session="agent", tenant="acme")
    eng.generate("agent", 3)
    eng.attempt("agent", eng.fork("agent", h.tip, "other", [1, 2]))
    eng.commit("agent", h.tip, [5, 6, 7])
    eng.publish("agent", name="case-17")
    eng.shutdown()
    return tmp_path / "store"


def run(folder: Path, *args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(group, ["-d", str(folder), *map(str, args)])
    assert result.exit_code == code, (args, result.output, result.exception)
    return result


def ask(folder: Path, *args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(group, ["-d", str(folder), "--json", *map(str, args)])
    assert result.exit_code == code, (args, result.output, result.exception)
    return json.loads(result.stdout)


def test_listing_and_drawing(folder: Path) -> None:
    found = ask(folder, "ls")
    assert [s["session"] for s in found["sessions"]] == ["agent"]
    assert found["sessions"][0]["tokens"] == len(PROMPT) + 6
    assert found["names"][0]["name"] == "case-17"
    assert found["names"][0]["stored"] == 512
    assert "case-17" in run(folder, "ls").output
    drawn = run(folder, "tree", "agent").output
    assert drawn.splitlines()[0].startswith("1 root  +703 at 0  commit, line 0")
    assert "└─ 3 commit" in drawn
    assert ask(folder, "tree", "agent")[1]["branch"] == "other"
    assert "no session 'nobody'" in run(folder, "tree", "nobody", code=2).output


def test_show_and_lookup(folder: Path, tmp_path: Path) -> None:
    by_name = ask(folder, "show", "case-17")
    assert [c["start"] for c in by_name["chunks"]] == [0, 256]
    assert ask(folder, "show", "agent")["chain"] == by_name["chain"]
    assert ask(folder, "show", by_name["chain"][:12]) == by_name
    one = next((folder / "chunks").rglob("*.kv"))
    assert ask(folder, "show", one)["fingerprint"]["architecture"] == "mock"
    assert "format" in run(folder, "show", one).output
    assert "no name, session or chain id" in run(folder, "show", "nobody", code=2).output
    path = tmp_path / "ids"
    path.write_text(json.dumps(PROMPT))
    assert ask(folder, "lookup", f"@{path}", "--salt", "acme")[0]["tokens"] == 512
    assert ask(folder, "lookup", f"@{path}", code=1)[0]["tokens"] == 0
    assert run(folder, "lookup", "1,2,3", code=1)
    assert "is no token id" in run(folder, "lookup", "one", code=2).output


def test_a_query_says_what_json_can_hold(folder: Path) -> None:
    sql = "SELECT x'00ff' AS b, 1e999 AS i, -1e999 AS j, 0.5 AS x, NULL AS n"
    wanted = [{"b": "00ff", "i": None, "j": None, "x": 0.5, "n": None}]
    assert ask(folder, "sql", sql) == wanted
    for nothing in ("", "BEGIN", "ATTACH ':memory:' AS x"):
        assert "give one that reads" in run(folder, "sql", nothing, code=2).output


def test_verify_finds_damage_once(folder: Path) -> None:
    assert ask(folder, "verify")["clean"] is True
    assert "sound" in run(folder, "verify").output
    one = next((folder / "chunks").rglob("*.kv"))
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    found = ask(folder, "verify", code=1)
    assert [d["why"] for d in found["damaged"]] == ["payload"]
    assert ask(folder, "verify")["clean"] is True
    assert ask(folder, "du")["places"]["disk"]["aside"] == 1


@pytest.mark.parametrize("command", ["verify", "scrub"])
def test_a_check_that_finds_damage_says_so_first(folder: Path, command: str) -> None:
    one = next((folder / "chunks").rglob("*.kv"))
    one.write_bytes(one.read_bytes()[:-1] + b"?")
    first, second, *_ = run(folder, command, code=1).output.splitlines()
    assert re.fullmatch(r"2 chunks, \d+\.\d kB: damaged", first)
    assert second == f"damaged: {one.stem[:16]} in disk (payload)"


def test_pins_names_and_garbage(folder: Path) -> None:
    assert ask(folder, "gc", "--grace", 0)["chunks"] == 0, "a name and a session keep them"
    run(folder, "pin", "case-17", "--ttl", 1000)
    assert ask(folder, "show", "case-17")["pins"][0]["owner"] == "cli"
    run(folder, "name", "case-17", "--to", "case-18")
    assert "no state named" in run(folder, "name", "case-17", "--remove", code=2).output
    run(folder, "name", "case-18", "--remove")
    run(folder, "name", "case-18", code=2)
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute("UPDATE session SET closed_at = 1")
    db.close()
    assert ask(folder, "gc", "--grace", 0)["chunks"] == 0, "a pin keeps them"
    chain = ask(folder, "sql", "SELECT chain FROM pin")[0]["chain"]
    assert ask(folder, "unpin", chain)["removed"] == 1
    assert ask(folder, "gc", "--grace", 0, "--dry-run")["chunks"] == 2
    assert ask(folder, "gc", "--grace", 0)["chunks"] == 2
    assert ask(folder, "du")["places"]["disk"]["files"] == 0


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    assert ask(folder, "export", tmp_path / "b", "case-17")["chunks"] == 2
    assert "imported 1 state," in run(tmp_path / "new", "import", tmp_path / "b").output
    assert ask(tmp_path / "new", "ls")["names"][0]["stored"] == 512
    (tmp_path / "b").write_bytes(b"no tar")
    assert "not a bundle" in run(tmp_path / "new", "import", tmp_path / "b", code=2).output


def test_rebuild_and_du(folder: Path) -> None:
    before = ask(folder, "du")["places"]["disk"]
    assert before["listed"] == before["used"]
    for path in folder.glob("catalog.db*"):
        path.unlink()
    assert "forkserve store rebuild" in run(folder, "ls", code=2).output
    found = ask(folder, "rebuild")
    assert {k: v for k, v in found.items() if v} == {"files": 2, "adopted": 2}
    assert ask(folder, "du")["places"]["disk"] == before
    assert "disk" in run(folder, "du").output


def test_sql_reads_and_joins_and_never_writes(folder: Path) -> None:
    joined = (
        "SELECT s.tenant, b.branch, n.tokens FROM session s JOIN binding b ON b.session = s.id"
        " JOIN node n ON n.session = s.id AND n.id = b.winner"
    )
    assert ask(folder, "sql", joined) == [{"tenant": "acme", "branch": "commit", "tokens": 3}]
    assert "acme" in run(folder, "sql", joined).output
    assert "no row" in run(folder, "sql", "SELECT 1 WHERE 0").output
    assert "query failed" in run(folder, "sql", "DELETE FROM session", code=2).output
    assert "query failed" in run(folder, "sql", "SELEKT", code=2).output


def test_directories_that_are_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "catalog.db").write_bytes(b"x" * 5000)
    for name, says in (
        ("none", "there is no directory"),
        ("empty", "is empty"),
        ("other", "holds no catalog.db"),
        ("broken", "cannot open the catalog"),
    ):
        for command in (["ls"], ["verify"], ["gc"], ["du"], ["sql", "SELECT 1"]):
            output = run(tmp_path / name, *command, code=2).output
            assert says in output, output
            assert "Traceback" not in output
    assert "nothing to rebuild" in run(tmp_path / "empty", "rebuild", code=2).output
    assert not list((tmp_path / "empty").iterdir())


def test_a_living_owner_is_no_hindrance(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="x")
    assert ask(tmp_path, "verify")["clean"]
    run(tmp_path, "gc")
    run(tmp_path, "pin", "x")
    assert eng.generate("a", 2)
    eng.shutdown()


def test_a_long_line_is_drawn_straight_down() -> None:
    """2,000 commits, with a line that leaves it and goes on, and one that leaves that."""

    def row(node: int, parent: int | None, line: int, branch: str = "commit") -> dict[str, Any]:
        where = {"start": 0, "tokens": 1, "mode": "commit", "tip": node in (2000, 2003, 2004)}
        return {"node": node, "parent": parent, "branch": branch, "line": line, **where}

    rows = [row(n, n - 1 or None, 0) for n in range(1, 2001)]
    rows += [row(2001, 5, 1, "a\nb\x1b[31m" + "c" * 99), row(2002, 2001, 1)]
    rows += [row(2003, 2002, 1), row(2004, 2002, 2)]
    lines = tree_lines(rows)
    assert [int(re.search(r"\d+", line)[0]) for line in lines] == [  # type: ignore[index]
        *range(1, 6),
        *(2001, 2002, 2004, 2003),
        *range(6, 2001),
    ]
    assert lines[4:9] == [
        "├─ 5 commit  +1 at 0  commit, line 0",
        "├─ 2001 a b[31m" + "c" * 32 + "…  +1 at 0  commit, line 1",
        "│  ├─ 2002 commit  +1 at 0  commit, line 1",
        "│  ├─ 2004 commit  +1 at 0  commit, line 2 *",
        "│  └─ 2003 commit  +1 at 0  commit, line 1 *",
    ]
    assert lines[-1] == "└─ 2000 commit  +1 at 0  commit, line 0 *"
