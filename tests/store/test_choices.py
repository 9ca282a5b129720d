"""Restores that are cancelled, choices that are made again, and a race for a fingerprint."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine
from forkserve.errors import SessionError, StoreError
from forkserve.store import Store, faults
from forkserve.store.decisions import choose, decisions, repeats
from forkserve.store.identity import Fingerprint, fingerprint
from forkserve.store.policies import Held, KeepSession, Lru
from forkserve.store.rebuild import integrity, verify
from forkserve.store.restore import Restorer
from tests.waiting import HANGS_S

from .engines import cold, engine
from .rig import PRINT, SIZE, chain, files, good, rows, vault
from .test_cli import ask, run
from .test_identity import FIELDS

TEXT = [(7 * i * i + i) % 256 for i in range(4 * 256 + 60)]
CHUNKS = len(TEXT) // 256


def published(folder: Path) -> None:
    eng = engine(folder)
    eng.open(TEXT, session="a")
    eng.publish("a", name="n")
    eng.shutdown()


def pages(eng: Engine) -> tuple[int, list[int], list[int]]:
    pool = eng._core.pool
    return pool.free_pages, list(pool.refs), list(pool.pins)


# -------------------------------------------------------------------- cancelled


class Cancelled(BaseException):
    """As KeyboardInterrupt is: nothing catches it on the way."""


@pytest.mark.parametrize("how", ["closed", "interrupted"])
@pytest.mark.parametrize("at", range(CHUNKS + 1))
def test_a_restore_that_is_cancelled_at_any_chunk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, how: str
) -> None:
    published(tmp_path)
    with Store(tmp_path, restore="always") as store:
        eng = engine(store, capacity_pages=200)
        before, real = pages(eng), Restorer.fetch

        def cancel() -> None:
            if how == "interrupted":
                raise Cancelled
            eng.close("x")

        def fetch(self: Restorer, *args: Any) -> Iterator[Any]:
            number = -1
            for number, loaded in enumerate(real(self, *args)):
                if number == at:
                    cancel()
                yield loaded
            if number + 1 == at:
                cancel()

        monkeypatch.setattr(Restorer, "fetch", fetch)
        with pytest.raises(Cancelled if how == "interrupted" else SessionError):
            eng.restore("n", session="x")
        assert eng.sessions() == []
        eng._core.index.clear()
        assert pages(eng) == before, "every page and every reference is back"
        eng.check()
        assert store.catalog.read("SELECT count(*) FROM lease") == [(0,)]
        assert store.restorer._flights == {}
        assert store.restorer.reads <= at + 5, "nothing more is begun"
        monkeypatch.undo()
        other = eng.open(TEXT[5:90], salt="x")
        assert eng.generate(other.id, 4) == cold(TEXT[5:90], 4)
        again = eng.restore("n", session="x")
        assert again.cached_tokens == CHUNKS * 256
        assert eng.generate("x", 4) == cold(TEXT, 4)
        eng.check()
        eng.shutdown()


def test_what_was_restored_is_let_go_of_without_the_garbage_collector(tmp_path: Path) -> None:
    """A chunk that stays mapped stays on a disk that is short of room."""
    published(tmp_path)
    with Store(tmp_path, restore="always") as store:
        eng = engine(store)
        gc.disable()
        try:
            eng.restore("n")
            maps = Path("/proc/self/maps")
            if maps.exists():
                assert str(tmp_path) not in "".join(
                    line for line in maps.read_text().splitlines() if line.endswith(".kv")
                )
        finally:
            gc.enable()
        eng.shutdown()


# -------------------------------------------------------------------- made again


@pytest.mark.parametrize(
    ("mode", "restore_ms", "prefill_ms", "chosen"),
    [
        ("auto", 1.0, 2.0, (True, "faster")),
        ("auto", 2.0, 1.0, (False, "faster")),
        ("auto", 1.0, 1.0, (False, "faster")),
        ("always", 1.0, 2.0, (True, "faster")),
        ("always", 2.0, 1.0, (True, "always")),
        ("never", 1.0, 2.0, (False, "restore_off")),
    ],
)
def test_the_choice_is_a_function_of_numbers(
    mode: Any, restore_ms: float, prefill_ms: float, chosen: tuple[bool, str]
) -> None:
    assert choose(mode, restore_ms, prefill_ms) == chosen


def test_every_recorded_choice_comes_out_the_same_from_its_row(tmp_path: Path) -> None:
    published(tmp_path)
    for mode in ("auto", "always", "never"):
        for rate in (1.0, 1e9):
            for damage in (False, True):
                with Store(tmp_path, restore=mode) as store:  # type: ignore[arg-type]
                    store.restorer.cost.rate = rate
                    eng = engine(store, capacity_pages=400, prefix_index=False)
                    if damage:
                        path = files(tmp_path)[0]
                        path.write_bytes(path.read_bytes()[:-1])
                    h = eng.restore("n")
                    assert eng.generate(h.id, 3) == cold(TEXT, 3)
                    eng.publish(h.id)  # what was damaged is there again
                    eng.shutdown()
    small = engine(Store(tmp_path, restore="always"), capacity_pages=80)
    small.open(TEXT[3:600], session="big", salt="z")
    small.open(TEXT, session="y", prefill=False)
    small.warm("y")
    assert small.store is not None
    small.shutdown()
    small.store.close()
    found = ask(tmp_path, "decisions", "--limit", 1000)
    choices = [row for row in found if row["what"] == "restore"]
    assert {row["repeats"] for row in choices} == {True}
    reasons = {row["reason"] for row in choices}
    assert {"faster", "always", "restore_off"} <= reasons
    assert reasons & {"damaged", "always_damaged"}
    assert "same" in run(tmp_path, "decisions").output
    with Store(tmp_path) as store, store.catalog.write() as db:
        db.execute("UPDATE decision SET cost_ms = 2 * gain_ms + 1 WHERE reason = 'faster'")
    assert "DIFFERS" in run(tmp_path, "decisions", "--limit", 1000, code=1).output
    with Store(tmp_path) as store:
        assert decisions(store.catalog, "nobody") == []


def test_what_is_no_single_choice_is_not_judged() -> None:
    row = {"what": "restore", "reason": "memory", "cost_ms": 1.0, "gain_ms": 0.5, "actual_ms": 1.0}
    row |= {"worth": None, "against": None, "verdict": "restored"}
    assert repeats({**row, "what": "evict", "reason": "expired"}) is None
    assert repeats({**row, "what": "move"}) is None, "of a version that noted no worth"
    assert repeats({**row, "reason": "faster"}) is False


# -------------------------------------------------------------------- a race for a fingerprint


def claimed(layout: str) -> Fingerprint:
    """One digest, two meanings: as if blake3 had collided, or a caller had lied."""
    other = {"dtype": "float32", "vector": 8, "row_bytes": 32, "order": layout}
    return Fingerprint(PRINT.digest, fingerprint({**FIELDS, "layout": other}).text)


def race(folder: Path, layout: str) -> None:
    """Publish as soon as told; exit code 3 when refused."""
    v = vault(folder)
    (folder / f"ready-{layout}").touch()
    while not (folder / "go").exists():
        time.sleep(0.0005)
    try:
        v.put(claimed(layout), chain(range(100, 100 + 2 * SIZE)), rows)
    except StoreError as error:
        os._exit(3 if "other fields" in str(error) else 4)
    os._exit(0)


@pytest.mark.parametrize("turn", range(3))
def test_two_processes_race_for_a_fingerprint_and_the_loser_writes_no_row(
    tmp_path: Path, turn: int
) -> None:
    code = "import sys; from pathlib import Path; from store.test_choices import race\n"
    code += "race(Path(sys.argv[1]), sys.argv[2])"
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    vault(tmp_path).catalog.close()
    names = ("tokens first", "heads first")
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name], env=env)
        for name in names
    ]
    end = time.monotonic() + 60
    while sum((tmp_path / f"ready-{name}").exists() for name in names) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    (tmp_path / "go").touch()
    codes = [child.wait(HANGS_S) for child in children]
    assert sorted(codes) == [0, 3]
    v = vault(tmp_path)
    winner = names[codes.index(0)]
    assert v.catalog.read("SELECT digest, fields FROM fingerprint") == [
        (PRINT.digest.hex(), claimed(winner).text)
    ]
    assert v.catalog.read("SELECT count(*) FROM chunk") == [(2,)]
    assert integrity(v) == []
    with pytest.raises(StoreError, match="other fields"):
        v.catalog.lookup(claimed(names[codes.index(3)]), chain(range(100, 108)))
    v.catalog.close()


def test_equal_fingerprints_of_two_processes_are_one_row(tmp_path: Path) -> None:
    one, two = vault(tmp_path), vault(tmp_path)
    one.put(PRINT, chain([1, *range(7)]), rows)
    two.put(PRINT, chain([2, *range(7)]), rows)
    assert one.catalog.read("SELECT count(*) FROM fingerprint") == [(1,)]
    assert good(one, chain([2, *range(7)])) == 2
    one.catalog.close()
    two.catalog.close()


# -------------------------------------------------------------------- gc beside a publish


def test_an_old_leftover_that_gc_takes_while_it_is_relied_on_is_written_anew(
    tmp_path: Path,
) -> None:
    v = vault(tmp_path)
    v.put(PRINT, chain(range(4)), rows)
    (path,) = files(tmp_path)
    v.catalog.forget("disk", [path.stem])  # a leftover now: the next write finds it there

    def gone(point: str) -> None:
        if point == "chunk.durable":
            faults.hook = None
            path.unlink()

    faults.hook = gone
    assert v.put(PRINT, chain(range(4)), rows).written == 1
    assert good(v, chain(range(4))) == 1
    assert verify(v).clean
    v.catalog.close()


# -------------------------------------------------------------------- the tier in memory


def test_every_recorded_choice_of_the_memory_tier_comes_out_the_same(tmp_path: Path) -> None:
    """Pieces that are taken, displaced, too large or worth less; rows raised and computed."""
    row = 16
    for policy in (Lru(), KeepSession(), Stingy()):
        for mode in ("auto", "always"):
            for limit in (100 * row, 900 * row, 1 << 20):
                with Store(
                    tmp_path,
                    memory_bytes=limit,
                    device_bytes=30 * 8 * row,
                    policy=policy,
                    restore=mode,  # type: ignore[arg-type]
                ) as store:
                    eng = engine(store, prefix_index=False, capacity_pages=200)
                    for n in range(3):
                        h = eng.open([n, *TEXT[:690]])
                        assert eng.settle_tiers()
                        if n == 1:
                            store.restorer.memory_cost.rate = 1.0  # hopeless
                        assert eng.generate(h.id, 2) == cold([n, *TEXT[:690]], 2)
                        assert eng.settle_tiers()
                    eng.shutdown()
    found = ask(tmp_path, "decisions", "--limit", 10_000)
    moves = [r for r in found if r["what"] == "move"]
    raised = [r for r in found if r["what"] == "restore" and r["reason"].startswith("memory")]
    assert {r["repeats"] for r in moves + raised} == {True}
    assert {r["reason"] for r in moves} == {"idle", "worth_less", "too_large"}
    assert {r["verdict"] for r in raised} == {"restored", "computed"}
    assert any(r["against"] is not None and r["verdict"] == "memory" for r in moves)
    assert "memory_always" in {r["reason"] for r in raised}
    assert "DIFFERS" not in run(tmp_path, "decisions", "--limit", 10_000).output
    with Store(tmp_path) as store, store.catalog.write() as db:
        db.execute("UPDATE decision SET against = worth + 1 WHERE what = 'move'")
    assert "DIFFERS" in run(tmp_path, "decisions", "--limit", 10_000, code=1).output


class Stingy(Lru):
    """What is there already is worth more than what comes."""

    def value(self, held: Held) -> float:
        return held.idle_s
