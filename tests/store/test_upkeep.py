"""What must not grow for ever, and what somebody who watches a store gets to see."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkserve.store import Store, statements
from forkserve.store.budget import Budget
from forkserve.store.catalog import Catalog
from forkserve.store.collect import collect
from forkserve.store.depots import LocalDepot
from forkserve.store.metrics import prometheus
from forkserve.store.policies import Lru
from forkserve.store.rebuild import verify

from .engines import PROMPT, engine
from .rig import PRINT, SIZE, chain, files, rows, vault

# -------------------------------------------------------------------- leftovers of crashes


def leave_half_a_chunk(chunks: Path) -> None:
    """A writer that ends in the middle of a file."""
    code = f"""
import os
from forkserve.store import faults
from forkserve.store.depots import LocalDepot
faults.hook = lambda point: os._exit(0) if point == "chunk.written" else None
LocalDepot({str(chunks)!r}).put([("c" * 64, [b"x" * 50_000])])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_leftovers_of_dead_writers_go_when_a_store_is_opened(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    leave_half_a_chunk(tmp_path / "s" / "chunks")
    with Store(tmp_path / "s", "reader") as store:
        depot = store.vault.depots["disk"]
        assert isinstance(depot, LocalDepot)
        assert depot.waste().leftovers == 1, "a reader changes nothing"
        mine = depot._temp("d" * 64)
        mine.write_bytes(b"half")
    with Store(tmp_path / "s", "shared"):
        assert list((tmp_path / "s").rglob(".tmp-*")) == [mine]


def test_leftovers_in_a_further_place_go_as_well(tmp_path: Path) -> None:
    with Store(tmp_path / "s", far=[f"{tmp_path}/far"]) as store:
        ours = tmp_path / "far" / str(store.catalog.setting("store"))
    for folder in (ours, tmp_path / "far" / ("0" * 32)):
        folder.mkdir(parents=True)
        leave_half_a_chunk(folder)
    Store(tmp_path / "s", far=[f"{tmp_path}/far"]).close()
    assert len(list((tmp_path / "far").rglob(".tmp-*"))) == 1, "another store's are its own"
    assert not list(ours.rglob(".tmp-*"))


def test_a_budget_counts_unfinished_and_damaged_files(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = chain(range(4 * SIZE))
    v.put(PRINT, links, rows)
    used = Budget(v, "disk", 1 << 30, Lru()).used()
    leave_half_a_chunk(tmp_path / "chunks")
    assert Budget(v, "disk", 1 << 30, Lru()).used() >= used + 50_000
    budget = Budget(v, "disk", 1 << 30, Lru())
    before = budget.used()
    damaged = files(tmp_path)[0]
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    verify(v)
    assert budget.used() == before, "it takes as much in quarantine as before"
    v.catalog.close()


def test_damaged_files_make_room_before_sound_ones_go(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = chain(range(4 * SIZE))
    v.put(PRINT, links, rows)
    last = v.catalog.lookup(PRINT, links)[-1].content
    (path,) = [p for p in files(tmp_path) if p.stem == last]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert len(verify(v).faults) == 1
    budget = Budget(v, "disk", 1 << 30, Lru())
    budget.limit = budget.used()
    assert budget.make_room(100).chunks == 0
    assert not list((tmp_path / "quarantine").iterdir())
    assert len(files(tmp_path)) == 3
    v.catalog.close()


# -------------------------------------------------------------------- decisions


def count(store: Store, session: str | None = None) -> int:
    sql = "SELECT count(*) FROM decision WHERE session = coalesce(?, session)"
    return int(store.catalog.read(sql, (session,))[0][0])


def decide(store: Store, session: str, times: int) -> None:
    with store.catalog.write() as db:
        db.executemany(
            "INSERT INTO decision (session, what, verdict, reason, at) VALUES (?, 'x', '', '', 0)",
            [(session,)] * times,
        )


def test_decisions_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forkserve.store.journal.CAP_DECISIONS", statements.CAP_DECISIONS.replace("100000", "50")
    )
    with Store(tmp_path) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        decide(store, "a", 200)
        assert store.restorer is not None
        assert eng._journal is not None
        eng._journal.decided("a", h.tip, "restore", "restored", "faster")
        eng.commit("a", h.tip, [1])
        assert count(store) == 50
        assert store.catalog.read("SELECT what FROM decision ORDER BY id DESC LIMIT 1") == [
            ("restore",)
        ]
        eng.shutdown()


def test_decisions_go_with_their_session(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        eng = engine(store)
        for name in ("a", "b"):
            eng.open(PROMPT, session=name)
            decide(store, name, 3)
        eng.close("a")
        collect(store.vault)
        assert count(store, "a") >= 3, "within the grace"
        collect(store.vault, grace_s=-1)
        assert count(store, "a") == 0
        assert count(store, "b") >= 3
        eng.shutdown()


# -------------------------------------------------------------------- the clock


def test_a_clock_that_is_set_back_is_an_event(tmp_path: Path) -> None:
    at = [1000.0]
    catalog = Catalog(tmp_path, now=lambda: at[0])
    catalog.set_setting("a", "1")
    at[0] = 999.5
    catalog.set_setting("a", "2")
    assert catalog.events("clock") == [], "a small step keeps it right"
    at[0] = 900.0
    catalog.set_setting("a", "3")
    catalog.set_setting("a", "4")
    (event,) = catalog.events("clock")
    assert (event["at"], event["back_s"], event["from"]) == (900.0, 99.5, 999.5)
    catalog.close()


def test_a_clock_that_was_set_back_between_two_runs_is_one_event(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.shutdown()
    for _ in range(2):
        catalog = Catalog(tmp_path, now=lambda: time.time() - 1e6)
        catalog.set_setting("a", "1")
        (event,) = catalog.events("clock")
        assert 1e6 - 60 < event["back_s"] < 1e6 + 60
        catalog.close()


# -------------------------------------------------------------------- the scrape


def scrape(store: Store) -> list[str]:
    return [line for line in prometheus(store.metrics()).splitlines() if not line.startswith("#")]


def test_a_scrape_tells_evictions_by_reason_and_damage_by_kind(tmp_path: Path) -> None:
    with Store(tmp_path, budget_bytes=50_000) as store:
        eng = engine(store)
        for n in range(4):
            eng.publish(eng.open([n, *PROMPT], session=f"s{n}").id)
        (gone,) = store.catalog.read("SELECT detail FROM event WHERE kind = 'evicted' LIMIT 1")
        assert gone
        lines = scrape(store)
        (line,) = [x for x in lines if 'evicted_bytes{reason="budget",tier="disk"}' in x]
        assert float(line.split()[-1]) > 0
        one, two = files(tmp_path)[:2]
        one.write_bytes(one.read_bytes()[:-1] + b"?")
        two.unlink()
        verify(store.vault)
        lines = scrape(store)
        assert 'forkserve_store_unusable{reason="payload",tier="disk"} 1' in lines
        assert 'forkserve_store_unusable{reason="missing",tier="disk"} 1' in lines
        for n in range(4):
            eng.close(f"s{n}")
        collect(store.vault, grace_s=-1)
        lines = scrape(store)
        (line,) = [x for x in lines if 'evicted_bytes{reason="gc",tier="disk"}' in x]
        assert float(line.split()[-1]) > 0
        assert len(lines) == len({x.rpartition(" ")[0] for x in lines}), "no sample twice"
        eng.shutdown()


def test_a_scrape_tells_why_rows_left_their_pages(tmp_path: Path) -> None:
    with Store(tmp_path, device_bytes=1000, memory_bytes=1 << 20) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        assert eng.settle_tiers()
        eng.commit("a", h.tip, [1])
        (line,) = [x for x in scrape(store) if 'reason="device_budget",tier="device"' in x]
        assert line == 'forkserve_store_evicted_tokens{reason="device_budget",tier="device"} 700'
        eng.shutdown()


def test_a_scrape_tells_what_queues_refused_and_who_lost_to_other_bytes(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.publisher.meter.add("dropped", queue="publish")
        links = chain(range(SIZE))
        store.vault.put(PRINT, links, rows)
        other = store.vault.pack(PRINT, links[0], bytes(len(rows(links[0]))))
        store.vault.adopt([other])
        lines = scrape(store)
        assert 'forkserve_store_dropped{queue="publish"} 1' in lines
        assert 'forkserve_store_total{name="event_divergence"} 1' in lines
