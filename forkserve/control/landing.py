"""Taking a batch's results: rows become valid, tokens are appended, tasks move on."""

from __future__ import annotations

import logging

from forkserve.control.core import Core
from forkserve.control.flight import Entry, Flight, Ran
from forkserve.control.taking import take
from forkserve.control.task import Task
from forkserve.control.windows import slide
from forkserve.errors import BackendError, ForkServeError
from forkserve.tree.rows import missing, rollback, settle
from forkserve.tree.spine import trim
from forkserve.types import BatchResult, JobClass, NodeMode, WorkResult

__all__ = ["Landing"]

_log = logging.getLogger(__name__)
_TRIES = 3  # ticks without memory, after which their works end
_FAILED = "the backend failed"
_SHORT = f"no memory for the engine's own tables in {_TRIES} steps"


class Landing:
    """Applies what a backend returned, or undoes its failure.  The caller holds the lock."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._short = 0  # ticks without memory, one after the other

    def land(self, flight: Flight, result: BatchResult) -> Ran:
        """Rows are valid, samples are taken, tasks move on."""
        core, now = self.core, self.core.clock.now_ms()
        core.count.forward_passes += bool(flight.entries)
        ran = Ran()
        core.in_flight, core.writing = set(), ()
        self._unpin(flight)
        for entry, out in zip(flight.entries, result.results, strict=True):
            try:
                self._land_one(entry, out, ran, now)
            except Exception as error:
                core.finish(entry.task, _wrapped(error))
        if core.window:
            slide(core, dict.fromkeys(entry.task.tree for entry in flight.entries))
        core.scheduler.recovery.went_well()
        self._short = 0
        self._note_miss(flight, result.elapsed_ms, now)
        core.speculated += ran.speculative
        core.changed.notify_all()
        return ran

    def _land_one(self, entry: Entry, out: WorkResult, ran: Ran, now: float) -> None:
        core, task, owner = self.core, entry.task, entry.owner
        landed = []
        for held in reversed(entry.reservations()):  # a table below goes before the one it shares
            if held.segment in held.node.segments and held.node.live:
                landed.append(held)
            else:
                rollback(task.tree, held)
        for held in reversed(landed):
            settle(task.tree, held)
            core.publish(task.tree, held.node)
            held.node.used_ms = now
        for held in entry.more:
            if held.node.live and held.node.parent is not None:
                trim(task.tree, held.node.parent)  # a sole child has the page to itself
        if entry.text is not None and task.probe is not None and out.logits is not None:
            task.probe.rows[entry.text] = out.logits
        self._account(entry, ran)
        owner.used_ms = now
        core.scheduler.ran(task, min(entry.count, task.remaining), now)
        take(core, task, out, now)
        if not task.done:
            self._move_on(task)

    def _unpin(self, flight: Flight) -> None:
        pinned, flight.pinned = flight.pinned, []
        self.core.pool.unpin(pinned)

    def _account(self, entry: Entry, ran: Ran) -> None:
        core, kind = self.core, entry.task.kind
        if kind is JobClass.SPEC:
            ran.speculative += entry.count
            pages = len(entry.held.fresh) if entry.held is not None else 0
            core.planner.ledger.settle(entry.task.session, entry.task.node, pages)
        else:
            ran.committed += entry.count
        if kind is JobClass.DECODE:
            return
        if entry.owner.mode is NodeMode.SPEC or kind is JobClass.SPEC:
            core.count.speculative += entry.count
        elif entry.held is not None:
            core.count.committed += entry.count

    def _move_on(self, task: Task) -> None:
        """After a pass: wait for the next one in the right class, or be finished."""
        core = self.core
        if not task.target.live:
            core.finish(task)
        elif task not in core.scheduler:  # its rows are done, or more than was queued is left
            idle = task.generation_handle is None and not task.probing
            if idle and not missing(task.target, task.end()):
                core.finish(task)
            else:
                core.requeue(task)

    def _note_miss(self, flight: Flight, elapsed_ms: float, now: float) -> None:
        """A token that came late beside speculation is billed to who speculated."""
        core = self.core
        if elapsed_ms <= core.config.tbt_slo_ms:
            return
        late = sum(e.task.kind is JobClass.DECODE for e in flight.entries)
        for tenant in {e.task.tenant for e in flight.entries if e.work.speculative}:
            if late:
                core.meter.miss(tenant, late, now)
                core.count.tbt_misses += late

    def failed(self, flight: Flight, error: Exception) -> None:
        """The backend failed: the batch is tried again smaller, or its works end with the error.

        Without memory it is halved until one row does not fit.  Of the works of several callers
        each is run alone, so that only the one at fault fails.  What has nobody waiting for it, and
        a work that failed alone, ends at once.
        """
        core, rows = self.core, sum(entry.count for entry in flight.entries)
        committed = [e for e in flight.entries if e.task.kind is not JobClass.SPEC]
        divisible = len(flight.entries) > 1 or any(e.held and e.count > 1 for e in flight.entries)
        if _out_of_memory(error) and divisible:
            _log.warning("no memory for a batch of %d rows: %r; it is tried smaller", rows, error)
            self._undo(flight)
            core.scheduler.recovery.shrink(rows // 2)
        elif len({entry.task for entry in committed}) > 1:
            _log.warning("a batch of %d works failed: %r; each runs alone", len(committed), error)
            self._undo(flight)
            for entry in flight.entries:
                if entry.task.kind is JobClass.SPEC:
                    core.finish(entry.task, _wrapped(error))
            core.scheduler.recovery.suspect([entry.task for entry in committed])
        else:
            return self.crash(flight, error)
        core.count.failed_passes += 1

    def short(self, flight: Flight, error: MemoryError) -> None:
        """No memory to put a batch together or to take its results: the tick is tried again.

        What has landed stays so, and the rest runs again.  If that goes on, the works end with the
        error, all of them where none was aboard yet.
        """
        core = self.core
        self._short += 1
        _log.warning("no memory for the engine's own tables: %r", error)
        if self._short < _TRIES:
            self._undo(flight)
            core.count.failed_passes += 1
            return
        self._short = 0
        waiting = [] if flight.entries else list(core.tasks.values())
        self.crash(flight, error, _SHORT)
        for task in waiting:
            core.finish(task, _wrapped(error, _SHORT))

    def crash(self, flight: Flight, error: BaseException, what: str = _FAILED) -> None:
        """Nothing of the pass counts, and its tasks end with the error."""
        self._undo(flight)
        for entry in flight.entries:
            self.core.finish(entry.task, _wrapped(error, what))
        self.core.count.failed_passes += 1

    def _undo(self, flight: Flight) -> None:
        """Give back what was reserved; the tasks stay queued as they were."""
        core = self.core
        core.in_flight, core.writing = set(), ()
        self._unpin(flight)
        for entry in reversed(flight.entries):
            for held in reversed(entry.reservations()):
                rollback(entry.task.tree, held)
        core.changed.notify_all()


def _out_of_memory(error: Exception) -> bool:
    """Of the machine or the device; the pool's own shortage is no failure of a pass."""
    if isinstance(error, ForkServeError):
        return False
    named = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
    said = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or named
        or (
            isinstance(error, RuntimeError)
            and ("out of memory" in said or "allocate memory" in said)
        )
    )


def _wrapped(error: BaseException, what: str = _FAILED) -> ForkServeError:
    """The error as one of ours, with its cause."""
    if isinstance(error, ForkServeError):
        return error
    failure = BackendError(f"{what}: {error!r}")
    failure.__cause__ = error
    return failure
