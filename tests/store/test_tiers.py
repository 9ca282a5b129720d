"""Rows that move between the device's pages and host memory: nothing but time is different."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine
from forkserve.errors import ConfigError, NodeError, SessionError, StoreError
from forkserve.store import Store
from forkserve.store.depots import FaultyDepot, MemoryDepot
from forkserve.store.host import HostMemory, Piece, Prefixes
from forkserve.store.policies import KeepSession, Lru
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine, prefilled

ROW = 16  # bytes of a row of the mock
PAGE = 8 * ROW


def tiered(folder: Path, **options: Any) -> Store:
    options.setdefault("memory_bytes", 1 << 20)
    return Store(folder, **options)


def decisions(eng: Engine, what: str) -> list[tuple[Any, ...]]:
    assert eng._journal is not None
    assert eng.store is not None
    eng._journal.flush()
    sql = "SELECT verdict, reason, tokens FROM decision WHERE what = ? ORDER BY id"
    return eng.store.catalog.read(sql, (what,))


def clock(eng: Engine) -> Any:
    return eng.backend.clock


# -------------------------------------------------------------------- down and up


def test_an_idle_path_moves_down_and_the_pool_really_shrinks(tmp_path: Path) -> None:
    with tiered(tmp_path, device_bytes=20 * PAGE) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        assert eng.settle_tiers()
        assert eng.stats().live_pages <= 20
        assert store.memory is not None
        assert store.memory.used >= len(PROMPT) * ROW
        assert decisions(eng, "move") == [("memory", "idle", 700)]
        assert decisions(eng, "evict") == [("dropped", "device_budget", 700)]
        before = prefilled(eng)
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        assert prefilled(eng) == before, "every row came back, none was computed"
        verdict, reason, tokens = decisions(eng, "restore")[-1]
        assert (verdict, reason) == ("restored", "memory")
        assert 500 < tokens <= 700, "the rest was still in the prefix index"
        assert h.id == "a"
        eng.check()
        eng.shutdown()


def test_rows_are_back_when_the_tool_returns(tmp_path: Path) -> None:
    with tiered(tmp_path, device_bytes=10 * PAGE) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.mark_idle("a", eng.tip("a"), 5.0)
        assert eng.settle_tiers()
        assert eng.stats().live_pages <= 10
        clock(eng).advance(4_000.0)
        assert eng.settle_tiers()
        assert eng.stats().live_pages <= 10, "too early"
        clock(eng).advance(990.0)
        store.device_bytes = None  # else they would have to go down again at once
        assert eng.settle_tiers()
        assert eng.stats().live_rows >= len(PROMPT)
        before = prefilled(eng)
        eng.commit("a", eng.tip("a"), [1, 2, 3])
        assert eng.generate("a", 4) == cold([*PROMPT, 1, 2, 3], 4)
        assert prefilled(eng) - before <= 3 + 1
        eng.check()
        eng.shutdown()


def test_a_time_to_live_that_ends_costs_a_copy_not_a_prefill(tmp_path: Path) -> None:
    with tiered(tmp_path) as store:
        eng = engine(store, prefix_index=False, ttl_max_s=2.0)
        h = eng.open(PROMPT, session="a")
        eng.commit("a", h.tip, PROMPT[:40])
        eng.generate("a", 2)
        tip = eng.tip("a")
        eng.mark_idle("a", tip, 60.0)
        assert eng.settle_tiers()
        clock(eng).advance(3_000.0)
        with eng._core.lock:
            assert eng._core.expire(clock(eng).now_ms()) == 1
        assert eng.tree("a").get(tip).evicted
        before, text = prefilled(eng), eng.tokens("a")
        eng.commit("a", tip, [7, 8])
        assert eng.generate("a", 3) == cold([*text, 7, 8], 3)
        assert prefilled(eng) - before <= 3
        assert ("dropped", "expired", 42) in [
            (v, r, min(t, 42)) for v, r, t in decisions(eng, "evict")
        ]
        eng.shutdown()


@pytest.mark.parametrize("touch", ["fork", "speculate", "observe", "warm", "commit", "open"])
def test_a_touch_brings_rows_back(tmp_path: Path, touch: str) -> None:
    with tiered(tmp_path, device_bytes=8 * PAGE) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        assert eng.settle_tiers()
        assert eng.tree("a").root.evicted
        store.device_bytes = None
        before = prefilled(eng)
        if touch == "fork":
            eng.fork("a", 1, "x", [1])
        elif touch == "speculate":
            store.device_bytes = 8 * PAGE
            child = eng.fork("a", 1, "x", [1])
            store.device_bytes = None
            eng.speculate("a", child)
        elif touch == "observe":
            eng.observe("a", "bash", ms=3.0)
        elif touch == "warm":
            assert eng.warm("a").reason == "memory"
        elif touch == "commit":
            eng.commit("a", 1, [1, 2])
        else:
            assert eng.open([*PROMPT, 5], session="b").cached_tokens == 700
            eng.check()
            eng.shutdown()
            return
        assert eng._mover is not None
        assert eng._mover.drain()
        assert not eng.tree("a").root.evicted
        assert prefilled(eng) == before
        text = eng.tokens("a")
        assert eng.generate("a", 3) == cold(text, 3)
        eng.check()
        eng.shutdown()


def test_two_sessions_take_turns_in_a_pool_for_one(tmp_path: Path) -> None:
    with tiered(tmp_path) as store:
        eng = engine(store, page_size=16, capacity_pages=60, prefix_index=False)
        texts = {"a": PROMPT, "b": PROMPT[::-1]}
        for name, text in texts.items():
            eng.open(text, session=name)
            eng.mark_idle(name, eng.tip(name), 30.0)
            assert eng.settle_tiers()
        before = prefilled(eng)
        for turn in range(3):
            for name in "ab":
                eng.promote(name, eng.tip(name))
                assert eng.generate(name, 3) == cold(texts[name], 3), (turn, name)
                texts[name] = eng.tokens(name)
                eng.mark_idle(name, eng.tip(name), 30.0)
                assert eng.settle_tiers()
        assert prefilled(eng) - before <= 6 * 4, "only what was new"
        eng.check()
        eng.shutdown()


def test_without_room_in_memory_rows_are_computed_and_the_answer_is_the_same(
    tmp_path: Path,
) -> None:
    with tiered(tmp_path, memory_bytes=100, device_bytes=5 * PAGE) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        assert eng.settle_tiers()
        assert store.memory is not None
        assert store.memory.used == 0 < store.memory.refused
        assert decisions(eng, "evict") == [("dropped", "device_budget_no_memory", 700)]
        assert eng.stats().live_pages <= 5
        assert eng.generate("a", 3) == cold(PROMPT, 3)
        eng.shutdown()


def test_what_leaves_memory_goes_to_the_disk_if_it_is_a_whole_chunk(tmp_path: Path) -> None:
    with tiered(tmp_path, memory_bytes=900 * ROW, device_bytes=5 * PAGE) as store:
        eng = engine(store)
        for name, text in (("a", PROMPT), ("b", PROMPT[::-1])):
            eng.open(text, session=name)
            assert eng.settle_tiers()
        assert store.memory is not None
        assert store.memory.used <= 900 * ROW
        assert store.publisher.drain()
        assert store.catalog.usage()["disk"][1] >= 1
        assert verify(store.vault).clean
        for name, text in (("a", PROMPT), ("b", PROMPT[::-1])):
            assert eng.generate(name, 3) == cold(text, 3)
        eng.check()
        eng.shutdown()


def test_a_full_queue_of_moves_drops_and_delays_nobody(tmp_path: Path) -> None:
    gate = threading.Event()
    with tiered(tmp_path) as store:
        eng = engine(store)
        assert eng._mover is not None
        eng._mover.offer("stuck", lambda: gate.wait(HANGS_S) and None)
        for n in range(40):
            eng.open([n, *PROMPT[:50]], session=f"s{n}")
            eng.mark_idle(f"s{n}", eng.tip(f"s{n}"), 30.0)
        assert eng._mover.dropped > 10
        assert store.metrics()["queued"]["move"] > 0
        gate.set()
        assert eng.settle_tiers()
        for n in range(0, 40, 9):
            eng.promote(f"s{n}", eng.tip(f"s{n}"))
            assert eng.generate(f"s{n}", 2) == cold([n, *PROMPT[:50]], 2)
        eng.shutdown()


def test_what_comes_from_afar_is_read_once_and_then_held_in_memory(tmp_path: Path) -> None:
    far = FaultyDepot(MemoryDepot(place="object"))
    with tiered(tmp_path, far=[far], restore="always") as store:
        eng = engine(store, prefix_index=False)
        eng.open(PROMPT, session="a")
        eng.publish("a")
        for content, _ in store.catalog.read("SELECT content, place FROM replica"):
            store.vault.copy_one(content, "disk", "object")
            store.catalog.forget("disk", [content])
            store.vault.depots["disk"].delete([content])
        opened = far.calls.get("open", 0)
        assert eng.open(PROMPT, session="b").cached_tokens == 512
        assert far.calls["open"] == opened + 2
        assert eng.open(PROMPT, session="c").cached_tokens == 512
        assert far.calls["open"] == opened + 2
        assert eng.generate("c", 3) == cold(PROMPT, 3)
        eng.check()
        eng.shutdown()


def test_two_salts_share_nothing_in_memory(tmp_path: Path) -> None:
    with tiered(tmp_path, device_bytes=5 * PAGE) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a", salt="one")
        assert eng.settle_tiers()
        assert eng.open(PROMPT, session="b", salt="two").cached_tokens == 0
        assert eng.open(PROMPT, session="c", salt="one").cached_tokens == 700
        eng.shutdown()


def test_a_copy_that_is_damaged_would_be_noticed_by_these_tests(tmp_path: Path) -> None:
    with tiered(tmp_path, device_bytes=5 * PAGE) as store:
        eng = engine(store, prefix_index=False)
        eng.open(PROMPT, session="a")
        assert eng.settle_tiers()
        assert store.memory is not None
        pieces = [p for ps in store.memory._pieces.values() for p in ps]
        rows = bytearray(pieces[0].rows)
        rows[3] ^= 1
        pieces[0].rows = rows
        assert eng.generate("a", 3) != cold(PROMPT, 3)
        eng.shutdown()


# -------------------------------------------------------------------- any schedule


@pytest.mark.parametrize("background", [False, True])
def test_any_schedule_says_what_an_engine_that_moved_nothing_says(
    tmp_path: Path, background: bool
) -> None:
    moved = [schedule(tmp_path / str(seed), seed, background) for seed in range(12)]
    assert sum(moved) > 300, "these schedules show nothing"


def schedule(folder: Path, seed: int, background: bool) -> float:
    """Random verbs over three sessions; returns the rows that came back from memory."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "memory_bytes": rng.choice([3_000, 30_000, 1 << 20]),
        "device_bytes": rng.choice([None, 10, 40]),
        "policy": rng.choice([Lru(), KeepSession()]),
        "restore": rng.choice(["auto", "always"]),
    }
    if options["device_bytes"]:
        options["device_bytes"] *= 4 * ROW
    with Store(folder, **options) as store:
        eng = engine(
            store,
            page_size=4,
            capacity_pages=rng.choice([320, 700]),
            background=background,
            prefix_index=rng.random() < 0.5,
        )
        names = ["a", "b", "c"]
        for name in names:
            eng.open(PROMPT[: rng.choice([30, 260, 520])], session=name, salt=rng.choice("xy"))
        for _ in range(40):
            name = rng.choice(names)
            tree = eng.tree(name)
            node = rng.choice(list(tree.nodes))
            some = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            tips = [n.id for n in tree.tips.values()]
            try:
                match rng.randrange(11):
                    case 0 | 1:
                        eng.fork(name, node, rng.choice("xyz"), some)
                    case 2:
                        eng.speculate(name, node)
                        eng.drain_slack()
                    case 3:
                        eng.commit(name, rng.choice(tips), some)
                    case 4:
                        eng.attempt(name, node)
                    case 5:
                        eng.promote(name, node)
                    case 6 | 7:
                        tip = rng.choice(tips)
                        history = eng.tokens(name, tip)
                        got = eng.generate(name, 3, node=tip)
                        assert got == cold(history, 3)
                    case 8:
                        eng.mark_idle(name, rng.choice(tips), rng.choice([0.01, 1.0, 30.0]))
                    case 9:
                        clock(eng).advance(rng.choice([1.0, 500.0, 40_000.0]))
                        eng.warm(name)
                    case _:
                        eng.abort(name, node)
            except (NodeError, SessionError, ConfigError):
                continue
            if rng.random() < 0.4:
                assert eng.settle_tiers()
            assert store.memory is not None
            assert store.memory.used <= store.memory.limit
        assert eng.settle_tiers()
        eng.check()
        for name in names:
            eng.promote(name, eng.tip(name))
            history = eng.tokens(name)
            assert eng.generate(name, 3) == cold(history, 3)
        eng.check()
        assert not store.failures, store.last_failure
        eng.shutdown()
        return store.meter.value("restored_tokens", tier="memory")


# -------------------------------------------------------------------- the budget of memory


def piece(tokens: list[int], begin: int, end: int, salt: str = "", ms: float = 100.0) -> Piece:
    prefixes = Prefixes(tokens, salt)
    above, below = prefixes.at(begin), prefixes.at(end)
    return Piece(above, below, begin, prefixes.tokens(begin, end), bytes((end - begin) * ROW), ms)


def test_memory_keeps_its_budget_and_lets_ends_of_little_value_go_first() -> None:
    now = [0.0]
    gone: list[Piece] = []
    memory = HostMemory(8_000, KeepSession(), on_evicted=gone.extend, now_s=lambda: now[0])
    text, other = list(range(300)), list(range(300, 600))
    for begin in (0, 100, 200):
        assert memory.put(piece(text, begin, begin + 100))
    now[0] = 10.0
    assert memory.put(piece(other, 0, 100))
    assert memory.put(piece(other, 100, 200))
    assert memory.used == 8_000
    now[0] = 20.0
    assert memory.put(piece(other, 200, 300))
    assert [(p.start, p.tokens[:1]) for p in gone] == [(200, bytes([200]))], "the older one's end"
    assert not memory.put(piece(list(range(50)), 0, 50, "s", ms=1e-6)), "worth less than any"
    assert memory.refused == 1
    assert not memory.put(piece(list(range(600)), 0, 600))
    with pytest.raises(StoreError):
        HostMemory(0, Lru())


def test_a_piece_is_found_by_its_text_and_only_as_far_as_it_agrees() -> None:
    memory = HostMemory(1 << 20, Lru())
    text = list(range(400))
    memory.put(piece(text, 0, 300))
    changed = Prefixes([*text[:120], 9, *text[121:]], "")
    with memory.find(changed.at(0), changed.tokens(0, 400)) as hit:
        assert hit is not None
        assert hit[1] == 120
        assert not memory.put(piece(text, 0, 300, "x")) or memory.used > 0
    with memory.find(Prefixes(text, "salt").at(0), changed.raw) as hit:
        assert hit is None
    assert memory.has(changed.at(0), changed.tokens(0, 120))
    memory.put(piece(text, 0, 350))
    assert len(memory) == 2, "a longer run takes the place of the one it repeats"
    memory.clear()
    assert memory.used == len(memory) == 0


def test_a_piece_that_is_read_is_not_evicted() -> None:
    memory = HostMemory(100 * ROW, Lru())
    memory.put(piece(list(range(100)), 0, 100))
    prefixes = Prefixes(list(range(100)), "")
    with memory.find(prefixes.at(0), prefixes.raw):
        assert not memory.put(piece(list(range(50, 150)), 0, 100))
    assert memory.put(piece(list(range(50, 150)), 0, 100))
