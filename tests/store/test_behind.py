"""Write-behind and leases: what has no receipt stays here, and goes on where it stopped."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.behind import FIRST_S, LONGEST_S, WriteBehind
from forkserve.store.budget import Budget
from forkserve.store.collect import collect
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from forkserve.store.lease import lease, tidy
from forkserve.store.policies import Lru
from forkserve.store.rebuild import verify
from forkserve.store.vault import Vault
from tests.waiting import HANGS_S, wait_for

from .engines import PROMPT, cold, engine
from .rig import PRINT, chain, files, good, rows, vault

FILE = 4096


def behind(folder: Path, **options: Any) -> tuple[Vault, FaultyDepot, WriteBehind]:
    """A vault whose far place can fail, with the thread of its write-behind at rest.

    Its clock stands still: see `let_pass`.
    """
    far = FaultyDepot(MemoryDepot(place="object"))
    v = vault(folder, depots=[LocalDepot(folder / "chunks"), far])
    begin = time.time()
    v.catalog.now = lambda: begin
    sender = WriteBehind(v, "object", **options)
    v.stored = lambda: None
    return v, far, sender


def receipts(v: Vault) -> int:
    return int(v.catalog.read("SELECT count(*) FROM replica WHERE place = 'object'")[0][0])


def let_pass(v: Vault, seconds: float) -> None:
    before = v.catalog.now
    v.catalog.now = lambda: before() + seconds


# -------------------------------------------------------------------- write-behind


def test_a_chunk_gets_a_receipt_when_the_far_place_has_it_and_not_before(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    far.fail["put"] = errno.ECONNREFUSED
    v.put(PRINT, chain(range(12)), rows)
    assert (sender.waiting(), receipts(v)) == (3, 0)
    for _ in range(3):
        assert sender.step()
    assert not sender.step(), "all of them wait for their next try"
    assert (sender.waiting(), receipts(v), sender.sent.failed) == (3, 0, 3)
    far.fail.clear()
    let_pass(v, 2 * FIRST_S)
    while sender.step():
        pass
    assert (sender.waiting(), receipts(v), sender.sent.chunks) == (0, 3, 3)
    v.put(PRINT, chain(range(12)), rows)
    assert sender.waiting() == 0, "what is there is not sent again"
    assert verify(v).clean
    v.catalog.close()


def test_tries_come_later_and_later_but_never_end(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    far.fail["stat"] = far.fail["put"] = errno.EIO
    v.put(PRINT, chain(range(4)), rows)
    pauses = []
    for _ in range(14):
        assert sender.step()
        (due,) = v.catalog.read("SELECT due_at FROM outbox")[0]
        pauses.append(due - v.catalog.now())
        let_pass(v, pauses[-1] + 0.01)
    assert all(b > 1.5 * a for a, b in pairwise(pauses[:8]))
    assert pauses[-1] <= LONGEST_S
    assert v.catalog.read("SELECT tries, error FROM outbox")[0][0] == 14
    v.catalog.close()


def test_a_clock_set_back_stops_nothing(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    far.fail["put"] = errno.EIO
    v.put(PRINT, chain(range(8)), rows)
    sender.step()
    v.catalog.now = lambda: time.time() - 1e8
    far.fail.clear()
    while sender.step():
        pass
    assert (sender.waiting(), receipts(v)) == (0, 2)
    v.catalog.close()


def test_the_queue_is_bounded_and_what_did_not_fit_can_be_caught_up(tmp_path: Path) -> None:
    v, _, sender = behind(tmp_path, limit=2)
    v.put(PRINT, chain(range(20)), rows)
    assert sender.waiting() == 2
    assert v.catalog.counters()["behind_dropped"] == 3
    while sender.step():
        pass
    assert sender.catch_up() == 2
    assert sender.drain(HANGS_S)
    sender.catch_up()
    assert sender.drain(HANGS_S)
    assert receipts(v) == 5
    sender.close()
    v.catalog.close()


def test_nothing_leaves_the_disk_before_its_receipt(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    budget = Budget(v, "disk", 6 * FILE * 2, Lru())
    v.rooms["disk"] = budget.make_room
    far.fail["put"] = errno.EIO
    v.put(PRINT, chain([1, *range(11)]), rows)
    with pytest.raises(StoreError, match="no copy elsewhere yet"):
        v.put(PRINT, chain([2, *range(23)]), rows)
    assert len(files(tmp_path)) == 3
    assert good(v, chain([1, *range(11)])) == 3
    far.fail.clear()
    let_pass(v, 2 * FIRST_S)
    while sender.step():
        pass
    for n in range(2, 7):
        v.put(PRINT, chain([n, *range(11)]), rows)
        while sender.step():
            pass
    assert len(files(tmp_path)) <= 12
    assert all(good(v, chain([n, *range(11)])) == 3 for n in range(1, 7)), "each is somewhere"
    v.catalog.close()


def test_without_write_behind_what_cannot_move_stays(tmp_path: Path) -> None:
    far = FaultyDepot(MemoryDepot(place="object"))
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.rooms["disk"] = Budget(v, "disk", 6 * FILE * 2, Lru()).make_room
    far.fail["put"] = far.fail["stat"] = errno.EIO
    v.put(PRINT, chain([1, *range(11)]), rows)
    for n in (2, 3, 4):
        with suppress(StoreError):
            v.put(PRINT, chain([n, *range(11)]), rows)
    assert good(v, chain([1, *range(11)])) == 3
    v.catalog.close()


def test_the_far_place_has_a_budget_of_its_own(tmp_path: Path) -> None:
    far = MemoryDepot(place="object")
    with Store(tmp_path, far=[far], far_bytes=60_000, write_behind=True) as store:
        v, sender = store.vault, store.behind
        assert sender is not None
        for n in range(20):
            v.put(PRINT, chain([n, *range(11)]), rows)
            assert sender.drain(HANGS_S)
        assert sum(s.used for s in far.entries()) <= 60_000
        assert receipts(v) == len(list(far.entries())) > 3
        assert verify(v).clean
        assert store.metrics()["tiers"]["object"]["limit"] == 60_000


def test_damage_is_not_spread(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    v.put(PRINT, chain(range(8)), rows)
    path = files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    files(tmp_path)[1].unlink()
    while sender.step():
        pass
    assert (sender.waiting(), receipts(v)) == (0, 0)
    assert {e["kind"] for e in v.catalog.events("behind_lost")} == {"behind_lost"}
    assert not list(far.entries())
    v.catalog.close()


CHILD = """
import os, signal, sys
from pathlib import Path
from store.rig import PRINT, chain, rows, vault
from forkserve.store import faults
from forkserve.store.behind import WriteBehind
from forkserve.store.depots import LocalDepot
folder, point = Path(sys.argv[1]), sys.argv[2]
def hook(reached):
    if reached == point:
        os.kill(os.getpid(), signal.SIGKILL)
far = LocalDepot(folder / "far", place="object")
v = vault(folder, depots=[LocalDepot(folder / "chunks"), far])
sender = WriteBehind(v, "object")
v.stored = lambda: None
v.put(PRINT, chain(range(12)), rows)
faults.hook = hook
while sender.step():
    pass
"""


@pytest.mark.parametrize("point", ["behind.taken", "copy.stored", "copy.noted", "chunk.renamed"])
def test_killed_at_any_step_the_next_process_goes_on_at_once(tmp_path: Path, point: str) -> None:
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), point], env=env, check=False)
    assert done.returncode == -9
    far = LocalDepot(tmp_path / "far", place="object")
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    assert verify(v).clean
    sender = WriteBehind(v, "object")
    assert sender.waiting() == (2 if point == "copy.noted" else 3)
    v.stored = lambda: None
    while sender.step():  # the claim of a dead process holds up nobody
        pass
    assert (sender.waiting(), receipts(v)) == (0, 3)
    assert verify(v).clean
    v.catalog.close()


def test_a_claim_of_the_living_is_respected_until_its_time_is_over(tmp_path: Path) -> None:
    v, _, sender = behind(tmp_path)
    v.put(PRINT, chain(range(4)), rows)
    assert sender._claim() is not None
    assert sender._claim() is None
    let_pass(v, 121.0)
    assert sender._claim() is not None
    v.catalog.now = lambda: time.time() - 1e8
    assert sender._claim() is not None, "a claim from the future is none"
    v.catalog.close()


def test_tokens_flow_while_the_far_place_is_away(tmp_path: Path) -> None:
    far = FaultyDepot(MemoryDepot(place="object"))
    far.fail["put"] = far.fail["stat"] = errno.ETIMEDOUT
    with Store(tmp_path, far=[far], write_behind=True) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        eng.publish(h.id, name="x")
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        assert store.behind is not None
        wait_for(lambda: store.health()["failures"])
        assert store.metrics()["queued"]["to_object"] == 2
        eng.shutdown()
    with Store(tmp_path, far=[MemoryDepot(place="object")], write_behind=True) as store:
        with store.catalog.write() as db:
            db.execute("UPDATE outbox SET due_at = 0")
        assert store.behind is not None
        assert store.behind.drain(HANGS_S), "it goes on after a restart without being asked"
        assert store.catalog.usage()["object"][1] == 2


def test_an_end_that_comes_just_before_the_thread_waits_is_not_slept_over(tmp_path: Path) -> None:
    v, _, sender = behind(tmp_path)
    asleep: list[float | None] = []

    class Wake(threading.Event):
        def clear(self) -> None:
            sender.close()  # here, at the latest place where its call can be lost
            super().clear()

        def wait(self, timeout: float | None = None) -> bool:
            asleep.append(timeout)
            return super().wait(0)

    sender._wake = Wake()
    sender._send()
    assert asleep == []
    v.catalog.close()


def test_gc_takes_no_object_that_a_copy_relies_on(tmp_path: Path) -> None:
    """An orphan of an earlier crash is found by a copy, and collected before it is named."""
    v, far, sender = behind(tmp_path)
    v.put(PRINT, chain(range(4)), rows)
    (path,) = files(tmp_path)
    far.inner.put([(path.stem, [path.read_bytes()])])
    real = far.inner.put

    def put(items: Any) -> Any:
        done = real(items)
        collect(v, grace_s=-5)
        return done

    far.inner.put = put  # type: ignore[method-assign]
    with v.catalog.write() as db:
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (chain(range(4))[0].id.hex(),))
    assert sender.step()
    assert receipts(v) == 1
    assert verify(v).clean
    v.catalog.close()


def test_a_part_that_is_collected_while_it_is_copied_gets_no_row(tmp_path: Path) -> None:
    v, far, sender = behind(tmp_path)
    v.put(PRINT, chain(range(4)), rows)
    real = far.inner.put

    def put(items: Any) -> Any:
        done = real(items)
        collect(v, grace_s=-5)  # nothing keeps the chunk: part, note and object go
        return done

    far.inner.put = put  # type: ignore[method-assign]
    assert sender.step()
    assert (receipts(v), sender.waiting(), list(far.entries())) == (0, 0, [])
    assert verify(v).clean
    v.catalog.close()


def test_a_copy_that_was_under_way_at_a_crash_keeps_nothing_for_ever(tmp_path: Path) -> None:
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), MemoryDepot(place="object")])
    v.put(PRINT, chain([1, *range(7)]), rows)
    content = v.catalog.lookup(PRINT, chain([1, *range(7)]))[1].content
    v.catalog.intend(content, "object")
    with v.catalog.write() as db:
        db.execute('UPDATE outbox SET taken_by = \'[1, "another boot", ""]\'')
    Budget(v, "disk", 3 * FILE, Lru(), low=1.0).make_room(2 * FILE)
    assert v.catalog.read("SELECT count(*) FROM outbox") == [(0,)]
    assert good(v, chain([1, *range(7)])) == 2
    v.catalog.close()


# -------------------------------------------------------------------- leases


def old_chain(v: Vault, n: int = 1) -> list[Any]:
    links = chain([n, *range(11)])
    v.put(PRINT, links, rows)
    with v.catalog.write() as db:
        db.execute("UPDATE chunk SET used_at = 0, created_at = 0")
    return links


def test_what_is_read_is_neither_collected_nor_evicted(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = old_chain(v)
    with lease(v.catalog, [links[1].id.hex()]) as held:
        assert held
        assert collect(v, grace_s=0).chunks == 1, "only what lies beyond"
        with pytest.raises(StoreError, match="budget"):
            Budget(v, "disk", 2 * FILE, Lru()).make_room(2 * FILE)
        assert good(v, links) == 2
    assert v.catalog.read("SELECT count(*) FROM lease") == [(0,)]
    assert collect(v, grace_s=0).chunks == 2
    v.catalog.close()


def test_a_lease_ends_with_its_time_or_its_process(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = old_chain(v)
    ends = links[-1].id.hex()
    code = "from forkserve.store import owner; print(owner.who())"
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    asked = [sys.executable, "-c", code]
    dead = subprocess.run(asked, env=here, capture_output=True, text=True, check=True)
    with v.catalog.write() as db:
        row = (ends, "t", dead.stdout.strip(), v.catalog.now(), 600.0)
        db.execute("INSERT INTO lease VALUES (?, ?, ?, ?, ?)", row)
    assert collect(v, grace_s=0).chunks == 3, "its holder is dead"
    links = old_chain(v)
    with lease(v.catalog, [ends], ttl_s=500.0):
        assert collect(v, grace_s=0).chunks == 0
        let_pass(v, 600.0)
        assert collect(v, grace_s=-10).chunks == 3
    v.catalog.close()


def test_a_lease_ends_with_its_store(tmp_path: Path) -> None:
    """Also while somebody still reads: the process may go on for long, and open it again."""
    links = chain(range(8))
    store, other = Store(tmp_path, "shared"), Store(tmp_path, "shared")
    store.vault.put(PRINT, links, rows)
    ends = [links[-1].id.hex()]
    with lease(other.catalog, ends), lease(store.catalog, ends) as held:
        assert held
        store.close()
        assert other.catalog.read("SELECT count(*) FROM lease") == [(1,)]  # the other one's own
    assert other.catalog.read("SELECT count(*) FROM lease") == [(0,)]
    assert not other.catalog.leases
    other.close()


def test_a_lease_survives_a_clock_that_goes_back_and_still_ends(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = old_chain(v)
    with lease(v.catalog, [links[-1].id.hex()], ttl_s=50.0):
        v.catalog.now = lambda: 1e6
        with v.catalog.write() as db:
            tidy(db, 1e6)
        assert v.catalog.read("SELECT at, ttl FROM lease") == [(1e6, 50.0)]
        assert collect(v, grace_s=0).chunks == 0
        v.catalog.now = lambda: 1e6 + 51.0
        assert collect(v, grace_s=0).chunks == 3
    v.catalog.close()


def test_a_restore_holds_a_lease_while_it_reads(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a")
    eng.shutdown()
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    seen: list[int] = []
    real = depot.inner.open
    with Store(tmp_path, disk=depot, restore="always") as store:

        def watched(key: str) -> Any:
            seen.append(store.catalog.read("SELECT count(*) FROM lease")[0][0])
            return real(key)

        depot.inner.open = watched  # type: ignore[method-assign]
        eng = engine(store)
        assert eng.resume("a").cached_tokens == 512
        assert seen == [1, 1]
        assert store.catalog.read("SELECT count(*) FROM lease") == [(0,)]
        eng.shutdown()


def test_a_reader_without_the_right_to_write_goes_on_without_a_lease(tmp_path: Path) -> None:
    v = vault(tmp_path)
    links = old_chain(v)
    v.catalog.close()
    reader = vault(tmp_path, "reader", depots=[LocalDepot(tmp_path / "chunks", create=False)])
    with lease(reader.catalog, [links[0].id.hex()]) as held:
        assert not held
        assert good(reader, links) == 3
    reader.catalog.close()
