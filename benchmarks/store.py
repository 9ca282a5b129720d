"""The store: tokens beside a publish, restore against prefill, commits, look-ups, the budget."""

from __future__ import annotations

import mmap
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benchmarks import models
from benchmarks.measure import Options, Report, Target, median, quantile, repeat, share
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.engine import LocalBackend, MockBackend
from forkserve.store import Store
from forkserve.store.catalog import Catalog
from forkserve.store.identity import Fingerprint, fingerprint, plan_chain

FREE = SamplingParams(ignore_eos=True)
CHAIN = 79  # chunks of a context of 20,000 tokens


@dataclass
class Size:
    trunk: int = 2048
    decode: int = 300
    rounds: int = 5
    commits: int = 200
    rows: int = 100_000
    many_rows: int = 1_000_000
    budget: int = 20_000_000
    budget_s: float = 60.0


def run(options: Options) -> Report:
    report = Report("store", "durable states (SmolLM2 in float32, a directory, CPU)")
    size = Size(512, 12, 1, 20, 2_000, 5_000, 1_000_000, 0.0) if options.quick else Size()
    with tempfile.TemporaryDirectory(prefix="forkserve-bench-") as place:
        home = Path(place)
        real(report, options, size, home)
        commits(report, options, size, home / "commits")
        catalogs(report, options, size, home / "catalog")
        budget(report, options, size, home / "budget")
    report.notes += [
        "limit: bytes of the chunks over (blake3 of them + one copy), one thread, the same round",
        "a pool keeps some memory of freed pages, so a restore usually finds its target there "
        "('warm'); where nothing was freed before, it pays for page faults ('fresh'), as does the "
        "copy into fresh memory",
    ]
    return report


def target(
    report: Report, options: Options, what: str, wanted: str, value: float, met: bool, why: str
) -> None:
    known = None if options.quick else met
    report.targets.append(Target(what, wanted, value, known, why))


# -------------------------------------------------------------------- a real model


def real(report: Report, options: Options, size: Size, home: Path) -> None:
    model: Any = models.tiny_llama() if options.quick else "smollm2"
    config = ForkServeConfig(capacity_pages=4 * size.trunk // 16 + 64, prefix_index=False)
    with Store(home / "real", restore="always", queue=8) as store:
        eng = Engine(LocalBackend(config, model), store=store)
        beside(report, options, size, eng, store)
        restore(report, options, size, eng, store, home / "real")
        eng.shutdown()


def beside(report: Report, options: Options, size: Size, eng: Engine, store: Store) -> None:
    """ms between tokens with a publish running, against the same generation without one.

    Only bytes count that were durable and catalogued by the last token.
    """
    vocab, row = eng.backend.info.vocab_size, eng.backend.info.kv_bytes_per_token
    eng.open(models.text(size.trunk, vocab, 1), session="trunk")
    prompt = models.text(64, vocab, 2)

    def waits(publishing: bool) -> tuple[list[float], float]:
        """ms of each token, and tokens of KV published for each token generated."""
        out, published, short = [], 0, eng.open(prompt)
        ticket: Any = None
        last = time.perf_counter()
        for number, _ in enumerate(eng.start(short.id, size.decode, params=FREE)):
            out.append((time.perf_counter() - last) * 1e3)
            if publishing and (ticket is None or ticket.done):
                if number:
                    published += ticket.wait().bytes
                    forget(store)
                ticket = eng.publish("trunk", wait=False)
            last = time.perf_counter()
        published += store.catalog.usage().get("disk", (0, 0))[0]
        store.publisher.drain()
        forget(store)
        eng.close(short.id)
        return out[1:], published / row / size.decode

    def once(number: int) -> tuple[list[float], list[float], float]:
        first = waits(bool(number % 2))
        second = waits(not number % 2)
        off, on = (second, first) if number % 2 else (first, second)
        return off[0], on[0], on[1]

    once(0)
    found = repeat(once, size.rounds, size.budget_s)
    table = report.table(
        f"ms between {size.decode} tokens while {size.trunk} tokens are published again and again",
        *("publishing", "median", "p99", "worst", "published a token", "quiet rounds", "others"),
    )
    rate = median(one[2] for one in found.values)
    for name, which in (("off", 0), ("on", 1)):
        values = [ms for one in found.values for ms in one[which]]
        cells = (median(values), quantile(values, 0.99), max(values), rate if which else 0.0)
        table.add(name, *cells, found.quiet, found.others)
    ratio = median(quantile(on, 0.99) / quantile(off, 0.99) for off, on, _ in found.values)
    why = f"others took {share(found.others)} of the CPU"
    target(report, options, "p99 on/off", "<= 1.1", ratio, ratio <= 1.1, why)
    what = "tokens of KV published beside each token"
    target(report, options, what, ">= 1", rate, rate >= 1, "else a publish would never catch up")


def forget(store: Store) -> None:
    """Let nothing be stored any more, so that the next publish writes all of it again."""
    with store.catalog.write() as db:
        keys = [row[0] for row in db.execute("SELECT content FROM replica").fetchall()]
        db.execute("DELETE FROM replica")
    store.vault.depots["disk"].delete(keys)


def drop_cached(path: Path) -> bool:
    """Ask the system to forget a file's pages; True if a read would have to wait for the disk."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [bytearray(1)], os.fstat(file).st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # a file system that does not know the question
        return False
    finally:
        os.close(file)
    return False  # it is still there


def restore(
    report: Report, options: Options, size: Size, eng: Engine, store: Store, home: Path
) -> None:
    """Verified rows from the page cache (and, where it can be dropped, from the disk) into pages,
    against prefill and against the limit."""
    vocab = eng.backend.info.vocab_size
    text = models.text(size.trunk, vocab, 1)
    whole = size.trunk // 256 * 256
    eng.publish("trunk")
    eng.close("trunk")
    bytes_ = whole * eng.backend.info.kv_bytes_per_token
    fresh, warm = Memory(bytes_), np.zeros(bytes_, np.uint8)
    source = np.frombuffer(os.urandom(1 << 20) * (bytes_ // (1 << 20) + 1), np.uint8)[:bytes_]

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def bring(name: str) -> None:
        eng.open(text, session=name, prefill=False)
        assert eng.warm(name).tokens == whole

    def once(number: int) -> dict[str, float]:
        out = {}
        for key in ("restore", "into fresh"):
            store.vault._sound.clear()  # as in a fresh process: every byte is hashed
            if key == "into fresh":
                give_back(eng.backend)
            name = f"{key}{number}"
            out[key] = timed(partial(bring, name))
            eng.close(name)
        store.vault._sound.clear()
        if all(drop_cached(path) for path in (home / "chunks").rglob("*.kv")):
            name = f"disk{number}"
            out["disk"] = timed(lambda: bring(name))
            eng.close(name)
        store.restore = "never"
        name = f"cold{number}"
        out["prefill"] = timed(lambda: eng.open(text, session=name))
        eng.close(name)
        store.restore = "always"
        out["hash"] = timed(lambda: blake3(source).digest())
        out["warm"] = timed(lambda: np.copyto(warm, source))
        out["fresh"] = timed(lambda: fresh.copy(source))
        return out

    once(-1)
    found = repeat(once, size.rounds, size.budget_s)
    common = set.intersection(*(set(one) for one in found.values))
    mid = {key: median(one[key] for one in found.values) for key in common}
    table = report.table(
        f"{whole} tokens, {bytes_ / 1e6:.0f} MB",
        *("what", "page cache", "ms", "MB/s", "quiet rounds", "others"),
    )
    for key, name, cache in (
        ("prefill", "prefill", "-"),
        ("restore", "restore, verified", "warm"),
        ("into fresh", "restore, verified, into fresh pages", "warm"),
        ("disk", "restore, verified", "cold"),
        ("hash", "blake3, one thread", "-"),
        ("warm", "copy into warm memory", "-"),
        ("fresh", "copy into fresh memory", "-"),
    ):
        if key in mid:
            rate = bytes_ / mid[key] / 1e6
            table.add(name, cache, mid[key] * 1e3, rate, found.quiet, found.others)
    if "disk" not in mid:
        report.notes.append("the page cache of the chunks could not be dropped here: no cold row")
    times = median(one["prefill"] / one["restore"] for one in found.values)
    why = f"others took {share(found.others)} of the CPU"
    target(report, options, "prefill/restore", ">= 10", times, times >= 10, why)
    for key, kind in (("restore", "warm"), ("restore", "fresh"), ("into fresh", "fresh")):
        part = median((one["hash"] + one[kind]) / one[key] for one in found.values)
        what = f"{key}: share of the limit, {kind} memory"
        target(report, options, what, ">= 0.5", part, part >= 0.5, why)
    fresh.close()


def give_back(backend: Any) -> None:
    """Let the pool keep no memory of freed pages, as if nothing had been freed before."""
    spare = backend._kv._spare
    limit, spare.limit = spare.limit, 0
    backend.discard(())
    spare.limit = limit


class Memory:
    """Memory that the system has to provide anew at every copy, in small pages as in the pool."""

    def __init__(self, size: int) -> None:
        self._area = mmap.mmap(-1, size)
        for advice in ("MADV_NOHUGEPAGE",):
            if hasattr(mmap, advice):
                self._area.madvise(getattr(mmap, advice))

    def copy(self, source: Any) -> None:
        np.copyto(np.frombuffer(self._area, np.uint8), source)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._area.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._area.close()


# -------------------------------------------------------------------- the database


def commits(report: Report, options: Options, size: Size, home: Path) -> None:
    """Time of a commit until it is durable, and of the same commit without a store."""
    table = report.table(
        "ms of a commit on the mock", *("store", "median", "p99", "quiet rounds", "others")
    )
    for name in ("none", "WAL, synchronous NORMAL", "WAL, synchronous FULL"):

        def once(number: int, name: str = name) -> list[float]:
            full = name.endswith("FULL")
            store = Store(home / f"{number}{full}", full_sync=full) if name != "none" else None
            eng = Engine(MockBackend(ForkServeConfig(capacity_pages=4096)), store=store)
            handle = eng.open(list(range(256)) * 8)
            ms = []
            for turn in range(size.commits):
                begin = time.perf_counter()
                eng.commit(handle.id, handle.tip, [turn % 7, 2, 3])
                ms.append((time.perf_counter() - begin) * 1e3)
            eng.shutdown()
            if store is not None:
                store.close()
            return ms

        home.mkdir(exist_ok=True)
        found = repeat(once, size.rounds, size.budget_s / 3)
        mid = median(median(ms) for ms in found.values)
        p99 = median(quantile(ms, 0.99) for ms in found.values)
        table.add(name, mid, p99, found.quiet, found.others)
        if name.endswith("NORMAL"):
            why = f"p99 {p99:.2f} ms; others took {share(found.others)} of the CPU"
            target(report, options, "ms of a durable commit", "< 2", mid, mid < 2, why)


FIELDS: dict[str, Any] = {
    "weights": "blake3:00",
    "architecture": "llama",
    "config": {},
    "layout": {"dtype": "float32", "row_bytes": 46_080},
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


def catalogs(report: Report, options: Options, size: Size, home: Path) -> None:
    """Look-ups and opening of large catalogs."""
    made, links = fingerprint(FIELDS), plan_chain(list(range(CHAIN * 256)), "")
    home.mkdir()
    Catalog(home).close()
    fill(home, made, 1, size.rows)
    db = sqlite3.connect(home / "catalog.db")
    for number, link in enumerate(links):
        key, content = 10_000_000 + number, f"f{number:063d}"
        row = (key, link.id.hex(), link.parent.hex(), link.start)
        db.execute("INSERT INTO chunk VALUES (?,1,?,?,?,256,0,0,0)", row)
        db.execute("INSERT INTO part VALUES (?,?,'raw','',1,'')", (content, key))
        db.execute("INSERT INTO replica VALUES (?,'disk',1,0,NULL)", (content,))
    db.commit()
    db.close()
    catalog = Catalog(home)

    def look(number: int) -> float:
        begin = time.perf_counter()
        assert len(catalog.lookup(made, links)) == CHAIN
        return (time.perf_counter() - begin) * 1e3

    looks = repeat(look, 20 * size.rounds, size.budget_s / 6)
    catalog.close()
    fill(home, made, size.rows, size.many_rows)

    def start(number: int) -> float:
        begin = time.perf_counter()
        Catalog(home, "owner").close()
        return (time.perf_counter() - begin) * 1e3

    starts = repeat(start, 4 * size.rounds, size.budget_s / 6)
    table = report.table("ms of the catalog", *("what", "rows", "median", "quiet rounds", "others"))
    for what, rows, found, limit in (
        (f"look-up of {CHAIN} chunks", size.rows, looks, 1),
        ("open and close", size.many_rows, starts, 100),
    ):
        mid = median(found.values)
        table.add(what, rows, mid, found.quiet, found.others)
        why = f"others took {share(found.others)} of the CPU"
        target(report, options, f"ms, {what}", f"< {limit}", mid, mid < limit, why)


def fill(home: Path, made: Fingerprint, first: int, last: int) -> None:
    """Rows of chunks without bytes."""
    db = sqlite3.connect(home / "catalog.db")
    digest = (made.digest.hex(), made.text)
    db.execute("INSERT OR IGNORE INTO fingerprint VALUES (1, ?, ?, 0)", digest)
    for begin in range(first, last, 100_000):
        ids = [(n, f"{n:064x}") for n in range(begin, min(begin + 100_000, last))]
        rows = [(n, name, name) for n, name in ids]
        db.executemany("INSERT INTO chunk VALUES (?,1,?,?,0,256,0,0,0)", rows)
        db.executemany(
            "INSERT INTO part VALUES (?,?,'raw','',1,'')", [(name, n) for n, name in ids]
        )
        db.executemany(
            "INSERT INTO replica VALUES (?,'disk',1,0,NULL)", [(name,) for _, name in ids]
        )
        db.commit()
    db.close()


# -------------------------------------------------------------------- the budget


def budget(report: Report, options: Options, size: Size, home: Path) -> None:
    """Fill, restart, fill: what `du` says at its worst, against the limit."""
    worst, chunk = 0, 0
    for restart in range(3):
        with Store(home, budget_bytes=size.budget, queue=8) as store:
            eng = Engine(MockBackend(ForkServeConfig(capacity_pages=4096)), store=store)
            for number in range(size.budget // 40_000):
                handle = eng.open([restart, number % 200, *range(200)] * 6, salt=str(number))
                eng.publish(handle.id)
                eng.close(handle.id)
                if number % 10 == 0:
                    used = [p.stat().st_blocks * 512 for p in (home / "chunks").rglob("*.kv")]
                    worst, chunk = max(worst, sum(used)), max(chunk, *used)
            eng.shutdown()
    table = report.table("bytes on the disk", "budget", "worst", "a chunk")
    table.add(size.budget, worst, chunk)
    over = (worst - size.budget) / chunk
    target(report, options, "chunks over the budget", "<= 1", over, over <= 1, "as du counts")
