"""Disks that fill up, break or may not be written, clocks that go back: tokens flow, it is said.

The full disk is a real one where this process may mount a small file system; the same cases with a
failing depot stand in `test_publish` and `test_vault`, and run everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkserve import Engine
from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.collect import collect
from forkserve.store.policies import KeepSession
from forkserve.store.rebuild import rebuild, verify

from .engines import PROMPT, cold, engine

SIZE = 8 << 20  # bytes of the small disk: the write-ahead log alone may take four megabytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    home = tmp_path / "disk"
    home.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(home)]
    if shutil.which("mount") is None:
        pytest.skip("there is no command mount")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this process may not mount a file system: {done.stderr.strip()}")
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


def grow(eng: Engine, turns: int) -> None:
    """Sessions, commits and publishes; every token is compared with a cold engine."""
    for turn in range(turns):
        name = f"s{eng._opened + 1}"
        eng.open([turn, *PROMPT], session=name, salt=name)
        eng.publish(name, wait=False)
        eng.commit(name, eng.tip(name), PROMPT[:300])
        history = eng.tokens(name)
        if turn % 5 == 0:
            assert eng.generate(name, 2) == cold(history, 2)
        eng.close(name)


def test_a_disk_that_is_really_full_stops_no_token_and_recovers(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with Store(small_disk / "s", policy=KeepSession(), queue=4) as store:
        eng = engine(store, prefix_index=False)
        eng.open(PROMPT, session="kept")
        eng.publish("kept", name="before")
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(max(free - 20_000, 0)))
        grow(eng, 20)
        store.publisher.drain()
        assert sum(store.health()["failures"].values()) > 0, "it was said"
        assert eng.generate("kept", 3) == cold(PROMPT, 3)
        ballast.unlink()
        eng.commit("kept", eng.tip("kept"), [1, 2, 3])
        assert eng.publish("kept", name="after").tokens == 512
        text = eng.tokens("kept")
        assert store.catalog.events("failed"), "and written down when that was possible again"
        eng.shutdown()
    with Store(small_disk / "s", restore="always") as store:
        report = verify(store.vault)
        assert report.clean, report
        eng = engine(store)
        assert eng.resume("kept").cached_tokens == 512
        assert eng.tokens("kept") == text
        assert eng.generate("kept", 3) == cold(text, 3)
        eng.shutdown()


def test_a_budget_keeps_a_small_disk_from_filling_up(small_disk: Path) -> None:
    with Store(small_disk / "s", budget_bytes=150_000, queue=4) as store:
        eng = engine(store, prefix_index=False)
        grow(eng, 40)
        store.publisher.drain()
        assert not store.failures, store.last_failure
        used = sum(p.stat().st_blocks * 512 for p in (small_disk / "s" / "chunks").rglob("*.kv"))
        assert 60_000 < used <= 150_000
        eng.shutdown()


def test_a_directory_that_cannot_be_written_is_refused_and_can_be_read(tmp_path: Path) -> None:
    home = tmp_path / "s"
    eng = engine(home)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="x")
    eng.shutdown()
    for path in (home, home / "catalog.db"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with Store(home, "reader") as store:
            eng = engine(store)
            h = eng.restore("x")
            assert h.cached_tokens == 512
            assert eng.generate(h.id, 3) == cold(PROMPT, 3)
            eng.shutdown()
        if os.geteuid():  # root may write everything
            with pytest.raises(StoreError, match="cannot"):
                Store(home)
    finally:
        home.chmod(0o700)


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="needs Linux")
def test_a_read_only_file_system_is_read_and_stops_no_token(small_disk: Path) -> None:
    eng = engine(small_disk / "s")
    eng.open(PROMPT, session="a")
    eng.publish("a", name="x")
    eng.shutdown()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    assert subprocess.run(remount, check=False).returncode == 0
    with pytest.raises(StoreError, match="cannot"):
        Store(small_disk / "s")
    with Store(small_disk / "s", "reader") as store:
        eng = engine(store)
        h = eng.restore("x")
        assert h.cached_tokens == 512
        assert eng.generate(h.id, 3) == cold(PROMPT, 3)
        eng.shutdown()


def test_a_deleted_database_costs_sessions_not_kv_and_the_command_says_what_to_do(
    tmp_path: Path,
) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="x")
    eng.shutdown()
    for path in tmp_path.glob("catalog.db*"):
        path.unlink()
    with Store(tmp_path, restore="always") as store:
        assert rebuild(store.vault).adopted == 2
        eng = engine(store)
        assert eng.stored_sessions() == []
        h = eng.open(PROMPT)
        assert h.cached_tokens == 512
        assert eng.generate(h.id, 3) == cold(PROMPT, 3)
        eng.shutdown()


def test_a_clock_that_goes_back_breaks_nothing(tmp_path: Path) -> None:
    with Store(tmp_path, budget_bytes=200_000, memory_bytes=1 << 20) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.publish("a", name="x")
        store.catalog.now = lambda: time.time() - 1e8
        eng.commit("a", eng.tip("a"), PROMPT[:300])
        eng.publish("a", name="y")
        text = eng.tokens("a")
        assert collect(store.vault).chunks == 0
        store.budgets["disk"].make_room(10_000)
        assert verify(store.vault).clean
        (ahead,) = store.catalog.read("SELECT max(updated_at) FROM session")[0]
        assert ahead > time.time() - 100, "a session never looks older than it was"
        eng.shutdown()
    with Store(tmp_path, restore="always") as store:
        eng = engine(store)
        assert eng.resume("a").cached_tokens == 768
        assert eng.generate("a", 3) == cold(text, 3)
        eng.shutdown()
