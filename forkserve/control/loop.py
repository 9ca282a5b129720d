"""The engine loop: schedule, run, land.

One thread at a time drives it: the caller's own while it waits (hand-stepped), or a background
thread.  The lock is held while a batch is put together and while it lands, not while it runs, so
that a fork or an abort never waits for a forward pass.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from forkserve.control.core import Core
from forkserve.control.pressure import make_room
from forkserve.control.spine_care import care
from forkserve.control.task import Task
from forkserve.errors import BackendError, ForkServeError, OutOfPages
from forkserve.tree.node import Node
from forkserve.tree.rows import Reservation, fence, missing, reserve, rollback, settle, spans
from forkserve.tree.spine import take_prefix
from forkserve.types import Batch, BatchResult, JobClass, NodeMode, SampleSpec, Work

__all__ = ["Loop", "Ran"]

_running: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def _stop_loops() -> None:
    """A thread inside a forward pass must not outlive the interpreter."""
    for loop in list(_running):
        loop.shutdown()


_POLL_S = 0.05  # how often an idle background loop looks at timers


@dataclass(slots=True)
class _Entry:
    """One work of the batch and what has to be done when it lands."""

    task: Task
    owner: Node
    count: int
    held: Reservation | None
    work: Work


@dataclass(slots=True)
class Ran:
    """Tokens of one tick."""

    committed: int = 0
    speculative: int = 0
    idle: bool = False  # nothing could run


@dataclass(slots=True)
class _Flight:
    batch: Batch = field(default_factory=Batch)
    entries: list[_Entry] = field(default_factory=list)
    owners: set[Node] = field(default_factory=set)


class Loop:
    """Drives a `Core`."""

    def __init__(self, core: Core, *, background: bool) -> None:
        self.core = core
        self.passes = 0
        self.speculated = 0  # tokens of speculation run so far
        self._driving = False
        self._stop = False
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            _running.add(self)
            self._thread = threading.Thread(target=self._serve, name="forkserve-loop", daemon=True)
            self._thread.start()

    # ---------------------------------------------------------------- waiting

    def run_until(self, done: Callable[[], bool]) -> None:
        """Drive, or wait for the driver, until `done()` holds (asked under the lock)."""
        core, stuck = self.core, 0
        while True:
            with core.lock:
                self.check()
                if done():
                    return
                if self._thread is not None or self._driving or core.waiting:
                    core.changed.wait()
                    continue
                self._driving = True
            try:
                ran = self.tick(wake=True)
            finally:
                with core.lock:
                    self._driving = False
                    core.changed.notify_all()
            stuck = stuck + 1 if ran.idle else 0
            if stuck > 2 and not done():
                raise BackendError(
                    f"nothing can run but {len(core.scheduler)} jobs are queued; this is a bug"
                )

    def quiesce(self, session: str) -> None:
        """Wait until no batch in flight belongs to the session."""
        core = self.core
        core.waiting += 1  # no batch departs before the verb had its turn
        try:
            while session in core.in_flight:
                self.check()
                core.changed.wait()
        finally:
            core.waiting -= 1
            core.changed.notify_all()

    def check(self) -> None:
        """Raise if the loop has died."""
        if self._broken is not None:
            raise BackendError("the engine loop has failed; open a new engine") from self._broken
        if self._stop:
            raise BackendError("the engine is shut down")

    def shutdown(self) -> None:
        """End the thread after the batch in flight.  Idempotent."""
        with self.core.lock:
            self._stop = True
            self.core.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        core, wake = self.core, False
        try:
            while True:
                with core.lock:
                    while not self._stop and (
                        core.waiting or (not self._runnable() and not care(core))
                    ):
                        core.changed.wait(self._patience())
                        core.expire(core.clock.now_ms())
                    if self._stop:
                        break
                ran = self.tick(wake=wake)
                wake = False
                if ran.idle:
                    with core.lock:  # whoever waits for a companion has waited long enough then
                        wake = not core.changed.wait(self._patience())
        except BaseException as error:
            with core.lock:
                self._broken = error
                for task in list(core.tasks.values()):
                    core.finish(task, BackendError("the engine loop has failed"))
                core.changed.notify_all()

    def _runnable(self) -> bool:
        return bool(self.core.pending) or len(self.core.scheduler) > 0

    def _patience(self) -> float | None:
        """Seconds an idle loop may sleep: for ever unless a timer is armed."""
        core = self.core
        waiting = [t.wake_ms for t in core.tasks.values() if t.held and t.wake_ms]
        if waiting:
            return max((min(waiting) - core.clock.now_ms()) / 1e3, 1e-4)
        return _POLL_S if core.due_ms < inf or len(core.scheduler) else None

    # ---------------------------------------------------------------- a tick

    def tick(self, *, wake: bool) -> Ran:
        """Run one batch.  wake: also run tasks that wait for a companion."""
        core = self.core
        with core.lock:
            finished = core.finished
            flight = self._depart(wake)
            if not flight.entries and not flight.batch.copies:
                return Ran(idle=core.finished == finished)
            core.in_flight = {entry.task.session for entry in flight.entries}
            pending = len(core.pending)
        try:
            result = core.backend.execute(flight.batch)
        except BaseException as error:
            with core.lock:
                self._crash(flight, error)
            if not isinstance(error, Exception):
                raise
            return Ran()
        with core.lock:
            for _, pages in core.pending[:pending]:
                core.pool.unpin(pages)
            del core.pending[:pending]
            return self._land(flight, result)

    def _depart(self, wake: bool) -> _Flight:
        """Put a batch together."""
        core, now = self.core, self.core.clock.now_ms()
        core.expire(now)
        core.sweep()
        for task in core.tasks.values():
            if task.held and task.wake_ms and (wake or task.wake_ms <= now):
                task.held, task.wake_ms = task.parked, 0.0
        flight = _Flight()
        self._force_preempt()
        plan = core.scheduler.plan(now, core.backend.predict_ms)
        for job, reason in plan.dropped:
            assert isinstance(job, Task)
            core.count.refusals[reason] += 1
            core.finish(job)
        for job, tokens in plan.items:
            assert isinstance(job, Task)
            if not job.done:
                self._board(flight, job, tokens)
        if not flight.entries:
            self._rescue(flight)
        if not flight.entries:
            care(core)
        flight.batch.copies[:0] = [copy for copies, _ in core.pending for copy in copies]
        return flight

    def _board(self, flight: _Flight, task: Task, tokens: int) -> None:
        """Add one task's next rows to the batch, or finish, park or drop the task."""
        core, tree, target = self.core, task.tree, task.target
        if target.parent is None and target.evicted and core.config.prefix_index:
            if take_prefix(tree, core.index):
                core.requeue(task)  # less is left than it was queued for
        parts = missing(target, task.end())
        handle = task.generation_handle
        held: Reservation | None = None
        if parts:
            owner, begin, end = parts[0]
            stop = fence(owner, begin)
            count = min(tokens, end - begin, (stop or end) - begin)
        elif handle is not None:
            owner, begin, count = target, target.length - 1, 1  # replay for its logits
        else:
            core.finish(task)
            return
        if owner in flight.owners or (begin < owner.alias_len and owner.parent in flight.owners):
            return  # its rows, or the last row of its parent, are being written by this batch
        if parts:
            held = self._reserve(flight, task, owner, begin, count)
            if held is None:
                return
        last = handle is not None and owner is target and begin + count == target.length
        work = Work(
            session=task.session,
            node=owner.id,
            tokens=tree.tokens(owner, begin, begin + count),
            start=begin,
            context=spans(tree, owner, begin),
            write=held.write if held is not None else None,
            sample=self._sample_spec(task) if last else None,
            speculative=task.kind is JobClass.SPEC,
        )
        if held is not None:
            flight.batch.copies.extend(held.copies)
            core.count.copied_rows += sum(copy.rows for copy in held.copies)
        flight.batch.works.append(work)
        flight.owners.add(owner)
        flight.entries.append(_Entry(task, owner, count, held, work))

    def _sample_spec(self, task: Task) -> SampleSpec:
        handle = task.generation_handle
        assert handle is not None
        return SampleSpec(
            params=handle.params,
            seed=handle.seed,
            position=task.target.length,
            request=handle.number,
            step=len(handle.tokens),
            allowed=handle.allowed,
        )

    # ---------------------------------------------------------------- pages

    def _reserve(
        self, flight: _Flight, task: Task, owner: Node, begin: int, count: int
    ) -> Reservation | None:
        """Rows for a work.  Speculation takes free or cached pages, committed work makes room."""
        core = self.core
        try:
            return reserve(task.tree, owner, begin, count)
        except OutOfPages as error:
            shortage = error
        if task.kind is JobClass.SPEC:
            core.index.reclaim(shortage.needed - core.pool.free_pages)
            if core.pool.free_pages >= shortage.needed:
                return reserve(task.tree, owner, begin, count)
            core.count.refusals["pages"] += 1
            core.finish(task)
            return None
        room = make_room(
            shortage.needed,
            core.pool,
            core.index,
            core.trees.values(),
            core.tasks.values(),
            core.clock.now_ms(),
            drain=core.drain,
            dropped=core.before_eviction,
            preempt=lambda: self._preempt_younger(flight, task),
        )
        if room:
            return reserve(task.tree, owner, begin, count)
        if not task.privileged and len(self._committed()) > 1:
            self._park(task)  # others hold the pages: they will end
        else:
            free, capacity = core.pool.free_pages, core.pool.capacity
            core.finish(task, OutOfPages(shortage.needed, free, capacity))
        return None

    def _committed(self) -> list[Task]:
        return [t for t in self.core.tasks.values() if t.kind is not JobClass.SPEC]

    def _park(self, task: Task) -> None:
        """Let the task wait, and give its rows to those that go on."""
        task.held = task.parked = True
        self.core.parked.append(task)
        if all(child.evicted for child in task.target.children.values()):
            self._take_rows(task)

    def _rescue(self, flight: _Flight) -> None:
        """Everybody waits for pages: the oldest goes on alone, or learns that it never will fit."""
        core = self.core
        if not core.parked or flight.entries:
            return
        ahead = [t for t in core.tasks.values() if t.privileged] or core.parked
        task = min(ahead, key=lambda t: t.serial)
        for other in self._committed():
            if other is not task and not other.parked:
                self._park(other)
        if task.parked:
            core.parked.remove(task)
            task.parked = task.held = False
        task.privileged = True
        decodes = task.kind is JobClass.DECODE
        self._board(flight, task, 1 if decodes else core.config.prefill_chunk)

    def _preempt_younger(self, flight: _Flight, task: Task) -> bool:
        """Take the rows of the youngest generation that started after `task`."""
        path = {task.target, *task.target.ancestors()}
        younger = [
            t
            for t in self._committed()
            if t.target not in path
            and t.target.segments
            and t.target not in flight.owners
            and t.serial > task.serial
            and all(child.evicted for child in t.target.children.values())
        ]
        if not younger:
            return False
        self._take_rows(max(younger, key=lambda t: t.serial))
        return True

    def _take_rows(self, task: Task) -> None:
        """Pre-empt: the rows go, the tokens stay, the task starts over with a prefill."""
        core = self.core
        core.count.preemptions += 1
        core.drop_rows(task.tree, task.target)
        core.requeue(task)

    def _force_preempt(self) -> None:
        """Test aid of the mock: pre-empt a running generation every n-th pass."""
        every = getattr(self.core.backend, "force_preempt_every", 0)
        if not every or self.passes % every != every - 1:
            return
        for task in self._committed():
            free = all(child.evicted for child in task.target.children.values())
            if task.kind is JobClass.DECODE and task.target.segments and free:
                self._take_rows(task)
                return

    # ---------------------------------------------------------------- landing

    def _land(self, flight: _Flight, result: BatchResult) -> Ran:
        """Rows are valid, samples are taken, tasks move on."""
        core, now = self.core, self.core.clock.now_ms()
        self.passes += bool(flight.entries)
        core.count.forward_passes += bool(flight.entries)
        ran = Ran()
        core.in_flight = set()
        for entry, out in zip(flight.entries, result.results, strict=True):
            task, owner = entry.task, entry.owner
            if entry.held is not None:
                if entry.held.segment in owner.segments and owner.live:
                    settle(task.tree, entry.held)
                    core.publish(task.tree, owner)
                else:
                    rollback(task.tree, entry.held)
            self._account(entry, ran)
            owner.used_ms = now
            core.scheduler.ran(task, min(entry.count, task.remaining), now)
            if out.token is not None:
                self._take_token(task, out.token, out.logprob, now)
            if not task.done:
                self._move_on(task)
        self._note_miss(flight, result.elapsed_ms, now)
        self.speculated += ran.speculative
        core.changed.notify_all()
        return ran

    def _account(self, entry: _Entry, ran: Ran) -> None:
        core = self.core
        if entry.task.kind is JobClass.SPEC:
            ran.speculative += entry.count
            pages = len(entry.held.fresh) if entry.held is not None else 0
            core.planner.ledger.settle(entry.task.session, entry.task.node, pages)
        else:
            ran.committed += entry.count
        if entry.task.kind is JobClass.DECODE:
            return
        if entry.owner.mode is NodeMode.SPEC or entry.task.kind is JobClass.SPEC:
            core.count.speculative += entry.count
        elif entry.held is not None:
            core.count.committed += entry.count

    def _take_token(self, task: Task, token: int, logprob: float | None, now: float) -> None:
        core, handle = self.core, task.generation_handle
        if handle is None or handle.done or not task.target.live:
            return  # cancelled while it ran: the cancel wins
        task.tree.extend(task.target, (token,))
        task.target.known = task.target.length
        core.count.decode_steps += 1
        if handle.first_token_ms is None:
            handle.first_token_ms = now
        try:
            handle.push(
                token, logprob if handle.params.logprobs else None, core.backend.info.eos_ids
            )
        except Exception as error:  # of the user's constraint or the tokenizer: theirs alone
            handle.end("error", error)
        if not handle.done and task.target.length >= core.backend.info.max_context:
            handle.end("context")
        if handle.done:
            core.finish(task)

    def _move_on(self, task: Task) -> None:
        """After a pass: wait for the next one in the right class, or be finished."""
        core = self.core
        if not task.target.live:
            core.finish(task)
        elif (
            task not in core.scheduler
        ):  # its rows are done, or more than it was queued for is left
            if task.generation_handle is None and not missing(task.target, task.end()):
                core.finish(task)
            else:
                core.requeue(task)

    def _note_miss(self, flight: _Flight, elapsed_ms: float, now: float) -> None:
        """A token that came late beside speculation is billed to who speculated."""
        core = self.core
        if elapsed_ms <= core.config.tbt_slo_ms:
            return
        late = sum(e.task.kind is JobClass.DECODE for e in flight.entries)
        for tenant in {e.task.tenant for e in flight.entries if e.work.speculative}:
            if late:
                core.meter.miss(tenant, late, now)
                core.count.tbt_misses += late

    def _crash(self, flight: _Flight, error: BaseException) -> None:
        """The pass failed: nothing of it counts, its tasks end with the error."""
        core = self.core
        core.in_flight = set()
        for entry in reversed(flight.entries):
            if entry.held is not None:
                rollback(entry.task.tree, entry.held)
        for entry in flight.entries:
            if isinstance(error, ForkServeError):
                core.finish(entry.task, error)
            else:
                failure = BackendError(f"the backend failed: {error}")
                failure.__cause__ = error
                core.finish(entry.task, failure)
        core.changed.notify_all()
