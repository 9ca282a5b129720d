"""What `forkserve store` prints, word for word: `data/cli.txt` is a session at a terminal.

A change of it is a change that users see.  Times, ids and sizes that depend on the day, the version
or the disk are replaced; see `plain`.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from forkserve.cli.store import group
from forkserve.store import Store
from forkserve.store.catalog import Catalog

from .engines import PROMPT, engine

GOLDEN = Path(__file__).parent / "data" / "cli.txt"


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


def plain(text: str, folder: Path, contents: list[str]) -> str:
    """Without what another day, version, directory or disk would print differently."""
    for number, content in enumerate(contents):
        text = text.replace(content[:12], f"<content--{number}>")
    text = text.replace(str(folder.parent), "TMP")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "YYYY-MM-DD hh:mm:ss", text)
    text = re.sub(r"version \d+$", "version N", text, flags=re.MULTILINE)
    text = re.sub(r"\b[0-9a-f]{32}\b", "<store>", text)
    text = re.sub(r"^[0-9a-f]{12}  mock", "<printprint>  mock", text, flags=re.MULTILINE)
    text = re.sub(r"\d+\.\d [kM]B", "N kB", text)
    return re.sub(r"(N kB) +", r"\1  ", text)


def test_commands_print_what_they_always_have(folder: Path) -> None:
    catalog = Catalog(folder, "reader")
    rows = catalog.read("SELECT content FROM part JOIN chunk ON chunk.id = chunk ORDER BY start")
    catalog.close()
    said = ""
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if line.startswith("$ "):
            command = shlex.split(line[2:].replace("TMP", str(folder.parent)))
            assert command[0] == "store"
            done = CliRunner().invoke(group, ["-d", str(folder), *command[1:]], prog_name="store")
            said += f"{line}\n{done.output}" + f"exit code {done.exit_code}\n" * bool(
                done.exit_code
            )
    assert plain(said, folder, [row[0] for row in rows]) == GOLDEN.read_text(encoding="utf-8")


def test_the_golden_session_uses_every_command() -> None:
    used = set(
        re.findall(
            r"^\$ store (?:--far \S+ )?(\w+)", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert used == set(group.commands)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "command",
    ["verify", "scrub", "gc --grace 0", "rebuild", "export B", "import B", "--far F push"],
)
def test_long_work_shows_a_bar_where_somebody_is_looking(
    folder: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(tmp_path / w) if w in "BF" else w for w in command.split()]
    label = next(w for w in words if w in group.commands)
    if label == "export":
        words.insert(1, "--force")
    if label == "import":
        group.main(["-d", str(folder), "export", words[-1]], standalone_mode=False)
    if label == "gc":
        with Store(folder, "shared") as store, store.catalog.write() as db:
            db.execute("DELETE FROM name")
            db.execute("DELETE FROM session")
    for tty, seen in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", tty)
        target = folder if label != "import" else tmp_path / f"new{seen}"
        group.main(["-d", str(target), *words], standalone_mode=False)
        shown = tty.getvalue()
        assert (label in shown) is seen
        if seen:
            assert "100%" in shown
        else:
            assert shown == ""
