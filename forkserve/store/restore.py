"""Bringing chunks back: verified in parallel, each read once however many ask for it.

Also the price of doing so, learned from what was brought back before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice

from forkserve.store.catalog import Found
from forkserve.store.identity import Fingerprint
from forkserve.store.pace import paced
from forkserve.store.vault import Loaded, Vault

__all__ = ["RestoreCost", "Restorer", "clock_ms"]

_LEARN = 0.3  # weight of a new measurement


class RestoreCost:
    """ms(bytes) = fixed + bytes / rate.  rate in bytes/ms; careful until it was measured.

    setting: under which the catalog keeps it for the next process.
    """

    def __init__(
        self,
        vault: Vault,
        setting: str = "restore_cost",
        fixed_ms: float = 2.0,
        rate: float = 400e6 / 1e3,
    ) -> None:
        self._vault = vault
        self._setting = setting
        self.fixed_ms = fixed_ms
        self.rate = rate
        self.measured = 0
        known = (vault.catalog.setting(setting) or "").split()
        if len(known) == 2:
            self.rate, self.measured = max(float(known[0]), 1.0), int(known[1])

    def predict_ms(self, size: int) -> float:
        """Predicted time to bring `size` bytes from the store into pages."""
        return self.fixed_ms + size / self.rate

    def observe(self, size: int, ms: float) -> None:
        """Learn from a restore; small ones say little about the rate."""
        if size < 1 << 20:
            return
        rate = size / max(ms - self.fixed_ms, 0.1 * ms, 1e-3)
        weight = _LEARN if self.measured else 1.0
        self.rate += weight * (rate - self.rate)
        self.measured += 1

    def save(self) -> None:
        """Write the rate down for the next process.  Raises CatalogFault."""
        if self.measured:
            self._vault.catalog.set_setting(self._setting, f"{self.rate:.1f} {self.measured}")


@dataclass(slots=True, eq=False)
class _Flight:
    """A chunk that is being read, for one caller or several.

    calm: only threads of the background want it, so it makes way for passes.  taken: some thread
    has begun with it.
    """

    key: tuple[bytes, str]
    made: Fingerprint
    found: Found
    calm: bool
    users: int = 1
    taken: bool = False
    future: Future[Loaded | None] = field(default_factory=Future)


class Restorer:
    """Loads chunks for any number of callers; a chunk that two want at once is read once.

    The nearest place has threads of its own: reads of a place that hangs hold up their like only.
    So has what threads of the background ask for ahead of time: it is read at their pace, unless a
    verb asks for the same chunk meanwhile.
    """

    def __init__(self, vault: Vault, threads: int = 2, far_threads: int = 4) -> None:
        self.cost = RestoreCost(vault)
        self.memory_cost = RestoreCost(vault, "memory_cost", 0.05, 2e9 / 1e3)
        self.patience_s = 30.0  # for one chunk, when none came meanwhile
        self.reads = 0  # chunks opened
        self.shared = 0  # chunks that somebody else was reading already
        self._vault = vault
        self._place = next(iter(vault.depots))  # the nearest
        self._pools = {  # (near, calm) -> its threads
            (near, calm): ThreadPoolExecutor(
                threads if near else far_threads,
                thread_name_prefix="forkserve-restore" + "-far" * (not near) + "-calm" * calm,
            )
            for near in (True, False)
            for calm in (False, True)
        }
        self._ahead = threads + 2
        self._flights: dict[tuple[bytes, str], _Flight] = {}
        self._lock = threading.Lock()

    def fetch(self, made: Fingerprint, chain: Sequence[Found]) -> Iterator[Loaded]:
        """The chunks of a chain in order, up to the first that no place has sound, or that takes
        longer than `patience_s` to come: the rest is computed.

        A few are read ahead.  Whoever stops asking leaves at most one a thread being read.
        """
        rest = iter(chain)
        ahead = deque(self._start(made, found) for found in islice(rest, self._ahead))
        try:
            while ahead:
                try:
                    loaded = ahead[0].future.result(self.patience_s)
                except TimeoutError:
                    self._vault.catalog.event("read_slow", s=self.patience_s)
                    return
                except CancelledError:  # the store was closed
                    return
                self._leave(ahead.popleft())
                if loaded is None:
                    return
                ahead.extend(self._start(made, found) for found in islice(rest, 1))
                yield loaded
        finally:
            for flight in ahead:
                self._leave(flight)

    def _start(self, made: Fingerprint, found: Found) -> _Flight:
        key, calm = (made.digest, found.content), paced()
        with self._lock:
            flight = self._flights.get(key)
            new, hasten = flight is None, False
            if flight is None:
                self.reads += 1
                flight = self._flights[key] = _Flight(key, made, found, calm)
            else:
                self.shared += 1
                flight.users += 1
                hasten = flight.calm and not calm
                flight.calm = flight.calm and calm
        if new or hasten:
            self._submit(flight)
        if new:
            # The callback must not hold the flight: as a cycle it would keep the chunk mapped.
            flight.future.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def _submit(self, flight: _Flight) -> None:
        near = [place for place in flight.found.places if place == self._place]
        far = [place for place in flight.found.places if place != self._place]
        try:
            pool = self._pools[bool(near), flight.calm]
            pool.submit(self._take, flight, near or far, far if near else [])
        except RuntimeError:  # closed meanwhile
            flight.future.cancel()

    def _take(self, flight: _Flight, places: Sequence[str], further: Sequence[str]) -> None:
        """Read a chunk, unless another thread has begun or nobody wants it any more."""
        with self._lock:
            if flight.taken:
                return
            flight.taken = True
        if flight.future.set_running_or_notify_cancel():
            self._read(flight, places, further)

    def _read(self, flight: _Flight, places: Sequence[str], further: Sequence[str]) -> None:
        """Load from one of `places`, else leave it to a thread that may wait for the `further`."""
        rests = self._vault.pace.worker(lambda: not flight.calm) if flight.calm else nullcontext()
        try:
            with rests:
                loaded = self._vault.load(flight.made, flight.found, places)
            if loaded is None and further:
                with suppress(RuntimeError):  # closed meanwhile: a miss
                    self._pools[False, flight.calm].submit(self._read, flight, further, [])
                    return
        except BaseException as error:
            flight.future.set_exception(error)
        else:
            flight.future.set_result(loaded)

    def _leave(self, flight: _Flight) -> None:
        """One of those who asked has it, or does not want it any more."""
        with self._lock:
            flight.users -= 1
            unwanted = not flight.users
            if unwanted and self._flights.get(flight.key) is flight:
                del self._flights[flight.key]  # nobody may join it now
        if unwanted:
            flight.future.cancel()  # one that is being read, or was, is not stopped by this

    def _landed(self, key: tuple[bytes, str], done: Future[Loaded | None]) -> None:
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None and flight.future is done:
                del self._flights[key]

    def close(self) -> None:
        """Wait for what is being read and end the threads.  Idempotent."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            waiting = list(self._flights.values())
        for flight in waiting:
            flight.future.cancel()


def clock_ms() -> float:
    """Real time in ms, whatever clock the engine runs on."""
    return time.perf_counter() * 1e3
