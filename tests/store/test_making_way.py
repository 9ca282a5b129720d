"""What makes way for passes: tools called by hand beside an engine, and rows ahead of time.

The same tools work flat out in a process that has no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkserve.store import Store
from forkserve.store.bundle import export_bundle, import_bundle
from forkserve.store.collect import collect
from forkserve.store.pace import PIECE, Pace, paced
from forkserve.store.rebuild import rebuild, verify
from forkserve.store.restore import Restorer
from forkserve.store.scrub import scrub
from forkserve.store.seal import Sealer
from forkserve.store.vault import Loaded, Vault
from tests.waiting import HANGS_S

from .engines import PROMPT, engine
from .rig import PRINT, chain, rows, vault

TOOLS: dict[str, Callable[[Vault, Any, Path], Any]] = {
    "gc": lambda v, show, path: collect(v, grace_s=-5, progress=show),
    "scrub": lambda v, show, path: scrub(v, progress=show),
    "verify": lambda v, show, path: verify(v, show),
    "rebuild": lambda v, show, path: rebuild(v, show),
    "export": lambda v, show, path: export_bundle(v, path / "new", progress=show),
    "import": lambda v, show, path: import_bundle(v, path / "bundle", show),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("beside", [True, False], ids=["beside an engine", "alone"])
def test_a_tool_makes_way_for_passes_of_its_own_process(
    tmp_path: Path, tool: str, beside: bool
) -> None:
    with Store(tmp_path / "s") as store:
        eng = engine(store)
        eng.publish(eng.open(PROMPT).id, name="kept")
        eng.publish(eng.open(PROMPT[::-1]).id)
        export_bundle(store.vault, tmp_path / "bundle")
        for session in eng.sessions():
            eng.close(session)
        if not beside:
            eng.shutdown()
        seen: list[bool] = []
        TOOLS[tool](store.vault, lambda done, total: seen.append(paced()), tmp_path)
        assert seen
        assert set(seen) == {beside}
        assert not paced()
        eng.shutdown()


def test_a_thread_that_makes_way_already_is_left_alone() -> None:
    pace = Pace()
    pace.watch(lambda: True)
    with pace.worker():
        with pace.beside():
            assert paced()
        assert paced()


# -------------------------------------------------------------------- rows ahead of time


class Slow:
    """A vault of which each read waits until it is let go, and says how it was read."""

    def __init__(self, v: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.paced: list[bool] = []
        load = v.load

        def slow(*args: Any) -> Loaded | None:
            self.paced.append(paced())
            self.began.release()
            assert not paced() or self.go.wait(HANGS_S)
            return load(*args)

        monkeypatch.setattr(v, "load", slow)


def test_what_is_read_ahead_of_time_makes_way_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = vault(tmp_path)
    links = chain(range(24))
    v.put(PRINT, links, rows)
    found = v.catalog.lookup(PRINT, links)
    slow, restorer = Slow(v, monkeypatch), Restorer(v)
    ahead: list[Loaded] = []

    def prefetch() -> None:
        with v.pace.worker():
            ahead.extend(restorer.fetch(found[:4]))

    thread = threading.Thread(target=prefetch)
    thread.start()
    assert slow.began.acquire(timeout=HANGS_S)
    assert slow.began.acquire(timeout=HANGS_S)  # both threads of the background have one in hand
    assert len(list(restorer.fetch(found[4:]))) == 2, "others are not held up"
    assert len(list(restorer.fetch(found[2:4]))) == 2, "nor by what only waits there"
    assert slow.paced == [True, True, False, False, False, False]
    slow.go.set()
    thread.join(HANGS_S)
    assert [bytes(one.payload) for one in ahead] == [rows(link) for link in links[:4]]
    assert (restorer.reads, restorer.shared) == (6, 2), "nothing was read twice"
    restorer.close()
    v.catalog.close()


def test_who_joins_a_read_ahead_of_time_ends_its_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = vault(tmp_path)
    links = chain(range(4))
    v.put(PRINT, links, rows)
    found = v.catalog.lookup(PRINT, links)
    naps = threading.Semaphore(0)
    joined = threading.Event()

    def sleep(seconds: float) -> None:
        naps.release()
        assert joined.wait(HANGS_S)

    clock = iter(range(10**6))
    v.pace = Pace(longest_s=1e9, now=lambda: 0.0, spent=lambda: next(clock), sleep=sleep)
    v.pace.watch(lambda: True)
    restorer = Restorer(v)

    def prefetch() -> None:
        with v.pace.worker():
            list(restorer.fetch(found))

    thread = threading.Thread(target=prefetch)
    thread.start()
    assert naps.acquire(timeout=HANGS_S)  # it rests, and by its clock would for ever
    flight = restorer._start(found[0])
    joined.set()
    loaded = flight.future.result(HANGS_S)
    assert loaded is not None
    assert bytes(loaded.payload) == rows(links[0])
    restorer._leave(flight)
    thread.join(HANGS_S)
    assert not thread.is_alive()
    restorer.close()
    v.catalog.close()


def test_a_sealed_piece_opens_the_same_in_the_background_and_damaged_does_not() -> None:
    pytest.importorskip("cryptography")
    from forkserve.store.chunks import ChunkFault

    sealer, plain = Sealer(b"k" * 32), bytes(range(256)) * (PIECE // 100)
    sealed = bytearray(sealer.seal(plain, b"here"))
    with Pace().worker():
        assert sealer.unseal(sealed, b"here") == plain
        with pytest.raises(ChunkFault):
            sealer.unseal(sealed, b"there")
        sealed[len(sealed) // 2] ^= 1
        with pytest.raises(ChunkFault):
            sealer.unseal(sealed, b"here")
        with pytest.raises(ChunkFault):
            sealer.unseal(b"short", b"here")
