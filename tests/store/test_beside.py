"""The threads of a store beside an engine: who rests when, and who never waits for whom."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from forkserve.store import Store, faults
from forkserve.store.chunks import hash_parts
from forkserve.store.codecs import decode, encode
from forkserve.store.pace import Pace, breathe, paced
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine
from .rig import PRINT, chain, rows, vault


def lazy(store: Store) -> threading.Event:
    """Each breath of the store's threads is followed by a rest of a minute; set when one begins."""
    rests = threading.Event()
    nap = store.pace._nap

    def sleep(seconds: float) -> None:
        rests.set()
        nap(60.0)

    store.pace._spent = itertools.count().__next__
    store.pace._sleep = sleep
    store.pace.watch(lambda: True)
    return rests


def test_an_engine_says_when_passes_run(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        eng = engine(store)
        seen: list[bool] = []
        eng.backend._on_batch = lambda batch: seen.append(store.pace._watched[0]())  # type: ignore[attr-defined]
        assert len(store.pace._watched) == 1
        assert not eng._core.passing(), "no pass has run"
        h = eng.open(PROMPT)
        eng.generate(h.id, 3)
        assert seen
        assert all(seen)
        assert not eng._core.flying
        eng._core.landed_s -= 1.0
        assert not eng._core.passing(), "the last was a while ago"
        eng.shutdown()
        assert store.pace._watched == []


def test_an_engine_that_was_dropped_holds_up_nobody(tmp_path: Path) -> None:
    with Store(tmp_path, "shared") as store:
        eng = engine(store)
        (running,) = store.pace._watched
        core = eng._core
        core.flying = True
        assert running()
        eng._loop.shutdown()
        del eng, core
        import gc

        gc.collect()
        assert not running()


def test_work_in_the_background_is_paced_and_what_a_verb_waits_for_is_not(tmp_path: Path) -> None:
    with Store(tmp_path, memory_bytes=1 << 20, restore="always") as store:
        eng = engine(store, prefix_index=False)
        seen: dict[str, bool] = {}

        def hook(point: str) -> None:
            seen[point] = paced()

        faults.hook = hook
        h = eng.open(PROMPT, session="a")
        eng.publish("a")
        eng.commit("a", h.tip, [1, 2])
        assert seen["chunk.written"]
        assert not seen["journal.committed"]
        moved: list[bool] = []
        assert eng._mover is not None
        eng._mover.offer("x", lambda: moved.append(paced()))
        assert eng._mover.drain()
        assert moved == [True]
        loaded: list[bool] = []
        real = store.vault.load

        def load(*args: Any) -> Any:
            loaded.append(paced())
            return real(*args)

        store.vault.load = load  # type: ignore[method-assign]
        eng.close("a")
        assert store.memory is not None
        store.memory.clear()
        eng.open(PROMPT, session="b")
        assert loaded == [False, False]
        eng.shutdown()


def test_tokens_do_not_wait_for_a_capture_that_rests(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        rests = lazy(store)
        eng = engine(store, page_size=16, capacity_pages=60, prefix_index=False)
        eng.open(PROMPT, session="a")
        ticket = eng.publish("a", wait=False)
        assert rests.wait(HANGS_S)
        eng.close("a")  # the capture alone holds most of the pages
        text = PROMPT[::-1]
        h = eng.open(text, salt="b")
        assert eng.generate(h.id, 3) == cold(text, 3)
        store.pace.rush(60.0)
        assert ticket.wait(HANGS_S).written == 2, "it was read to its end, not dropped"
        eng.shutdown()


def test_tokens_do_not_wait_for_a_move_that_rests(tmp_path: Path) -> None:
    with Store(tmp_path, memory_bytes=1 << 20) as store:
        rests = lazy(store)
        eng = engine(store, page_size=16, capacity_pages=60, prefix_index=False)
        eng.open(PROMPT, session="a")
        eng.mark_idle("a", eng.tip("a"), 60.0)
        assert rests.wait(HANGS_S)
        text = PROMPT[::-1]
        assert eng._mover is not None
        assert eng._mover.holding == 1
        assert any(eng._core.pool.pins)
        eng.close("a")  # the copy alone holds most of the pages
        h = eng.open(text, salt="b")
        assert eng.generate(h.id, 3) == cold(text, 3)
        assert eng._mover.holding == 0
        store.pace.rush(60.0)
        eng.shutdown()


def test_a_store_that_is_closed_finishes_what_is_queued_without_a_rest(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        rests = lazy(store)
        eng = engine(store)
        eng.open(PROMPT, session="a")
        ticket = eng.publish("a", name="n", wait=False)
        assert rests.wait(HANGS_S)
        store.publisher.close()
        assert ticket.done
        assert ticket.wait().written == 2
        eng.shutdown()


@pytest.mark.parametrize("form", ["raw", "zstd", "int8"])
def test_pieces_change_no_byte(tmp_path: Path, form: str) -> None:
    """Two processes that store the same rows write the same file, whether one was paced or not."""
    if form == "zstd":
        pytest.importorskip("zstandard")
    link = chain(range(4))[0]
    payload = rows(link) * 5000  # 640 kB: several pieces and a rest
    whole = encode(form, payload, PRINT.layout)
    with Pace().worker():
        cut = encode(form, payload, PRINT.layout)
        digest = hash_parts([cut, b"", memoryview(payload)])
        breathe()
    assert bytes(cut) == bytes(whole)
    assert digest == hash_parts([whole, payload])
    back = decode(form, cut, len(payload), PRINT.layout)
    assert form == "int8" or bytes(back) == payload


def test_a_sealed_piece_opens_however_it_was_cut() -> None:
    pytest.importorskip("cryptography")
    from forkserve.store.chunks import ChunkFault
    from forkserve.store.seal import Sealer

    sealer, plain = Sealer(bytes(32)), bytes(range(256)) * 2000
    with Pace().worker():
        sealed = sealer.seal(plain, b"here")
    assert sealer.unseal(sealed, b"here") == plain
    with pytest.raises(ChunkFault):
        sealer.unseal(sealed, b"there")
    with pytest.raises(ChunkFault):
        sealer.unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]), b"here")


def test_no_rest_is_taken_with_the_catalog_locked(tmp_path: Path) -> None:
    """Else a commit would wait for a publish that rests."""
    v = vault(tmp_path)
    held: list[bool] = []
    pace = Pace(spent=itertools.count().__next__)

    def free() -> None:
        got = v.catalog._lock.acquire(blocking=False)
        held.append(not got)
        if got:
            v.catalog._lock.release()

    def sleep(seconds: float) -> None:
        thread = threading.Thread(target=free)
        thread.start()
        thread.join()

    pace._sleep = sleep
    pace.watch(lambda: True)
    with pace.worker():
        v.put(PRINT, chain(range(40)), rows)
        for content in [row[0] for row in v.catalog.read("SELECT content FROM part")]:
            assert v.verify("disk", content) is None
        from forkserve.store.collect import collect

        collect(v, grace_s=-5)
    assert held
    assert not any(held)
    assert verify(v).clean
    v.catalog.close()
