"""Work in the background: hardly any beside passes, all there is when idle, never none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forkserve.store import pace as module
from forkserve.store.pace import LONGEST_S, PIECE, SHARE, Pace, breathe, paced, pieces, restful
from tests.waiting import HANGS_S


class Machine:
    """A clock that moves when a thread works or sleeps; passes run or don't."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent: dict[int, float] = {}
        self.running = True
        self.slept: list[float] = []  # s of each rest
        self.pace = Pace(now=lambda: self.now, spent=self.of, sleep=self.sleep)
        self.pace.watch(lambda: self.running)

    def of(self) -> float:
        return self.spent.get(threading.get_ident(), 0.0)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.spent[threading.get_ident()] = self.of() + seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def breathe(self) -> None:
        before = self.now
        breathe()
        if self.now > before:
            self.slept.append(self.now - before)


def test_beside_passes_work_takes_its_share() -> None:
    m = Machine()
    with m.pace.worker():
        for _ in range(200):
            m.work(0.0005)
            m.breathe()
    assert m.of() / m.now == pytest.approx(SHARE, rel=0.01)
    assert m.pace.rested_s == pytest.approx(sum(m.slept))


def test_without_passes_nobody_rests() -> None:
    m = Machine()
    m.running = False
    with m.pace.worker():
        for _ in range(200):
            m.work(0.0005)
            m.breathe()
        assert m.slept == []
        m.running = True
        m.work(0.0005)
        m.breathe()
        assert len(m.slept) == 1, "and the first piece beside a pass is followed by a rest"


def test_no_rest_is_longer_than_the_longest_however_much_was_used_up() -> None:
    m = Machine()
    with m.pace.worker():
        m.work(10.0)  # something that could not be cut up
        for _ in range(20):
            m.breathe()
            m.work(0.001)
    assert max(m.slept) == pytest.approx(LONGEST_S)
    assert len(m.slept) == 20, "each piece gets its turn: nothing starves"


def test_little_work_is_not_worth_a_rest() -> None:
    m = Machine()
    with m.pace.worker():
        for _ in range(10):
            m.work(1e-5)
            m.breathe()
    assert len(m.slept) <= 1


def test_all_threads_share_one_account() -> None:
    m = Machine()
    spent = {"a": 0.0, "b": 0.0}

    @contextmanager
    def thread(name: str) -> Iterator[None]:
        """One thread plays both, one after the other."""
        m.spent[threading.get_ident()] = spent[name]
        module._thread.since = spent[name]
        yield
        spent[name] = m.of()

    with m.pace.worker():
        for _ in range(100):
            for name in spent:
                with thread(name):
                    m.work(0.0005)
                    m.breathe()
    assert sum(spent.values()) / m.now == pytest.approx(SHARE, rel=0.02)


def test_a_rest_ends_when_the_passes_do() -> None:
    m = Machine()

    def sleep(seconds: float) -> None:
        m.now += seconds
        m.running = m.now < 1.03

    m.pace._sleep = sleep
    with m.pace.worker():
        m.now = 1.0
        m.work(0.01)  # worth a rest of 190 ms, or of the longest
        m.breathe()
        assert m.slept[0] == pytest.approx(0.02, abs=0.006)
        m.running = True
        m.work(0.0005)
        m.breathe()
        assert m.slept[1] < 0.03, "and what was used up before is forgotten"


def test_who_waits_for_what_is_held_is_not_kept() -> None:
    m = Machine()
    with m.pace.worker():
        m.pace.rush(1.0)
        for _ in range(100):
            m.work(0.001)
            m.breathe()
        assert m.slept == []
        m.now = 2.0
        m.work(0.001)
        m.breathe()
        assert len(m.slept) == 1


def test_who_waits_for_the_work_itself_ends_its_rest() -> None:
    m = Machine()
    with m.pace.worker(lambda: m.now > 1.01):
        m.now = 1.0
        m.work(0.01)
        m.breathe()
        assert sum(m.slept) == pytest.approx(0.0, abs=0.02), "not the 50 ms that it would take"
        m.work(0.01)
        rested = list(m.slept)
        m.breathe()
        assert m.slept == rested


def test_a_rush_wakes_who_rests() -> None:
    pace = Pace(share=1e-9, longest_s=1e6, spent=iter(range(10)).__next__)
    asked = threading.Event()

    def running() -> bool:
        asked.set()
        return True

    pace.watch(running)

    def work() -> None:
        with pace.worker():
            breathe()

    worker = threading.Thread(target=work)
    worker.start()
    assert asked.wait(HANGS_S)
    pace.rush(1e6)
    worker.join(HANGS_S)
    assert not worker.is_alive()


def test_a_watch_ends() -> None:
    m = Machine()
    m.running = False
    forget = m.pace.watch(lambda: True)
    forget()
    forget()
    with m.pace.worker():
        m.work(0.1)
        m.breathe()
    assert m.slept == []


def test_pieces_are_all_of_it_in_order() -> None:
    data = bytes(range(256)) * (3 * PIECE // 256) + b"rest"
    assert [bytes(p) for p in pieces(data)] == [data], "nobody else works in pieces"
    assert not paced()
    with Pace().worker():
        assert paced()
        cut = [bytes(p) for p in pieces(memoryview(data))]
        assert [len(p) for p in cut] == [PIECE] * 3 + [4]
        assert b"".join(cut) == data
        assert list(pieces(b"")) == []
        assert list(restful(list(range(1000)))) == list(range(1000))
    assert not paced()
