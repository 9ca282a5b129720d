"""What `forkserve store` refuses: in one line, with what to do, and without writing anything."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forkserve.cli.store import group
from forkserve.errors import StoreError
from forkserve.store import Store, schema
from forkserve.store.catalog import Catalog, CatalogFault

from .engines import PROMPT, engine
from .rig import files
from .test_cli import ask, run

ARGUMENTS = {
    "show": ["x"],
    "lookup": ["1,2"],
    "tree": ["x"],
    "sql": ["SELECT 1"],
    "pin": ["x"],
    "unpin": ["x"],
    "name": ["x", "--remove"],
    "export": ["FILE"],
    "import": ["BUNDLE"],
}
COMMANDS = sorted(group.commands)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    eng = engine(tmp_path / "source")
    eng.publish(eng.open(PROMPT, session="agent").id, name="case-17")
    eng.shutdown()
    run(tmp_path / "source", "export", tmp_path / "bundle")
    return tmp_path / "bundle"


def state(folder: Path) -> dict[str, bytes | None]:
    """Everything below a directory."""
    paths = folder.rglob("*") if folder.exists() else []
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths}


def foreign(folder: Path) -> None:
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()


def newer(folder: Path) -> None:
    Catalog(folder).close()
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
        db.execute("PRAGMA journal_mode = DELETE")
    db.close()


KINDS = {
    "broken": (
        lambda folder: (folder / "catalog.db").write_bytes(b"x" * 5000),
        "file is not a database; move catalog.db, .* aside.*`forkserve store rebuild`",
    ),
    "foreign": (foreign, "database of another program .* directory of its own"),
    "newer": (newer, "use the newer ForkServe"),
    "full": (
        lambda folder: (folder / "thesis.tex").write_bytes(b"chapter 1"),
        "holds (other things and )?no catalog.db|nothing to rebuild|there is no catalog",
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_refused_is_not_written_to(
    tmp_path: Path, bundle: Path, kind: str, command: str
) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    make, says = KINDS[kind]
    make(folder)  # type: ignore[no-untyped-call]
    if command == "rebuild" and kind != "full":
        (folder / "chunks").mkdir()
    before = state(folder)
    words = {"FILE": str(tmp_path / "file"), "BUNDLE": str(bundle)}
    given = [words.get(word, word) for word in ARGUMENTS.get(command, [])]
    far = ["--far", str(tmp_path / "far")] if command == "push" else []
    done = CliRunner().invoke(group, ["-d", str(folder), *far, command, *given])
    assert done.exit_code == 2, done.output
    (error,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert re.search(says, error), error
    assert state(folder) == before
    assert not (tmp_path / "far").exists()
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("there", [False, True])
def test_an_import_that_fails_leaves_no_store_behind(tmp_path: Path, there: bool) -> None:
    (tmp_path / "b").write_bytes(b"no tar")
    folder = tmp_path / "new" / "store"
    if there:
        folder.mkdir(parents=True)
    run(folder, "import", tmp_path / "b", code=2)
    assert folder.exists() is there
    assert state(folder) == {}


@pytest.mark.parametrize("there", [False, True])
def test_an_import_of_a_changed_bundle_leaves_no_store_behind(
    tmp_path: Path, bundle: Path, there: bool
) -> None:
    data = bundle.read_bytes()
    bundle.write_bytes(data.replace(b"case-17", b"case-18"))
    folder = tmp_path / "new"
    if there:
        folder.mkdir()
    assert "was changed" in run(folder, "import", bundle, code=2).output
    assert folder.exists() is there
    assert state(folder) == {}
    bundle.write_bytes(data)
    run(folder, "import", bundle)
    before = ask(folder, "ls")
    bundle.write_bytes(data.replace(b"case-17", b"case-18"))
    run(folder, "import", bundle, code=2)
    assert ask(folder, "ls") == before, "a store that was there stays"


def test_a_look_with_a_further_place_makes_no_directory(tmp_path: Path, bundle: Path) -> None:
    run(tmp_path / "source", "--far", tmp_path / "typo", "ls")
    assert not (tmp_path / "typo").exists()


def test_a_database_that_breaks_while_it_is_read_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    eng = engine(folder)
    eng.publish(eng.open(PROMPT, session="agent").id, name="x")
    eng.shutdown()
    data = bytearray((folder / "catalog.db").read_bytes())
    data[4096 * 2 :] = b"\xff" * (len(data) - 4096 * 2)
    (folder / "catalog.db").write_bytes(data)
    advice = "`forkserve store rebuild`"
    with pytest.raises(StoreError, match=advice):
        Catalog(folder, "reader").read("SELECT * FROM session")
    for command in ("ls", "verify", "doctor"):
        assert advice in CliRunner().invoke(group, ["-d", str(folder), command]).output
    for path in folder.glob("catalog.db*"):
        path.rename(tmp_path / path.name)
    assert ask(folder, "rebuild")["adopted"] == 2


def test_a_database_that_is_busy_is_not_called_broken(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(CatalogFault) as found:
        catalog.read("SELECT * FROM nothing")
    assert "rebuild" not in str(found.value)
    catalog.close()


# -------------------------------------------------------------------- a chunk file alone


def test_a_chunk_file_is_shown_without_a_store(tmp_path: Path, bundle: Path) -> None:
    one = next((tmp_path / "source").rglob("*.kv"))
    alone = tmp_path / "alone.kv"
    alone.write_bytes(one.read_bytes())
    found = ask(tmp_path / "none", "show", alone)
    assert found["content"] == one.stem
    assert found["fingerprint"]["architecture"] == "mock"
    assert not (tmp_path / "none").exists()
    alone.write_bytes(b"x" * 100)
    assert "Error: " in run(tmp_path / "none", "show", alone, code=2).output


# -------------------------------------------------------------------- rebuild from afar


def test_rebuild_finds_chunks_in_a_further_place(tmp_path: Path, bundle: Path) -> None:
    source, far = tmp_path / "source", tmp_path / "far"
    run(source, "--far", far, "push")
    store = ask(source, "du")["store"]
    assert [p.name for p in far.iterdir()] == [store]
    missing = ask(tmp_path / "new", "--far", far, "rebuild")
    assert (missing["adopted"], missing["others"]) == (0, [store])
    assert f"(--from): {store}" in run(tmp_path / "new", "--far", far, "rebuild").output
    found = ask(tmp_path / "new", "--far", far, "rebuild", "--from", store)
    assert (found["copied"], found["adopted"]) == (2, 2)
    assert len(list((far / store).rglob("*.kv"))) == 2


def test_a_new_store_can_take_the_folder_of_a_lost_one(tmp_path: Path, bundle: Path) -> None:
    source, far = tmp_path / "source", tmp_path / "far"
    run(source, "--far", far, "push")
    store = ask(source, "du")["store"]
    wrong = run(tmp_path / "new", "--far", far, "rebuild", "--as", "x", code=2)
    assert "no id of a store" in wrong.output
    assert not (tmp_path / "new").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    run(tmp_path / "other", "--far", far, "rebuild", code=2)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    found = ask(tmp_path / "new", "--far", far, "rebuild", "--as", store)
    assert (found["copied"], found["adopted"]) == (0, 2)
    assert ask(tmp_path / "new", "du")["store"] == store
    with_chunks = run(tmp_path / "new", "--far", far, "rebuild", "--as", "0" * 32, code=2)
    assert "a store with an id of its own" in with_chunks.output
    run(tmp_path / "new", "--far", far, "gc", "--grace", 0)
    assert list((far / store).rglob("*.kv")) == [], "they are this store's own again"


# -------------------------------------------------------------------- small ones


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["ls", "--json"], "store --json ls"),
        (["verify", "--far", "x"], "store --far URL verify"),
        (["show", "-d", "x", "n"], "store -d DIRECTORY show"),
    ],
)
def test_an_option_behind_its_command_is_told_its_place(words: list[str], right: str) -> None:
    done = CliRunner().invoke(group, words, prog_name="store")
    assert done.exit_code == 2
    assert f" goes before the command: {right}\n" in done.output
    unknown = CliRunner().invoke(group, ["ls", "--nonsense"], prog_name="store")
    assert "before the command" not in unknown.output


@pytest.mark.parametrize(
    "text",
    ["1.9,2", "true", '"1"', "1,-1", "2147483648", "null", "1,,2", "", "[[1]]", "[true]", "1,x"],
)
def test_token_ids_are_whole_numbers(tmp_path: Path, bundle: Path, text: str) -> None:
    said = run(tmp_path / "source", "lookup", text, code=2).output
    assert "is no token id" in said
    assert "give ids with commas or spaces (1,2,3), a JSON list ([1, 2, 3]), or @FILE" in said


@pytest.mark.parametrize("text", ['{"ids": [1]}', "[1,", "[" * 100_000])
def test_a_file_without_token_ids_is_told_what_it_may_hold(
    tmp_path: Path, bundle: Path, text: str
) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    said = run(tmp_path / "source", "lookup", f"@{path}", code=2).output
    assert re.search("is no (list of token ids|token id); give ids with", said)
    assert len(said.splitlines()[-1]) < 250


@pytest.mark.parametrize("form", ["{}", "[{}]", " [{}]\n"])
@pytest.mark.parametrize("between", [",", ", ", " , "])
def test_token_ids_may_be_a_json_list_or_words(
    tmp_path: Path, bundle: Path, form: str, between: str
) -> None:
    text = form.format(between.join(map(str, PROMPT)))
    (tmp_path / "ids").write_text(text)
    for given in (text, f"@{tmp_path / 'ids'}"):
        assert ask(tmp_path / "source", "lookup", given)[0]["tokens"] == 512
    spaces = " ".join(map(str, PROMPT))
    assert ask(tmp_path / "source", "lookup", spaces)[0]["tokens"] == 512


def test_a_pin_is_never_shortened(tmp_path: Path, bundle: Path) -> None:
    source = tmp_path / "source"
    for ttl in (0, -1):
        assert "range" in run(source, "pin", "case-17", "--ttl", ttl, code=2).output
    first = ask(source, "pin", "case-17", "--ttl", 1000)["until"]
    assert ask(source, "pin", "case-17", "--ttl", 10)["until"] == first
    assert ask(source, "pin", "case-17", "--ttl", 2000)["until"] > first
    assert ask(source, "pin", "case-17")["until"] is None
    assert "pinned for good by 'cli'" in run(source, "pin", "case-17", "--ttl", 5, code=2).output
    assert ask(source, "show", "case-17")["pins"] == [{"owner": "cli", "until": None}]
    run(source, "pin", "case-17", "--ttl", 5, "--owner", "another")


def test_an_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        eng = engine(store)
        eng.publish(eng.open(PROMPT, session="agent").id, name="x")
        eng.shutdown()
    with Store(tmp_path / "s", "shared") as store, store.catalog.write() as db:
        db.execute("DROP TRIGGER part_fixed")  # rows of the mock are no vectors to quantise
        db.execute("UPDATE part SET format = 'int8'")
    for what in ([], ["x"], ["agent"]):
        done = run(tmp_path / "s", "export", "--force", tmp_path / "b", *what)
        said = "2 chunks left out: stored in a lossy format alone"
        assert said in done.stderr
    done = CliRunner().invoke(
        group, ["-d", str(tmp_path / "s"), "--json", "export", str(tmp_path / "c")]
    )
    assert json.loads(done.stdout)["chunks"] == 0


def test_an_export_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it works where nothing may be written: a snapshot, a mount, another user's store."""
    from forkserve.store import admin

    with Store(tmp_path / "s") as store:
        eng = engine(store)
        eng.publish(eng.open(PROMPT, session="agent").id, name="x")
        eng.shutdown()
    opened, roles = admin.open_store, list[bool]()

    def watch(folder: Path, *, write: bool, **more: Any) -> Store:
        roles.append(write)
        return opened(folder, write=write, **more)

    monkeypatch.setattr(admin, "open_store", watch)
    for what in ("x", "agent"):
        run(tmp_path / "s", "export", tmp_path / what, what)
    assert roles == [False, False]
    one = files(tmp_path / "s")[0]
    one.write_bytes(one.read_bytes()[:-1])
    assert "no sound copy" in run(tmp_path / "s", "export", tmp_path / "y", code=2).output
    assert one.exists()  # a reader sets nothing aside
    assert not (tmp_path / "y").exists()


def test_names_are_far_where_another_place_than_the_first_has_them(tmp_path: Path) -> None:
    from forkserve.store import admin
    from forkserve.store.depots import LocalDepot

    near = LocalDepot(tmp_path / "ssd", place="ssd")
    with Store(tmp_path / "s", disk=near, far=[tmp_path.as_posix() + "/far"]) as store:
        eng = engine(store)
        eng.publish(eng.open(PROMPT, session="agent").id, name="x")
        assert store.near == "ssd"
        assert [n["far"] for n in admin.names(store.catalog, store.near)] == [0]
        eng.shutdown()
