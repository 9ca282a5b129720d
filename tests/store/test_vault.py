"""Chunks in and out: every damage is a shorter prefix, never a wrong row."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forkserve.store.catalog import Catalog
from forkserve.store.chunks import ChunkFault
from forkserve.store.collect import collect, reachable
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from forkserve.store.identity import Link, lossy_of
from forkserve.store.rebuild import verify
from forkserve.store.seal import Sealer
from forkserve.store.vault import Vault

from .rig import PRINT, chain, files, good, load, rows, vault

LINKS = chain(range(40))  # ten chunks


def path_of(v: Vault, link: Link) -> Path:
    depot = v.depots["disk"]
    assert isinstance(depot, LocalDepot)
    (found,) = [f for f in v.catalog.lookup(PRINT, LINKS) if f.link == link]
    return depot._path(found.content)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def pad(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 9)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 4
    path.write_bytes(data)


def gone(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    other = next(p for p in sorted(path.parent.parent.rglob("*.kv")) if p != path)
    path.write_bytes(other.read_bytes())


DAMAGES = (flip, cut, pad, empty, header, gone, swap)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at", [0, 4, 9])
def test_damage_cuts_the_prefix_is_set_aside_and_can_be_mended(
    tmp_path: Path, damage: Callable[[Path], None], at: int
) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    damage(path_of(v, LINKS[at]))
    assert good(v, LINKS) == at
    assert good(v, LINKS) == at, "the bad chunk is not listed any more"
    (event,) = v.catalog.events("quarantine")
    assert event["place"] == "disk"
    aside = list((tmp_path / "quarantine").glob("*")) if damage is not gone else [Path()]
    assert len(aside) == 1
    assert v.put(PRINT, LINKS, rows).written == 1
    assert good(v, LINKS) == 10
    assert verify(v).clean
    v.catalog.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_what_happened_after_the_first_open(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    assert good(v, LINKS) == 10
    path = path_of(v, LINKS[3])
    before = path.stat()
    damage(path)
    if path.exists() and path.stat().st_size == before.st_size:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a liar's time stamp
    report = verify(v)
    assert not report.clean
    assert len(report.faults) + report.dangling == 1
    assert good(v, LINKS) == 3
    assert verify(v).clean
    v.catalog.close()


def test_every_byte_is_hashed_at_the_first_open_of_a_process_and_only_then(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert v.verified_bytes == 0
    for _ in range(3):
        assert good(v, LINKS) == 10
        assert v.verified_bytes == size
    flip(path_of(v, LINKS[0]))  # the file has another stamp now: hashed again, and found
    assert good(v, LINKS) == 0
    other = vault(tmp_path)
    assert good(other, LINKS) == 0
    v.catalog.close()
    other.catalog.close()


def test_a_lost_file_is_written_again_though_the_catalog_lists_it(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    path_of(v, LINKS[2]).unlink()
    assert v.put(PRINT, LINKS, rows).written == 1
    assert good(v, LINKS) == 10
    again = v.put(PRINT, LINKS, rows)
    assert (again.written, again.known, again.bytes) == (0, 10, 0)
    v.catalog.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_place_that_cannot_be_read_is_a_miss_and_loses_nothing(tmp_path: Path, code: int) -> None:
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    v = vault(tmp_path, depots=[depot])
    v.put(PRINT, LINKS, rows)
    depot.fail["open"] = code
    assert good(v, LINKS) == 0
    assert v.catalog.events("read_failed")
    depot.fail.clear()
    assert good(v, LINKS) == 10
    v.catalog.close()


def test_a_device_that_lies_is_caught(tmp_path: Path) -> None:
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    v = vault(tmp_path, depots=[depot])
    v.put(PRINT, LINKS, rows)
    depot.spoil = lambda data: data.__setitem__(-1, data[-1] ^ 1)
    assert good(v, LINKS) == 0
    v.catalog.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_publish_lists_nothing_and_the_next_one_works(tmp_path: Path, code: int) -> None:
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    v = vault(tmp_path, depots=[depot])
    depot.fail["put"] = code
    with pytest.raises(OSError, match="injected"):
        v.put(PRINT, LINKS, rows)
    assert v.catalog.usage() == {}
    assert verify(v).clean
    depot.fail.clear()
    v.put(PRINT, LINKS, rows)
    assert good(v, LINKS) == 10
    v.catalog.close()


@pytest.mark.parametrize("form", ["raw", "zstd"])
def test_lossless_formats_serve_the_same_rows(tmp_path: Path, form: str) -> None:
    if form == "zstd":
        pytest.importorskip("zstandard")
    v = vault(tmp_path, format=form)
    v.put(PRINT, LINKS, rows)
    assert good(v, LINKS) == 10
    v.catalog.close()


def test_lossy_rows_are_served_under_a_lossy_fingerprint_alone(tmp_path: Path) -> None:
    lossy = lossy_of(PRINT)
    v = vault(tmp_path, format="int8")
    v.put(lossy, LINKS, rows)
    v.put(PRINT, LINKS[:6], rows)  # as none is written any more
    v.format = "raw"
    v.put(lossy, LINKS[:8], lambda link: bytes(load(v, [link], lossy)[0].payload))
    assert load(v, LINKS) == []
    v.put(PRINT, LINKS[:3], rows)
    assert good(v, LINKS) == 3
    forms = [(f.made == PRINT, f.format) for f in v.find(lossy, LINKS)]
    assert forms == [(True, "raw")] * 3 + [(False, "raw")] * 5 + [(False, "int8")] * 2
    loaded = load(v, LINKS, lossy)
    assert bytes(loaded[0].payload) == rows(LINKS[0])
    assert bytes(loaded[3].payload) != rows(LINKS[3])
    assert verify(v).clean
    v.adopt([v.pack(made, LINKS[0], bytes(128)) for made in (lossy, PRINT)])
    assert len(v.catalog.events("divergence")) == 1, "of exact rows alone"
    v.catalog.close()


def test_encrypted_files_hold_no_tokens_and_a_wrong_key_is_a_miss(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    v = vault(tmp_path, sealer=Sealer(b"1" * 32))
    v.put(PRINT, LINKS, rows)
    assert good(v, LINKS) == 10
    blob = b"".join(path.read_bytes() for path in files(tmp_path))
    assert not any(link.tokens in blob or rows(link)[:16] in blob for link in LINKS)
    for sealer in (Sealer(b"2" * 32), None):
        other = Vault(Catalog(tmp_path), list(v.depots.values()), sealer=sealer)
        assert load(other, LINKS) == []
        other.catalog.close()
    assert good(v, LINKS) == 10, "a wrong key is no damage"
    assert verify(v).clean
    v.catalog.close()


def test_parts_are_copied_down_and_served_from_where_they_are(tmp_path: Path) -> None:
    disk, far = LocalDepot(tmp_path / "chunks"), MemoryDepot(place="object")
    v = vault(tmp_path, depots=[disk, far])
    v.put(PRINT, LINKS, rows)
    found = v.catalog.lookup(PRINT, LINKS)
    parts = [f.content for f in found]
    assert all(v.copy_one(part, "disk", "object") for part in parts)
    v.catalog.forget("disk", parts[3:])
    disk.delete(parts[3:])
    assert good(v, LINKS) == 10
    far.delete([parts[5]])
    assert good(v, LINKS) == 5
    flip(path_of(v, LINKS[1]))
    assert good(v, LINKS) == 5, "the far copy is as good"
    v.catalog.close()


# -------------------------------------------------------------------- garbage


def age(v: Vault, seconds: float) -> None:
    """Let everything be older than it is."""
    with v.catalog.write() as db:
        db.execute(
            "UPDATE chunk SET used_at = used_at - ?, created_at = created_at - ?", [seconds] * 2
        )
    for path in files(v.catalog.folder):
        os.utime(path, (time.time() - seconds,) * 2)


def pin(v: Vault, link: Link, until: float | None = None) -> None:
    with v.catalog.write() as db:
        db.execute("INSERT INTO pin VALUES (?, 'test', ?)", (link.id.hex(), until))


def test_garbage_goes_after_its_grace_and_roots_keep_their_ancestors(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    pin(v, LINKS[3])
    assert collect(v, grace_s=3600).chunks == 0
    age(v, 7200)
    assert collect(v, grace_s=3600, dry_run=True).chunks == 6
    assert good(v, LINKS) == 10
    assert collect(v, grace_s=3600).chunks == 6
    assert good(v, LINKS) == 4
    assert len(files(tmp_path)) == 4
    with v.catalog.write() as db:
        db.execute("UPDATE pin SET until = ?", (time.time() - 1,))
    assert collect(v, grace_s=3600).pins == 1
    assert files(tmp_path) == []
    v.catalog.close()


def test_orphans_go_after_the_grace_and_a_clock_set_back_keeps_them(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v._first.put([("a" * 64, [b"nobody names me"])])
    assert collect(v, grace_s=60).orphans == 0
    ahead = time.time() + 10_000
    os.utime(files(tmp_path)[0], (ahead, ahead))
    assert collect(v, grace_s=60).orphans == 0
    age(v, 120)
    assert collect(v, grace_s=60).orphans == 1
    assert files(tmp_path) == []
    v.catalog.close()


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=24), min_size=1, max_size=6),
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
)
def test_what_a_root_reaches_is_never_deleted(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], pins: set[tuple[int, int]]
) -> None:
    v = vault(tmp_path_factory.mktemp("gc"), depots=[MemoryDepot(place="disk")])
    chains = [chain(text) for text in texts]
    for links in chains:
        v.put(PRINT, links, rows)
    kept: set[bytes] = set()
    for number, depth in pins:
        links = chains[number % len(chains)][: depth + 1]
        if links:
            with v.catalog.write() as db:
                db.execute("INSERT OR IGNORE INTO pin VALUES (?, 't', NULL)", (links[-1].id.hex(),))
            kept |= {link.id for link in links}
    assert {link.id.hex() for links in chains for link in links if link.id in kept} <= reachable(v)
    collect(v, grace_s=-1)
    for links in chains:
        wanted = next((n for n, link in enumerate(links) if link.id not in kept), len(links))
        assert good(v, links) == wanted
    assert verify(v).clean
    v.catalog.close()


def test_faults_have_stable_words() -> None:
    assert ChunkFault("payload", "x").damaged
    assert not any(ChunkFault(k, "x").damaged for k in ("version", "format", "key", "identity"))
