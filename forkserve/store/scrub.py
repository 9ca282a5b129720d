"""Background check of stored bytes: a slice at a time, what was hashed longest ago first.

Damage is set aside and struck from the catalog, as on a read; each pass is an event.  The rate is
kept by sleeping after each chunk, so that a scrub takes a known share of disk and processor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.pace import Pace
from forkserve.store.rebuild import Report
from forkserve.store.vault import Vault
from forkserve.threads import started

__all__ = ["Scrubber", "scrub"]

_log = logging.getLogger(__name__)
_BATCH = 32  # chunks between two notes of what was verified
_SLICE = 256 << 20  # bytes of one pass of the background thread


def scrub(
    vault: Vault,
    *,
    most_bytes: int | None = None,
    rate: float | None = None,
    places: Sequence[str] | None = None,
    stop: Callable[[float], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Hash up to `most_bytes` stored bytes (None: all), at most `rate` bytes a second.

    places: default the first one.  stop(seconds): sleeps, and says whether to end early.  Raises
    StoreError (unknown place), CatalogFault; a chunk that can't be read now is reported and stays.
    In a process with an engine it makes way for passes (`Pace`).
    """
    report = Report()
    with vault.pace.beside():
        _places(vault, report, most_bytes, rate, places, stop or _sleep, progress)
    if vault.catalog.role != "reader" and report.checked:
        found = {"checked": report.checked, "bytes": report.bytes}
        bad = {"damaged": len(report.faults), "missing": report.dangling}
        vault.catalog.event("scrub", **found, **bad)
    return report


def _places(
    vault: Vault,
    report: Report,
    most_bytes: int | None,
    rate: float | None,
    places: Sequence[str] | None,
    wait: Callable[[float], bool],
    progress: Callable[[int, int], None] | None,
) -> None:
    begin, catalog = time.monotonic(), vault.catalog
    for place in places or [next(iter(vault.depots))]:
        if place not in vault.depots:
            raise StoreError(f"no place '{place}'; there are {', '.join(vault.depots)}")
        rows = catalog.read(
            "SELECT r.content, p.bytes FROM replica AS r JOIN part AS p USING (content)"
            " WHERE r.place = ? ORDER BY coalesce(r.verified_at, 0), r.content",
            (place,),
        )
        sound: list[str] = []
        for number, (content, size) in enumerate(rows):
            if most_bytes is not None and report.bytes + size > most_bytes and report.checked:
                break
            _one(vault, place, content, size, report, sound)
            if len(sound) >= _BATCH:
                _note(vault, place, sound)
            if progress is not None:
                progress(number + 1, len(rows))
            late = report.bytes / rate - (time.monotonic() - begin) if rate else 0.0
            if wait(max(late, 0.0)):
                break
        _note(vault, place, sound)


def _one(
    vault: Vault, place: str, content: str, size: int, report: Report, sound: list[str]
) -> None:
    try:
        fault = vault.verify(place, content)
    except OSError as error:
        report.problems.append(f"chunk {content[:16]} in {place} cannot be read: {error}")
        return
    faults.reach("scrub.hashed")
    report.checked += 1
    report.bytes += size
    if fault is None:
        sound.append(content)
    elif fault.kind == "missing":
        report.dangling += 1
    else:
        report.faults.append((place, content, fault.kind))


def _note(vault: Vault, place: str, sound: list[str]) -> None:
    if not sound or vault.catalog.role == "reader":
        return
    with vault.catalog.write() as db:
        now = vault.catalog.now()
        db.executemany(
            "UPDATE replica SET verified_at = ? WHERE content = ? AND place = ?",
            [(now, content, place) for content in sound],
        )
    sound.clear()
    faults.reach("scrub.noted")


def _sleep(seconds: float) -> bool:
    if seconds:
        time.sleep(seconds)
    return False


class Scrubber:
    """Scrubs for ever in a thread of its own, at `rate` bytes a second.

    pause_s: between two passes over everything.  on_failure: told when a pass cannot be made.
    """

    def __init__(
        self,
        vault: Vault,
        rate: float,
        pause_s: float = 3600.0,
        on_failure: Callable[[BaseException], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        if not rate > 0:
            raise StoreError(f"a scrub at {rate} bytes a second makes no sense")
        self.passes = 0
        self._vault = vault
        self._rate = rate
        self._pause_s = pause_s
        self._on_failure = on_failure
        self._pace = pace or Pace()
        self._stop = threading.Event()
        self._thread = started(self._serve, "forkserve-scrub")

    def _serve(self) -> None:
        with self._pace.worker():
            self._go_round()

    def _go_round(self) -> None:
        done = 0
        while not self._stop.is_set():
            total = 0
            try:
                near = next(iter(self._vault.depots))
                report = scrub(
                    self._vault, most_bytes=_SLICE, rate=self._rate, stop=self._stop.wait
                )
                done += report.bytes
                sql = "SELECT coalesce(sum(bytes), 0) FROM part JOIN replica USING (content)"
                total = self._vault.catalog.read(sql + " WHERE place = ?", (near,))[0][0]
            except (StoreError, OSError) as error:
                _log.warning("a scrub failed: %s", error)
                if self._on_failure is not None:
                    with suppress(Exception):
                        self._on_failure(error)
            if done >= total:
                done, self.passes = 0, self.passes + 1
                self._stop.wait(self._pause_s)

    def close(self) -> None:
        """End after the chunk in hand.  Idempotent."""
        self._stop.set()
        self._thread.join()
