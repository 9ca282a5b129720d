"""Several processes on one store: publishing the same chains, collecting, and differing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forkserve.store import faults
from forkserve.store.catalog import Catalog
from forkserve.store.collect import collect
from forkserve.store.identity import Link
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .rig import PRINT, SIZE, chain, files, good, load, rows, vault


def start(folder: Path, job: str, number: int) -> subprocess.Popen[bytes]:
    """A process of its own that runs one of the functions below."""
    code = f"import sys; from pathlib import Path; from store.test_crowd import {job}\n"
    code += f"{job}(Path(sys.argv[1]), int(sys.argv[2]))"
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(number)], env=env)


def keep(catalog: Catalog, links: Sequence[Link], by: int) -> None:
    with catalog.write() as db:
        for link in links:
            db.execute("INSERT INTO pin VALUES (?, ?, NULL)", (link.id.hex(), str(by)))


def leave(catalog: Catalog, links: Sequence[Link], by: int) -> None:
    """Nobody needs the chain, and nobody has for years: garbage for whoever collects next."""
    with catalog.write() as db:
        for link in links:
            db.execute("DELETE FROM pin WHERE chain = ? AND owner = ?", (link.id.hex(), str(by)))
            db.execute(
                "UPDATE chunk SET created_at = 1, used_at = 1 WHERE chain = ?", (link.id.hex(),)
            )


def crowd(folder: Path, number: int) -> None:
    """One of eight processes: publishes its own and everybody's chains, looks up, collects."""
    v = vault(folder)
    while not (folder / "go").exists():
        time.sleep(0.001)
    for turn in range(12):
        links, shared = chain([number, turn, *range(10)]), chain([99, turn, *range(10)])
        for kept in (links, shared):
            keep(v.catalog, kept, number)
            v.put(PRINT, kept, rows)
            assert good(v, kept) == 3
        v.catalog.touch(f.chunk for f in v.catalog.lookup(PRINT, links))
        again = chain([98, turn % 2, *range(10)])  # some collect it while others publish it
        keep(v.catalog, again, number)
        v.put(PRINT, again, rows)
        assert good(v, again) == 3
        leave(v.catalog, again, number)
        mine = chain([100 + number, turn, *range(10)])
        v.put(PRINT, mine, rows)
        assert good(v, mine) == 3
        leave(v.catalog, mine, number)
        if turn % 2:
            collect(v, grace_s=3600)
            assert good(v, mine) == 0
    v.catalog.close()


def test_eight_processes_lose_no_row_and_meet_no_lock(tmp_path: Path) -> None:
    children = [start(tmp_path, "crowd", number) for number in range(8)]
    (tmp_path / "go").touch()  # some are still starting: the catalog is made by several at once
    assert [child.wait(HANGS_S) for child in children] == [0] * 8
    v = vault(tmp_path)
    for number in [*range(8), 99]:
        for turn in range(12):
            assert good(v, chain([number, turn, *range(10)])) == 3
    collect(v, grace_s=-5)  # also young files whose rows one process struck while another wrote
    assert len(files(tmp_path)) == 9 * 12 * 3, "all that is kept, and nothing else"
    report = verify(v)
    assert report.clean
    assert report.orphans == 0
    assert v.catalog.events("quarantine") == []
    v.catalog.close()


def differ(folder: Path, number: int) -> None:
    """Publishes rows of its own for a chain that another process publishes at the same time."""
    v = vault(folder)

    def hook(point: str) -> None:
        if point == "publish.captured":  # neither has found the other's
            (folder / f"ready{number}").touch()
            while not all((folder / f"ready{n}").exists() for n in range(2)):
                time.sleep(0.001)

    faults.hook = hook
    other = rows(chain(range(number, number + SIZE))[0])
    stored = v.put(PRINT, chain(range(SIZE)), lambda link: other)
    (folder / ("refused" if stored.diverged else "kept")).write_text(str(number))
    assert stored.written + stored.diverged == 1
    v.catalog.close()


def test_of_two_processes_that_differ_the_first_wins_and_the_other_is_on_record(
    tmp_path: Path,
) -> None:
    children = [start(tmp_path, "differ", number) for number in range(2)]
    assert [child.wait(HANGS_S) for child in children] == [0, 0]
    assert (tmp_path / "refused").exists()
    winner = int((tmp_path / "kept").read_text())
    v = vault(tmp_path)
    (loaded,) = load(v, chain(range(SIZE)))
    assert bytes(loaded.payload) == rows(chain(range(winner, winner + SIZE))[0])
    (path,) = files(tmp_path)
    (event,) = v.catalog.events("divergence")
    assert path.stem == event["kept"] != event["refused"]
    assert verify(v).clean
    v.catalog.close()
