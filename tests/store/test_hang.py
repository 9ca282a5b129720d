"""A place that hangs holds up whoever reads from it, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from forkserve.store import Store
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine
from .rig import PRINT, SIZE, chain, rows
from .rig import files as chunk_files

OTHER = PROMPT[::-1]


def test_a_local_restore_goes_on_while_far_reads_hang(tmp_path: Path) -> None:
    gate, hanging = threading.Event(), threading.Semaphore(0)
    far = FaultyDepot(MemoryDepot(place="far"))
    real = far.inner.open

    def hang(key: str) -> Any:
        hanging.release()
        gate.wait(HANGS_S)
        return real(key)

    with Store(tmp_path, far=[far], restore="always") as store:
        eng = engine(store, prefix_index=False)
        for name, text in (("far", PROMPT), ("near", OTHER)):
            eng.open(text, session=name)
            eng.publish(name)
            eng.close(name)
        for path in chunk_files(tmp_path):
            store.vault.copy_one(path.stem, "disk", "far")
        near = {
            found.content for found in store.catalog.lookup(eng._print, plan(OTHER), lossy=False)
        }
        gone = [path.stem for path in chunk_files(tmp_path) if path.stem not in near]
        store.catalog.forget("disk", gone)
        store.vault.depots["disk"].delete(gone)
        far.inner.open = hang  # type: ignore[method-assign]
        done: list[int] = []
        waits = [
            threading.Thread(
                target=lambda n=n: done.append(eng.open(PROMPT, session=f"f{n}").cached_tokens)
            )
            for n in range(2)
        ]
        for wait in waits:
            wait.start()
        for _ in range(2):
            assert hanging.acquire(timeout=HANGS_S)
        assert eng.open(OTHER, session="n").cached_tokens == 512, "from the disk, at once"
        assert eng.generate("n", 3) == cold(OTHER, 3)
        assert not done, "the far ones still wait"
        gate.set()
        for wait in waits:
            wait.join()
        assert done == [512, 512]
        assert eng.generate("f0", 3) == cold(PROMPT, 3)
        eng.check()
        eng.shutdown()


def plan(tokens: list[int]) -> Any:
    from forkserve.store.identity import plan_chain

    return plan_chain(tokens, "default")


def test_what_is_damaged_here_is_read_from_afar(tmp_path: Path) -> None:
    far = LocalDepot(tmp_path / "far", place="far")
    with Store(tmp_path / "near", far=[far], restore="always") as store:
        eng = engine(store, prefix_index=False)
        eng.open(PROMPT, session="a")
        eng.publish("a")
        eng.close("a")
        for path in chunk_files(tmp_path / "near"):
            store.vault.copy_one(path.stem, "disk", "far")
            path.write_bytes(path.read_bytes()[:-1])
        store.vault._sound.clear()
        assert eng.open(PROMPT, session="b").cached_tokens == 512
        assert eng.generate("b", 3) == cold(PROMPT, 3)
        eng.shutdown()


def test_a_closed_store_reads_no_more(tmp_path: Path) -> None:
    with Store(tmp_path, "shared") as store:
        links = chain(range(2 * SIZE))
        store.vault.put(PRINT, links, rows)
        found = store.catalog.lookup(PRINT, links)
        assert len(list(store.restorer.fetch(found))) == 2
        store.restorer.close()
        assert list(store.restorer.fetch(found)) == []
        assert store.restorer._flights == {}
