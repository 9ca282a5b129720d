"""Rows that come back: from sound bytes or not at all, into any pages, by the faster way."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.depots import FaultyDepot, LocalDepot
from forkserve.store.rebuild import verify
from forkserve.types import SamplingParams
from tests.waiting import wait_for

from .engines import PROMPT, cold, crash, engine, prefilled
from .test_publish import WHOLE, published


def decisions(eng: Engine) -> list[tuple[Any, ...]]:
    assert eng.store is not None
    assert eng._journal is not None
    eng._journal.flush()
    return eng.store.catalog.read(
        "SELECT verdict, reason, tokens, gain_ms, cost_ms, actual_ms FROM decision"
        " WHERE what = 'restore' ORDER BY id"
    )


@pytest.mark.parametrize("page_size", [4, 16, 48, 256])
def test_rows_come_back_into_pages_of_any_size(tmp_path: Path, page_size: int) -> None:
    published(tmp_path, page_size=16)
    eng = engine(tmp_path, page_size=page_size)
    h = eng.resume("a")
    assert h.cached_tokens == WHOLE
    eng.check()
    assert eng.generate("a", 8) == cold(PROMPT, 8)
    assert prefilled(eng) == len(PROMPT) - WHOLE
    ((verdict, reason, tokens, prefill, restore, actual),) = decisions(eng)
    assert (verdict, reason, tokens) == ("restored", "faster", WHOLE)
    assert restore < prefill
    assert actual > 0
    eng.shutdown()


def test_open_takes_what_the_store_has_and_a_name_opens_a_new_session(tmp_path: Path) -> None:
    published(tmp_path)
    eng = engine(tmp_path, prefix_index=False)
    h = eng.open([*PROMPT, 1, 2, 3])
    assert h.cached_tokens == WHOLE
    assert eng.generate(h.id, 5) == cold([*PROMPT, 1, 2, 3], 5)
    named = eng.restore("start", session="b")
    assert named.cached_tokens == WHOLE
    assert eng.tokens("b") == PROMPT
    assert eng.generate("b", 5) == cold(PROMPT, 5)
    other = eng.open(PROMPT, salt="another")
    assert other.cached_tokens == 0, "two salts share nothing"
    eng.check()
    eng.shutdown()


def test_resident_pages_go_before_the_store(tmp_path: Path) -> None:
    published(tmp_path)
    eng = engine(tmp_path)
    eng.resume("a")
    assert eng.store is not None
    reads = eng.store.restorer.reads
    assert eng.open(PROMPT).cached_tokens >= WHOLE - 8
    assert eng.store.restorer.reads == reads
    eng.shutdown()


def test_the_faster_way_is_taken_and_written_down(tmp_path: Path) -> None:
    published(tmp_path)
    eng = engine(tmp_path)
    assert eng.store is not None
    eng.store.restorer.cost.rate = 1.0  # bytes a ms: hopeless
    assert eng.resume("a").cached_tokens == 0
    ((verdict, reason, tokens, prefill, restore, actual),) = decisions(eng)
    assert (verdict, reason, tokens, actual) == ("computed", "faster", 0, None)
    assert restore > prefill
    eng.store.restore = "always"
    assert eng.warm("a").verdict == "restored"
    assert eng.warm("a").tokens == 0
    assert eng.generate("a", 3) == cold(PROMPT, 3)
    assert eng.warm("a").verdict in ("resident", "computed")
    eng.shutdown()
    with Store(tmp_path, restore="never") as store:
        eng = engine(store)
        eng.resume("a")
        assert decisions(eng)[-1][1] == "restore_off"
        eng.shutdown()


def test_too_few_pages_restore_a_part(tmp_path: Path) -> None:
    published(tmp_path)
    eng = engine(tmp_path, page_size=16, capacity_pages=46)
    eng.open(PROMPT[:300], session="other", salt="o")
    h = eng.resume("a")
    assert 0 < h.cached_tokens < WHOLE
    eng.check()
    eng.close("other")
    assert eng.generate("a", 4) == cold(PROMPT, 4)
    eng.shutdown()


def test_a_prefix_that_two_want_at_once_is_read_once(tmp_path: Path) -> None:
    published(tmp_path)
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    real = depot.inner.open

    with Store(tmp_path, disk=depot) as store:

        def late(key: str) -> Any:
            """Until all three have asked for both chunks: they want them at once."""
            wait_for(lambda: store.restorer.reads + store.restorer.shared >= 6)
            return real(key)

        depot.inner.open = late  # type: ignore[method-assign]
        eng = engine(store, prefix_index=False, background=True)
        done: list[int] = []

        def begin(name: str) -> None:
            done.append(eng.open(PROMPT, session=name).cached_tokens)

        threads = [threading.Thread(target=begin, args=(name,)) for name in "xyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [WHOLE] * 3
        assert depot.calls["open"] == 2
        assert store.restorer.shared == 4
        for name in "xyz":
            assert eng.generate(name, 3) == cold(PROMPT, 3)
        eng.check()
        eng.shutdown()


# -------------------------------------------------------------------- damage


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-9] ^= 1
    elif how == "cut":
        del data[-100:]
    elif how == "pad":
        data += b"\0"
    path.write_bytes(data)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "pad", "gone"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_chunk_costs_its_rows_in_the_same_call(tmp_path: Path, how: str, bad: int) -> None:
    published(tmp_path)
    eng = engine(tmp_path)
    assert eng.store is not None
    from forkserve.store.identity import plan_chain

    found = eng.store.catalog.lookup(eng._print, plan_chain(PROMPT, "default"))
    spoil(tmp_path / "chunks" / found[bad].content[:2] / f"{found[bad].content}.kv", how)
    h = eng.resume("a")
    assert h.cached_tokens == 256 * bad
    assert eng.generate("a", 6) == cold(PROMPT, 6)
    assert prefilled(eng) == len(PROMPT) - 256 * bad
    assert decisions(eng)[0][:2] == (("restored" if bad else "computed"), "damaged")
    assert len(eng.store.catalog.events("quarantine")) == 1
    eng.check()
    assert eng.publish("a").wait().written >= 1
    assert verify(eng.store.vault).clean
    eng.shutdown()


def test_a_failed_restore_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(tmp_path)
    eng = engine(tmp_path)
    real, calls = eng.backend.write_rows, [0]  # type: ignore[attr-defined]

    def write(*args: Any) -> None:
        calls[0] += 1
        real(*args)
        if calls[0] == 2:
            raise OSError(errno.EIO, "the copy broke off")

    monkeypatch.setattr(eng.backend, "write_rows", write)
    with pytest.raises(OSError, match="broke off"):
        eng.resume("a")
    eng.check()
    assert eng.generate("a", 4) == cold(PROMPT, 4)
    other = eng.open(list(range(40)), salt="x")
    assert eng.generate(other.id, 6) == cold(list(range(40)), 6)
    eng.check()
    eng.shutdown()


@pytest.mark.parametrize("what", ["open", "head", "stat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_unreadable_disk_only_costs_time(tmp_path: Path, what: str, code: int) -> None:
    published(tmp_path)
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    depot.fail[what] = code
    with Store(tmp_path, disk=depot) as store:
        eng = engine(store)
        eng.resume("a")
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        eng.shutdown()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_full_disk_fails_the_ticket_not_the_tokens_and_recovers(
    tmp_path: Path, code: int
) -> None:
    depot = FaultyDepot(LocalDepot(tmp_path / "chunks"))
    with Store(tmp_path, disk=depot) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        depot.fail["put"] = code
        with pytest.raises(StoreError, match="publish failed"):
            eng.publish("a", name="x")
        assert eng.generate("a", 4) == cold(PROMPT, 4)
        assert store.health()["failures"]["OSError"] >= 1
        assert store.catalog.events("failed")
        depot.fail.clear()
        assert eng.publish("a", name="x").wait().written == 2
        eng.shutdown()
    assert not list((tmp_path / "chunks").rglob(".tmp*"))


def test_a_deleted_database_costs_the_sessions_not_the_kv(tmp_path: Path) -> None:
    from forkserve.store.rebuild import rebuild

    published(tmp_path)
    for path in tmp_path.glob("catalog.db*"):
        path.unlink()
    eng = engine(tmp_path)
    assert eng.store is not None
    assert rebuild(eng.store.vault).adopted == 2
    assert eng.open(PROMPT).cached_tokens == WHOLE
    eng.shutdown()


# -------------------------------------------------------------------- the bundled engine


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        *(("float32", "native"), ("bfloat16", "native"), ("int8", "native"), ("w8a16", "native")),
        *(("float32", "torch"), ("bfloat16", "torch")),
    ],
)
def test_smollm2_goes_on_from_restored_rows_bit_for_bit(
    tmp_path: Path, dtype: str, kernels: str
) -> None:
    """All rows are restored, so each step sees the very bits that the first process saw.

    The first token comes from a pass over one row instead of 256: its sums are ordered in another
    way by torch, so that one is compared within a tolerance.
    """
    from forkserve.kernels.native import library

    if kernels == "native" and (reason := library.available()) is not None:
        pytest.skip(reason)
    from forkserve.engine import LocalBackend

    config = ForkServeConfig(capacity_pages=128)
    params = SamplingParams(logprobs=True, ignore_eos=True)
    text = [t % 40_000 for t in range(7, 7 + 256 * 131, 131)]

    def go_on(eng: Engine) -> tuple[list[int], list[float]]:
        generation = eng.start("a", 12, params=params)
        return generation.result(), generation.logprobs

    eng = Engine(LocalBackend(config, dtype=dtype, kernels=kernels), store=tmp_path)
    eng.open(text, session="a")
    eng.publish("a")
    saved = eng.stats()
    crash(eng)
    tokens, logprobs = go_on(eng)
    with Store(tmp_path, restore="always") as store:
        again = Engine(LocalBackend(config, dtype=dtype, kernels=kernels), store=store)
        assert again.resume("a").cached_tokens == 256
        got, chances = go_on(again)
        assert got == tokens
        assert chances[1:] == logprobs[1:]
        room = {"native": 0.0, "torch": 1e-3 if dtype == "float32" else 0.2}[kernels]
        assert chances[0] == pytest.approx(logprobs[0], rel=0, abs=room)
        assert prefilled(again) == 0 < saved.prefilled_tokens.committed
        again.shutdown()
