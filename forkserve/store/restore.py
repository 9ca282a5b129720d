"""Bringing chunks back: verified in parallel, each read once however many ask for it.

Also the price of doing so, learned from what was brought back before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from forkserve.store.catalog import Found
from forkserve.store.identity import Fingerprint
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
    """A chunk that is being read, for one caller or several."""

    key: tuple[bytes, str]
    future: Future[Loaded | None]
    users: int = 1


class Restorer:
    """Loads chunks for any number of callers; a chunk that two want at once is read once.

    The nearest place has threads of its own: reads of a place that hangs hold up their like only.
    """

    def __init__(self, vault: Vault, threads: int = 2, far_threads: int = 4) -> None:
        self.cost = RestoreCost(vault)
        self.memory_cost = RestoreCost(vault, "memory_cost", 0.05, 2e9 / 1e3)
        self.patience_s = 30.0  # for one chunk, when none came meanwhile
        self.reads = 0  # chunks opened
        self.shared = 0  # chunks that somebody else was reading already
        self._vault = vault
        self._place = next(iter(vault.depots))  # the nearest
        self._near = ThreadPoolExecutor(threads, thread_name_prefix="forkserve-restore")
        self._far = ThreadPoolExecutor(far_threads, thread_name_prefix="forkserve-restore-far")
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
        key = (made.digest, found.content)
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None:
                self.shared += 1
                flight.users += 1
                return flight
            self.reads += 1
            flight = self._flights[key] = _Flight(key, Future())
        near = [place for place in found.places if place == self._place]
        far = [place for place in found.places if place != self._place]
        job = partial(self._read, flight.future, made, found)
        try:
            if near:
                self._near.submit(job, near, far)
            else:
                self._far.submit(job, far, [])
        except RuntimeError:  # closed meanwhile
            flight.future.cancel()
        # The callback must not hold the flight: as a cycle it would keep the chunk mapped.
        flight.future.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def _read(
        self,
        future: Future[Loaded | None],
        made: Fingerprint,
        found: Found,
        places: Sequence[str],
        further: Sequence[str],
    ) -> None:
        """Load from one of `places`, else leave it to a thread that may wait for the `further`."""
        if not future.running() and not future.set_running_or_notify_cancel():
            return
        try:
            loaded = self._vault.load(made, found, places)
            if loaded is None and further:
                self._far.submit(self._read, future, made, found, further, [])
                return
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(loaded)

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
        for pool in (self._near, self._far):
            pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            waiting = list(self._flights.values())
        for flight in waiting:
            flight.future.cancel()


def clock_ms() -> float:
    """Real time in ms, whatever clock the engine runs on."""
    return time.perf_counter() * 1e3
