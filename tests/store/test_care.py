"""Scrub, numbers, check-up, migration and push: from the library and from the command."""

from __future__ import annotations

import errno
import json
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import ConfigError, StoreError
from forkserve.store import Store, schema
from forkserve.store.checkup import checkup
from forkserve.store.depots import FaultyDepot, LocalDepot, depot_at
from forkserve.store.metrics import Meter, prometheus
from forkserve.store.scrub import Scrubber, scrub
from tests.waiting import wait_for

from .engines import PROMPT, cold, engine
from .rig import PRINT, chain, files, good, rows, vault
from .test_cli import ask, run
from .test_migrate import old_store


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class Frozen:
    """Hashing takes no time."""

    def monotonic(self) -> float:
        return 0.0


# -------------------------------------------------------------------- scrub


def test_a_slice_takes_what_was_hashed_longest_ago(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, chain(range(40)), rows)
    size = files(tmp_path)[0].stat().st_size
    seen: list[int] = []
    for _ in range(4):
        report = scrub(v, most_bytes=3 * size)
        assert (report.checked, report.clean) == (3, True)
        (verified,) = v.catalog.read("SELECT count(*) FROM replica WHERE verified_at > 0")[0]
        seen.append(verified)
    assert seen == [3, 6, 9, 10]
    assert len(v.catalog.events("scrub")) == 4
    with pytest.raises(StoreError, match="no place"):
        scrub(v, places=["moon"])
    v.catalog.close()


def test_flipped_bytes_are_found_set_aside_and_computed_again(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a")
    eng.shutdown()
    flip(files(tmp_path)[0])
    with Store(tmp_path, restore="always") as store:
        report = scrub(store.vault)
        assert [kind for _, _, kind in report.faults] == ["payload"]
        assert len(list((tmp_path / "quarantine").iterdir())) == 1
        assert scrub(store.vault).clean
        assert store.metrics()["totals"]["event_quarantine"] == 1
        eng = engine(store)
        eng.resume("a")
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        eng.shutdown()


def test_a_scrub_keeps_its_rate_and_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[scrub.__module__], "time", Frozen())
    v = vault(tmp_path)
    v.put(PRINT, chain(range(40)), rows)
    size, waits = files(tmp_path)[0].stat().st_size, list[float]()

    def stop(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 5

    assert scrub(v, rate=float(size), stop=stop).checked == 5
    assert waits == [1.0, 2.0, 3.0, 4.0, 5.0], "a second for each chunk, as no time passes"
    v.catalog.close()


def test_a_scrub_of_an_unreadable_place_says_so_and_loses_nothing(tmp_path: Path) -> None:
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    v = vault(tmp_path, depots=[depot])
    v.put(PRINT, chain(range(8)), rows)
    depot.fail["open"] = errno.EIO
    report = scrub(v)
    assert (report.checked, len(report.problems)) == (0, 2)
    depot.fail.clear()
    assert good(v, chain(range(8))) == 2
    v.catalog.close()


def test_the_background_scrub_finds_damage_beside_a_running_engine(tmp_path: Path) -> None:
    with Store(tmp_path, scrub_bytes_s=1e9) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.publish("a")
        assert store.scrubber is not None
        store.scrubber.close()
        flip(files(tmp_path)[1])
        scrubber = Scrubber(store.vault, 1e9, pause_s=0.01)
        wait_for(lambda: store.catalog.events("quarantine"))
        assert store.catalog.events("quarantine")[0]["why"] == "payload"
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        scrubber.close()
        eng.shutdown()
    with pytest.raises(ConfigError, match="positive float"):
        Store(tmp_path, scrub_bytes_s=0)


# -------------------------------------------------------------------- numbers


LINE = re.compile(r'forkserve_store_[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? -?[0-9.]+\Z')


def test_metrics_before_and_after(tmp_path: Path) -> None:
    with Store(tmp_path, memory_bytes=1 << 20, restore="always") as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        first = store.metrics()
        assert first["tiers"]["disk"]["bytes"] == 0
        eng.publish("a")
        eng.close("a")
        eng._core.index.clear()
        eng.open(PROMPT, session="b")
        after = store.metrics()
        values = {(s["name"], *s["labels"].values()): s["value"] for s in after["process"]}
        assert values["restored_tokens", "disk"] == 512
        assert values["computed_tokens", "not_stored"] == 700
        assert values["published_chunks",] == 2
        assert values["calls", "publish"] == 1
        assert after["tiers"]["disk"]["parts"] == 2
        assert after["tiers"]["memory"]["limit"] == 1 << 20
        text = prometheus(after)
        for line in text.splitlines():
            assert line.startswith("# ") or LINE.match(line), line
        assert 'forkserve_store_restored_tokens{tier="disk"} 512' in text
        assert text.count("# TYPE forkserve_store_bytes gauge") == 1
        eng.shutdown()


def test_totals_outlive_the_process(tmp_path: Path) -> None:
    for count in (1, 2):
        with Store(tmp_path) as store:
            store.failed(OSError("disk full"))
            assert store.metrics()["totals"]["event_failed"] == count


def test_labels_are_escaped() -> None:
    meter = Meter()
    meter.add("failures", error='a"b\\c\nd')
    process = [{"name": n, "labels": dict(x), "value": v} for n, x, v in meter.samples()]
    empty: dict[str, Any] = {"tiers": {}, "queued": {}, "totals": {}}
    assert r'{error="a\"b\\c\nd"} 1' in prometheus({"process": process, **empty})


# -------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    eng = engine(tmp_path / "store")
    eng.open(PROMPT, session="agent")
    eng.publish("agent", name="case-17")
    eng.shutdown()
    return tmp_path / "store"


def test_scrub_and_stats(folder: Path) -> None:
    assert ask(folder, "scrub")["checked"] == 2
    assert ask(folder, "scrub", "--bytes", 1)["checked"] == 1
    assert "sound" in run(folder, "scrub", "--rate", 1e9).output
    flip(files(folder)[0])
    assert ask(folder, "scrub", code=1)["damaged"][0]["why"] == "payload"
    assert ask(folder, "stats")["totals"]["event_scrub"] == 4
    assert "event_scrub" in run(folder, "stats").output
    assert 'forkserve_store_parts{tier="disk"} 1' in run(folder, "stats", "--prometheus").output


def faults(folder: Path, code: int = 1) -> list[str]:
    found = ask(folder, "doctor", code=code)
    assert found["ok"] is (code == 0)
    return [check["name"] for check in found["checks"] if not check["ok"]]


def test_doctor_finds_each_seeded_fault(folder: Path) -> None:
    assert faults(folder, 0) == []
    assert "consistent" in run(folder, "doctor").output
    first, second = files(folder)
    kept = first.read_bytes()
    first.unlink()
    assert faults(folder) == ["files in disk"]
    first.write_bytes(kept[:-1])
    assert faults(folder) == ["files in disk"]
    first.write_bytes(kept)
    (second.parent / f"{'f' * 64}.kv").write_bytes(b"nobody's")
    found = ask(folder, "doctor")
    assert "1 file that nothing names" in json.dumps(found)
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute("UPDATE place SET used = used + 1")
    assert faults(folder) == ["database"]
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute("UPDATE place SET used = used - 1")
        db.execute("UPDATE session SET updated_at = updated_at + 1e6")
        db.execute(
            "INSERT INTO outbox (content, place, due_at, created_at)"
            " SELECT content, 'object', 0, 0 FROM part"
        )
    db.close()
    assert faults(folder) == ["clock", "write-behind"]


def test_doctor_says_who_owns_the_store(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    with Store(tmp_path, "reader") as store:
        assert "epoch 1" in next(c.found for c in checkup(store) if c.name == "owner")
    eng.shutdown()
    assert "nobody" in json.dumps(ask(tmp_path, "doctor"))


def test_migrate_goes_forward_once_and_never_back(tmp_path: Path) -> None:
    folder = old_store(tmp_path / "s")
    assert "open it once for writing" in run(folder, "ls", code=2).output
    now = schema.VERSION
    assert ask(folder, "migrate") == {"from": 1, "to": now}
    assert ask(folder, "migrate") == {"from": now, "to": now}
    assert f"is at version {now}" in run(folder, "migrate").output
    assert ask(folder, "verify")["clean"]
    with sqlite3.connect(folder / "catalog.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    assert "use the newer ForkServe" in run(folder, "migrate", code=2).output
    assert "there is no catalog" in run(tmp_path, "migrate", code=2).output


def test_push_brings_everything_to_a_further_place(folder: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    assert ask(folder, "--far", far, "push")["sent"] == 2
    assert ask(folder, "--far", far, "push")["sent"] == 0
    assert len(list(far.rglob("*.kv"))) == 2
    assert ask(folder, "--far", far, "du")["places"]["far"]["files"] == 2
    assert ask(folder, "du")["places"]["far"] == {
        "listed": 16384,
        "parts": 2,
        "used": None,
        "files": None,
    }
    assert "not looked at" in run(folder, "du").output
    assert ask(folder, "ls")["names"][0]["far"] == 512
    assert ask(folder, "show", "case-17")["chunks"][0]["places"] == "disk,far"
    assert "say where to" in run(folder, "push", code=2).output
    assert "names no bucket" in run(folder, "--far", "s3://", "push", code=2).output
    assert "is no place" in run(folder, "--far", "ftp://x/y", "push", code=2).output


def test_places_by_url(tmp_path: Path) -> None:
    far = depot_at(f"file://{tmp_path}/a%20b")
    assert far.place == "far"
    assert not (tmp_path / "a b").exists(), "made when something is written"
    far.put([("a" * 64, [b"bytes"])])
    assert (tmp_path / "a b").is_dir()
    with pytest.raises(ConfigError):
        depot_at("")
