"""Figures of the store beside those of the disk and the processor, in one run.

PYTHONPATH=. python tests/store/measure.py [rates] [catalog] [engine]
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from blake3 import blake3

from forkserve.store.catalog import Catalog
from forkserve.store.depots import LocalDepot
from forkserve.store.identity import fingerprint, plan_chain
from forkserve.store.restore import Restorer
from forkserve.store.vault import Vault

ROW = 46_080  # bytes of a SmolLM2 row in float32
FIELDS = {
    "weights": "blake3:00",
    "architecture": "llama",
    "config": {},
    "layout": {"dtype": "float32", "row_bytes": ROW},
    "kv_dtype": "float32",
    "kv_quantization": "none",
    "rope": {},
    "adapter": "none",
    "variant": {
        "engine": "torch",
        "version": "1",
        "kernels": "1",
        "device": "cpu",
        "determinism": "numeric",
    },
}


def timed(work: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def say(what: str, value: str) -> None:
    print(f"{what:58} {value}", flush=True)


def rates(folder: Path) -> None:
    """Publish and restore of 2,048 tokens against what disk, blake3 and memory allow."""
    links = plan_chain(list(range(2048)), "")
    payload = {x.id: os.urandom(256 * ROW) for x in links}
    size = sum(map(len, payload.values()))
    serial = iter(range(10**6))

    def disk_files() -> None:
        home = folder / f"raw{next(serial)}"
        home.mkdir()
        for number, data in enumerate(payload.values()):
            with (home / f"{number}.tmp").open("wb", 0) as file:
                file.write(data)
                os.fsync(file.fileno())
            os.replace(home / f"{number}.tmp", home / str(number))
        handle = os.open(home, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        shutil.rmtree(home)

    made = fingerprint(FIELDS)
    home = folder / "kept"
    home.mkdir()
    catalog = Catalog(home)
    vault = Vault(catalog, [LocalDepot(home / "chunks")])

    def publish() -> None:
        other = plan_chain(list(range(2048)), f"salt {next(serial)}")
        rows = dict(zip((x.id for x in other), payload.values(), strict=True))
        assert vault.put(made, other, lambda x: rows[x.id]).written == 8

    pairs = [(timed(disk_files, 1), timed(publish, 1)) for _ in range(6)]  # taken in turns
    raw, own = (statistics.median(times) for times in zip(*pairs, strict=True))
    say("write, the disk's own (a file + fsync + rename each)", f"{size / raw / 1e6:7.0f} MB/s")
    say("write, publish (hash, files, one durable step, catalog)", f"{size / own / 1e6:7.0f} MB/s")

    vault.put(made, links, lambda x: payload[x.id])
    target = np.zeros(size, np.uint8)
    one = payload[links[0].id]
    hashing = timed(lambda: blake3(one).digest())
    copying = timed(lambda: np.copyto(target[: len(one)], np.frombuffer(one, np.uint8)))
    limit = len(one) / (hashing + copying)
    say("blake3, one thread", f"{len(one) / hashing / 1e6:7.0f} MB/s")
    say("copy into warm memory", f"{len(one) / copying / 1e6:7.0f} MB/s")
    say("read limit: hash, then copy, one thread", f"{limit / 1e6:7.0f} MB/s")
    restorer = Restorer(vault)

    def restore() -> None:
        vault._sound.clear()  # as in a fresh process: every byte is hashed
        at = 0
        for loaded in restorer.fetch(made, catalog.lookup(made, links)):
            part = np.frombuffer(loaded.payload, np.uint8)
            np.copyto(target[at : at + len(part)], part)
            at += len(part)
        assert at == size

    read = size / timed(restore)
    say("read, restore from page cache, verified", f"{read / 1e6:7.0f} MB/s")
    say("  of the limit", f"{read / limit:7.2f}")
    restorer.close()
    catalog.close()


def catalog(folder: Path) -> None:
    """Look-ups and opening of large catalogs."""
    made = fingerprint(FIELDS)
    links = plan_chain(list(range(79 * 256)), "")
    home = folder / "rows"
    home.mkdir()
    Catalog(home).close()
    db = sqlite3.connect(home / "catalog.db")
    db.execute("PRAGMA recursive_triggers = OFF")
    db.execute("INSERT INTO fingerprint VALUES (1, ?, ?, 0)", (made.digest.hex(), made.text))

    def fill(first: int, last: int) -> None:
        ids = [(n, f"{n:064x}") for n in range(first, last)]
        db.executemany(
            "INSERT INTO chunk VALUES (?,1,?,?,0,256,0,0,0)", [(n, h, h) for n, h in ids]
        )
        db.executemany("INSERT INTO part VALUES (?,?,'raw',1)", [(h, n) for n, h in ids])
        db.executemany("INSERT INTO replica VALUES (?,'disk',1,0,NULL)", [(h,) for _, h in ids])
        db.commit()

    fill(1, 100_000)
    base = 10_000_000
    for number, x in enumerate(links):
        row = (base + number, x.id.hex(), x.parent.hex(), x.start)
        db.execute("INSERT INTO chunk VALUES (?,1,?,?,?,256,0,0,0)", row)
        db.execute("INSERT INTO part VALUES (?,?,'raw',1)", (f"f{number:063d}", base + number))
        db.execute("INSERT INTO replica VALUES (?,'disk',1,0,NULL)", (f"f{number:063d}",))
    db.commit()
    opened = Catalog(home)
    assert len(opened.lookup(made, links)) == 79
    took = timed(lambda: opened.lookup(made, links), 50)
    say("lookup of 79 chunks in 100,000 rows", f"{took * 1e3:7.3f} ms")
    opened.close()
    for first in range(100_000, 1_000_000, 100_000):
        fill(first, first + 100_000)
    db.close()
    took = timed(lambda: Catalog(home, "owner").close(), 9)
    say("open and close a catalog of 1,000,000 rows", f"{took * 1e3:7.2f} ms")


def commits(folder: Path) -> None:
    """Time until a commit is durable, against the same commit without a store."""
    from forkserve import Engine, ForkServeConfig
    from forkserve.engine import MockBackend

    for store in (None, folder / "commits"):
        backend = MockBackend(ForkServeConfig(capacity_pages=4096))
        eng = Engine(backend, store=store)
        h = eng.open(list(range(256)) * 8)
        times = []
        for turn in range(200):
            begin = time.perf_counter()
            eng.commit(h.id, h.tip, [turn % 7, 2, 3])
            times.append((time.perf_counter() - begin) * 1e3)
        times.sort()
        name = "commit, durable (WAL, NORMAL)" if store else "commit, without a store"
        say(name, f"{times[100]:7.3f} ms median, {times[198]:.3f} ms p99")
        eng.shutdown()


def engine(folder: Path) -> None:
    """SmolLM2: prefill against restore, and tokens beside a publish."""
    from forkserve import Engine, ForkServeConfig
    from forkserve.engine import LocalBackend
    from forkserve.store import Store
    from forkserve.types import SamplingParams

    text = [n * 37 % 40_000 for n in range(2048)]
    config = ForkServeConfig(capacity_pages=600)
    eng = Engine(LocalBackend(config), store=folder / "smol")
    begin = time.perf_counter()
    eng.open(text, session="a")
    prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    eng.publish("a")
    say("SmolLM2, publish of 2,048 tokens", f"{time.perf_counter() - begin:7.3f} s")
    params = SamplingParams(ignore_eos=True)
    short = eng.open(text[:64], session="d", salt="d")
    for name in ("off", "on", "off again"):
        waits, last = [], time.perf_counter()
        for number, _ in enumerate(eng.start(short.id, 80, params=params)):
            waits.append((time.perf_counter() - last) * 1e3)
            if name == "on" and number % 8 == 0:
                with eng.store.catalog.write() as db:  # type: ignore[union-attr]
                    db.execute("DELETE FROM replica")
                eng.publish("a", wait=False)
            last = time.perf_counter()
        waits = sorted(waits[1:])
        say(
            f"decode, publishing {name}",
            f"{statistics.median(waits):7.1f} ms median, {waits[-1]:.1f} ms worst of 79",
        )
    eng.store.publisher.drain()  # type: ignore[union-attr]
    eng.publish("a")
    eng.shutdown()
    with Store(folder / "smol", restore="always") as store:
        eng = Engine(LocalBackend(config), store=store)
        begin = time.perf_counter()
        assert eng.resume("a").cached_tokens == 2048
        took = time.perf_counter() - begin
        say("SmolLM2, prefill of 2,048 tokens", f"{prefill:7.3f} s")
        say("SmolLM2, resume with restore, verified", f"{took:7.3f} s  ({prefill / took:.0f}x)")
        say("  rate", f"{2048 * ROW / took / 1e6:7.0f} MB/s")
        eng.shutdown()


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["rates", "catalog", "commits", "engine"]
    for part in (rates, catalog, commits, engine):
        if part.__name__ in chosen:
            with tempfile.TemporaryDirectory() as place:
                part(Path(place))
