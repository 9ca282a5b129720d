"""Budgets and policies: the limit holds on the disk, and what is worth least goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from forkserve.errors import ConfigError, StoreError
from forkserve.store import Store
from forkserve.store.budget import Budget
from forkserve.store.depots import LocalDepot, MemoryDepot
from forkserve.store.policies import Held, KeepSession, Lru, PersistPrefix
from forkserve.store.rebuild import verify

from .engines import PROMPT, cold, engine
from .rig import PRINT, chain, files, good, rows, vault

LIMIT = 100_000
FILE = 4096  # what one chunk file of the rig takes


def used(folder: Path) -> int:
    """As `du` counts."""
    return sum(p.stat().st_blocks * 512 for p in (folder / "chunks").rglob("*") if p.is_file())


def text(n: int, length: int = 12) -> list[int]:
    return [n, *range(length - 1)]


def test_the_limit_holds_on_the_disk_across_restarts(tmp_path: Path) -> None:
    worst = 0
    for restart in range(3):
        v = vault(tmp_path)
        budget = Budget(v, "disk", LIMIT, Lru())
        v.rooms["disk"] = budget.make_room
        if restart == 1:  # leftovers of a crash count as well
            v._first.put([("f" * 64, [bytes(20_000)])])
        for n in range(30):
            v.put(PRINT, chain(text(restart * 100 + n)), rows)
            worst = max(worst, used(tmp_path))
        assert good(v, chain(text(restart * 100 + 29))) == 3
        assert verify(v).clean
        v.catalog.close()
    assert LIMIT * 0.7 < worst <= LIMIT


def test_the_ends_of_the_least_valuable_chains_go_first(tmp_path: Path) -> None:
    v = vault(tmp_path)
    chains = [chain(text(n, 20)) for n in range(4)]  # five chunks each
    for links in chains:
        v.put(PRINT, links, rows)
    v.catalog.touch(f.chunk for f in v.catalog.lookup(PRINT, chains[2]))
    with v.catalog.write() as db:
        db.execute("UPDATE chunk SET used_at = used_at - 1000 WHERE uses = 0")
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (chains[1][2].id.hex(),))
    size = used(tmp_path)
    Budget(v, "disk", size, KeepSession(half_life_s=500), low=1.0).make_room(6 * FILE)
    lengths = [good(v, links) for links in chains]
    assert lengths[2] == 5, "what was used stays"
    assert lengths[1] >= 3, "a pinned state stays"
    assert sum(lengths) == 14
    Budget(v, "disk", size, KeepSession(), low=1.0).make_room(size - 8 * FILE)
    assert good(v, chains[1]) == 3
    assert good(v, chains[2]) == 5
    v.catalog.close()


def test_a_budget_full_of_names_refuses_instead_of_growing(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.rooms["disk"] = Budget(v, "disk", 5 * FILE * 2, Lru()).make_room
    links = chain(text(1, 20))
    v.put(PRINT, links, rows)
    with v.catalog.write() as db:
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (links[-1].id.hex(),))
    for n in (2, 3):
        with pytest.raises(StoreError, match="full of named and pinned"):
            v.put(PRINT, chain(text(n, 20)), rows)
    assert good(v, links) == 5
    with pytest.raises(StoreError, match="do not fit"):
        v.put(PRINT, chain(text(4, 80)), rows)
    assert used(tmp_path) <= 10 * FILE
    v.catalog.close()


@pytest.mark.parametrize("place", ["disk", "object"])
def test_a_chain_makes_no_room_at_the_price_of_its_own_beginning(
    tmp_path: Path, place: str
) -> None:
    """Without what they follow its further chunks would be of no use."""
    far = [MemoryDepot(place="object")] if place == "object" else []
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), *far])
    links = chain(text(1, 60))

    def store(upto: int) -> None:
        v.put(PRINT, links[:upto], rows)
        for found in v.find(PRINT, links[:upto]) if far else ():
            if "object" not in found.places:
                v.copy_one(found.content, "disk", "object")

    store(10)
    limit = v.catalog.usage()[place][0] + FILE  # for one more chunk two blocks are asked for
    v.rooms[place] = Budget(v, place, limit, Lru(), low=1.0).make_room
    with pytest.raises(StoreError, match="that the new ones follow"):
        store(11)
    starts = "SELECT start FROM chunk JOIN part ON chunk = id JOIN replica USING (content)"
    held = v.catalog.read(f"{starts} WHERE place = ? ORDER BY start", (place,))
    assert held == [(4 * n,) for n in range(10)]
    v.catalog.close()


def test_what_leaves_the_disk_moves_to_the_next_place(tmp_path: Path) -> None:
    far = MemoryDepot(place="object")
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.rooms["disk"] = Budget(v, "disk", 40_000, Lru()).make_room
    chains = [chain(text(n)) for n in range(8)]
    for links in chains:
        v.put(PRINT, links, rows)
    assert used(tmp_path) <= 40_000
    assert [good(v, links) for links in chains] == [3] * 8
    assert len(list(far.entries())) > 10
    assert v.catalog.events("evicted")[0]["moved"] > 0
    assert verify(v).clean
    v.catalog.close()


def test_leftovers_of_a_crash_are_counted_until_they_are_collected(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v._first.put([("e" * 64, [bytes(50_000)])])
    budget = Budget(v, "disk", 60_000, Lru())
    with pytest.raises(StoreError, match="budget"):
        budget.make_room(30_000)
    from forkserve.store.collect import collect

    for path in files(tmp_path):
        os.utime(path, (1, 1))
    collect(v)
    budget.recount()
    assert budget.make_room(30_000).chunks == 0
    v.catalog.close()


def test_a_clock_set_back_makes_nothing_older(tmp_path: Path) -> None:
    v = vault(tmp_path)
    v.put(PRINT, chain(text(1)), rows)
    v.catalog.now = lambda: time.time() - 1e6
    v.put(PRINT, chain(text(2)), rows)
    v.catalog.touch(f.chunk for f in v.catalog.lookup(PRINT, chain(text(1))))
    (oldest,) = v.catalog.read("SELECT min(used_at) FROM chunk WHERE uses = 1")[0]
    assert oldest > time.time() - 60
    Budget(v, "disk", used(tmp_path), KeepSession(), low=1.0).make_room(FILE)
    assert sum(good(v, chain(text(n))) for n in (1, 2)) == 5
    v.catalog.close()


# -------------------------------------------------------------------- policies


def held(**changes: object) -> Held:
    fields = {"chain": "", "start": 0, "tokens": 256, "bytes": 1000, "saved_ms": 100.0}
    fields |= {"uses": 0, "idle_s": 10.0, "live": False}
    return Held(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [KeepSession(), PersistPrefix()])
def test_value_is_recompute_cost_saved_per_byte(policy: KeepSession | PersistPrefix) -> None:
    base = policy.value(held())
    assert policy.value(held(saved_ms=200.0)) == pytest.approx(2 * base)
    assert policy.value(held(bytes=500)) == pytest.approx(2 * base)
    assert policy.value(held(uses=1)) == pytest.approx(2 * base)
    assert policy.value(held(idle_s=1e6)) < base


def test_a_live_session_counts_more_only_where_sessions_are_kept() -> None:
    assert KeepSession().value(held(live=True)) == pytest.approx(8 * KeepSession().value(held()))
    assert PersistPrefix().value(held(live=True)) == PersistPrefix().value(held())
    assert Lru().value(held(idle_s=1)) > Lru().value(held(idle_s=2))
    for wrong in (lambda: KeepSession(0), lambda: KeepSession(1, 0.5), lambda: PersistPrefix(0)):
        with pytest.raises(ConfigError):
            wrong()


def settled(eng: object) -> int:
    store = eng.store  # type: ignore[attr-defined]
    assert store.publisher.drain()
    parts: int = store.catalog.usage().get("disk", (0, 0))[1]
    return parts


def test_keep_session_stores_what_a_session_grows_into(tmp_path: Path) -> None:
    with Store(tmp_path, policy=KeepSession(), queue=8) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        assert settled(eng) == 2
        eng.commit("a", h.tip, PROMPT[:400])
        eng.generate("a", 2)
        eng.commit("a", h.tip, [1])
        assert settled(eng) == 4
        eng.commit("a", h.tip, [1])
        assert settled(eng) == 4
        text = eng.tokens("a")
        eng.shutdown()
    with Store(tmp_path) as store:
        eng = engine(store)
        assert eng.resume("a").cached_tokens == 1024
        assert eng.generate("a", 3) == cold(text, 3)
        eng.shutdown()


def test_persist_prefix_stores_what_several_sessions_begin_with(tmp_path: Path) -> None:
    with Store(tmp_path, policy=PersistPrefix()) as store:
        eng = engine(store)
        eng.open([*PROMPT[:512], *range(300)])
        assert settled(eng) == 0
        eng.open([*PROMPT[:512], *range(200, 0, -1), *range(100)])
        assert settled(eng) == 2, "the common beginning, and not what follows it"
        eng.shutdown()
    with Store(tmp_path) as store:
        eng = engine(store)
        h = eng.open([*PROMPT[:512], 9, 9])
        assert h.cached_tokens == 512
        eng.shutdown()


def test_the_users_own_policy_decides(tmp_path: Path) -> None:
    class Never:
        def publish(self, moment: str, seen: int) -> bool:
            return False

        def value(self, held: Held) -> float:
            return float(held.start)

    with Store(tmp_path, policy=Never(), budget_bytes=1 << 20) as store:
        eng = engine(store)
        eng.open(PROMPT)
        assert settled(eng) == 0
        assert "disk" in store.budgets
        assert store.budgets["disk"].recompute_ms(100, 0) == eng.backend.predict_ms(100, 0)
        eng.shutdown()


def test_rows_that_were_evicted_come_back_before_they_are_needed(tmp_path: Path) -> None:
    with Store(tmp_path, policy=KeepSession(), queue=8) as store:
        eng = engine(store, page_size=16, capacity_pages=60, prefix_index=False)
        eng.open(PROMPT, session="a")
        settled(eng)
        eng.mark_idle("a", eng.tip("a"), 1.0)
        eng.open(PROMPT[::-1], session="b", salt="b")  # takes the pages of the idle one
        assert eng.stats().evicted_nodes == 1
        before = eng.stats().prefilled_tokens.committed
        eng.close("b")
        eng.promote("a", eng.tip("a"))
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        assert eng.stats().prefilled_tokens.committed - before < 256
        eng.check()
        eng.shutdown()
