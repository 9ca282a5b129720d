"""Putting a batch together: which rows run next, on which pages, and who has to wait.

When pages run out, committed work makes room; what can't be had by that is settled by age: the
oldest goes on, the others wait without rows, and only work that would not fit alone fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.control.core import Core
from forkserve.control.flight import Entry, Flight
from forkserve.control.jobs import Job
from forkserve.control.sharing import share_prompts
from forkserve.control.spine_care import care
from forkserve.control.task import Task
from forkserve.control.windows import readable, regain
from forkserve.errors import BackendError, OutOfPages
from forkserve.tree.eviction import path_rows, resting
from forkserve.tree.invariants import standing_rows
from forkserve.tree.node import Node
from forkserve.tree.rows import Reservation, fence, missing, reserve, rollback, spans
from forkserve.tree.runs import goes_on, prolong
from forkserve.tree.window import give_back
from forkserve.types import JobClass, SampleSpec, Span, Work

__all__ = ["Boarding"]

_TOO_LONG = "this sequence alone is longer than the pool; raise capacity_pages"


def _pages(span: Span, size: int) -> Sequence[int]:
    """Pages that the rows of a span lie in."""
    return span.pages[span.offset // size : -(-(span.offset + span.length) // size)]


def _ahead_first(items: Sequence[tuple[Job, int]]) -> list[tuple[Task, int]]:
    """A tick's grants in turn; who is privileged boards first, so that it may stop any other."""
    tasks = []
    for job, tokens in items:
        assert isinstance(job, Task)
        tasks.append((job, tokens))
    if any(task.privileged for task, _ in tasks):
        tasks.sort(key=lambda item: not item[0].privileged)
    return tasks


def _row_order(entry: Entry) -> tuple[bool, int]:
    """Generations first, by age: turns change from tick to tick, and a plan of attention grows only
    while its works keep their places."""
    return entry.task.kind is not JobClass.DECODE, entry.task.serial


class Boarding:
    """Fills flights from a core's queues.  The caller holds the lock."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def depart(self, flight: Flight, wake: bool) -> None:
        """Put a batch together.  wake: also run tasks that wait for a companion."""
        core, now = self.core, self.core.clock.now_ms()
        core.writing = flight.owners
        core.expire(now)
        core.sweep()
        while core.lost:
            lost = core.lost.pop()
            if not lost.done:
                regain(core, lost)
        for task in core.tasks.values():
            if task.held and task.wake_ms and (wake or task.wake_ms <= now):
                task.held, task.wake_ms = task.parked, 0.0
        self._force_preempt()
        share_prompts(core)
        plan = core.scheduler.plan(now, core.backend.predict_ms)
        for job, reason in plan.dropped:
            assert isinstance(job, Task)
            core.count.refusals[reason] += 1
            core.finish(job)
        for job, tokens in _ahead_first(plan.items):
            if not (job.done or job.parked):  # one before it may have stopped it
                self._board_or_end(flight, job, tokens)
        if not flight.entries:
            self._rescue(flight)
        if not flight.entries:
            care(core)
        flight.entries.sort(key=_row_order)
        flight.batch.works = [entry.work for entry in flight.entries]
        flight.batch.copies[:0] = [copy for copies, _ in core.pending for copy in copies]
        flight.copies = len(core.pending)
        pages: list[int] = []
        for entry in flight.entries:
            if entry.held is not None:
                pages += _pages(entry.held.write, core.pool.page_size)
        core.pool.pin(pages)
        flight.pinned = pages
        if getattr(core.backend, "debug", False):
            begun = [h.segment for e in flight.entries for h in e.reservations() if h.created]
            flight.batch.standing = standing_rows(core.pool, core.trees.values(), begun)

    def _board_or_end(self, flight: Flight, task: Task, tokens: int) -> None:
        """`_board`; what goes wrong with one task ends that task alone."""
        try:
            self._board(flight, task, tokens)
        except Exception as error:
            failure = BackendError(f"node {task.node} of session '{task.session}': {error!r}")
            failure.__cause__ = error
            self.core.finish(task, failure)

    def _board(self, flight: Flight, task: Task, tokens: int) -> None:
        """Add one task's next rows to the batch, or finish, park or drop the task."""
        core, tree, target = self.core, task.tree, task.target
        if core.window:
            if not self._within(flight, task):
                return
            tokens = self._room(task, tokens)
        parts = missing(target, task.end())
        handle = task.generation_handle
        held: Reservation | None = None
        if parts:
            owner, begin, end = parts[0]
            stop = fence(owner, begin)
            count = min(tokens, end - begin, (stop or end) - begin)
        elif task.probing:
            self._board_probe(flight, task, tokens)
            return
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
        more: list[Reservation] = []
        if held is not None and len(parts) > 1:
            more = self._prolong(flight, task, parts, held, tokens)
        bottom, end = owner, begin + count
        for below in more:
            bottom, end = below.node, end + below.count
        whole = bottom is target and end == target.length
        last = whole and handle is not None and not task.probing  # first what was asked first
        try:
            work = Work(
                session=task.session,
                node=bottom.id,
                tokens=tree.tokens(bottom, begin, end),
                start=begin,
                context=spans(tree, owner, begin),
                write=held.write if held is not None else None,
                sample=self._sample_spec(task) if last else None,
                speculative=task.kind is JobClass.SPEC,
            )
        except BaseException:
            for one in [*reversed(more), *([held] if held is not None else [])]:
                rollback(tree, one)
            raise
        if held is not None and held.copies:
            flight.batch.copies.extend(held.copies)
            core.count.copied_rows += sum(copy.rows for copy in held.copies)
        flight.owners.add(owner)
        flight.owners.update([below.node for below in more])
        flight.entries.append(Entry(task, owner, end - begin, held, work, more=more))

    def _within(self, flight: Flight, task: Task) -> bool:
        """Have the rows that the task reads, or those it can begin with; False if it can't run now.

        Speculation takes no rows from anybody: it ends where it would have to start over.
        """
        core, tree = self.core, task.tree
        if readable(core, task):
            return True
        if task.kind is JobClass.SPEC:
            core.count.refusals["window"] += 1
            core.finish(task)
            return False
        if any(entry.task.tree is tree for entry in flight.entries):
            core.lost.add(task)  # this batch still reads its rows
            return False
        regain(core, task)
        return not task.done

    def _room(self, task: Task, tokens: int) -> int:
        """Rows of a path longer than the pool come bit by bit: old ones go between passes."""
        pool = self.core.pool
        if pool.pages_for(task.end()) <= pool.capacity:
            return tokens
        kept = pool.pages_for(self.core.window) + 2  # its ends are no whole pages
        return min(tokens, max((pool.capacity - kept) * pool.page_size, 1))

    def _prolong(
        self,
        flight: Flight,
        task: Task,
        parts: Sequence[tuple[Node, int, int]],
        held: Reservation,
        tokens: int,
    ) -> list[Reservation]:
        """Rows of committed nodes below the first one, while they fit the same pass."""
        more: list[Reservation] = []
        left, last = tokens - held.count, held
        if task.kind is JobClass.SPEC or parts[0][2] != held.begin + held.count:
            return more
        for node, begin, end in parts[1:]:
            if left < 1 or node in flight.owners or not goes_on(last, node, begin):
                break
            stop = fence(node, begin) or end
            count = min(left, end - begin, stop - begin)
            below = prolong(task.tree, held, last, node, count)
            if below is None:
                break
            more.append(below)
            left, last = left - count, below
            if begin + count != end:
                break
        return more

    def _board_probe(self, flight: Flight, task: Task, tokens: int) -> None:
        """The next texts of a probe: works that write nothing, at least one if nobody is aboard.

        Beside others a text that is longer than its share of a tick waits until that has saved up.
        """
        probe, target, tree = task.probe, task.target, task.tree
        assert probe is not None
        probe.saved += tokens
        begin = probe.at - 1  # a generation that goes on behind it makes no difference
        last = tree.tokens(target, begin, probe.at).tolist()
        for number in probe.pending():
            run = [*last, *probe.texts[number]]
            if flight.entries and len(run) > probe.saved:
                return
            context = spans(tree, target, begin)
            work = Work(task.session, target.id, run, begin, context, None, logits=True)
            flight.entries.append(Entry(task, target, len(run), None, work, number))
            probe.saved = max(probe.saved - len(run), 0)

    def _sample_spec(self, task: Task) -> SampleSpec:
        handle = task.generation_handle
        assert handle is not None
        seen, counts = handle.counts.arrays() if handle.counts is not None else (None, None)
        return SampleSpec(
            params=handle.params,
            seed=handle.seed,
            position=task.target.length,
            request=handle.number,
            step=len(handle.tokens),
            allowed=handle.allowed,
            seen=seen,
            counts=counts,
        )

    # ---------------------------------------------------------------- pages

    def _reserve(
        self, flight: Flight, task: Task, owner: Node, begin: int, count: int
    ) -> Reservation | None:
        """Rows for a work.  Speculation takes free or cached pages, committed work makes room."""
        core = self.core
        try:
            return reserve(task.tree, owner, begin, count)
        except OutOfPages as error:
            needed = error.needed  # not the error: it would keep the frames of whoever waits
        rows = min(task.end(), core.window) if core.window else task.end()  # those that must stay
        least, capacity = core.pool.pages_for(rows), core.pool.capacity
        if least > capacity:  # it can never fit: nobody is to lose rows for it
            core.finish(task, OutOfPages(least, capacity, capacity, _TOO_LONG))
            return None
        if task.kind is JobClass.SPEC:
            core.index.reclaim(needed - core.pool.free_pages)
            if core.pool.free_pages >= needed:
                return reserve(task.tree, owner, begin, count)
            core.count.refusals["pages"] += 1
            core.finish(task)
            return None
        lent = core.lent()  # what only waits to be read comes back at once
        if core.make_room(needed, lambda: self._preempt_younger(flight, task)):
            return reserve(task.tree, owner, begin, count)
        if lent:
            core.short = True  # the rest in a moment
        elif core.pending:
            return None  # pages that are copied first are free after this batch
        elif not task.privileged and len(self._committed()) > 1:
            self._park(task)  # others hold the pages: they will end
        elif any(entry.task.tree is task.tree for entry in flight.entries):
            return None  # this batch reads the rows that could move
        elif core.window and give_back(task.tree, core.window, {task.target}, others=False):
            return self._reserve(flight, task, owner, begin, count)
        elif not task.compact:
            self._compact(task)
        else:
            core.finish(task, OutOfPages(needed, core.pool.free_pages, capacity))
        return None

    def _compact(self, task: Task) -> None:
        """Start a path over: what branches that are gone left behind may fit in fewer pages."""
        core, task.compact = self.core, True
        for node in path_rows(task.target):
            core.drop_rows(task.tree, node)
        core.requeue(task)

    def _committed(self) -> list[Task]:
        return [t for t in self.core.tasks.values() if t.kind is not JobClass.SPEC]

    def _park(self, task: Task) -> None:
        """Let the task wait; its rows are there to be taken by those that go on."""
        task.held = task.parked = True
        self.core.parked.append(task)
        self.core.count.preemptions += 1

    def _rescue(self, flight: Flight) -> None:
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
            core.requeue(task)  # some of its rows may have gone
        task.privileged = True
        decodes = task.kind is JobClass.DECODE
        chunk = min(core.config.prefill_chunk, core.scheduler.recovery.room)
        self._board(flight, task, 1 if decodes else chunk)

    def _preempt_younger(self, flight: Flight, task: Task) -> bool:
        """Stop the youngest work that started after `task`, is not aboard, and has rows to give."""
        mine, writing = path_rows(task.target), self.core.writing
        aboard = {entry.task for entry in flight.entries}  # this batch reads their rows
        younger = [
            t
            for t in self._committed()
            if t.serial > task.serial
            and not (t.parked or t in aboard)
            and any(
                n.segments and n not in writing and n.kv_end > max(mine.get(n, 0), resting(n))
                for n in path_rows(t.target)
            )
        ]
        if not younger:
            return False
        self._park(max(younger, key=lambda t: t.serial))
        return True

    def _force_preempt(self) -> None:
        """Test aid of the mock: pre-empt a running generation every n-th pass."""
        core = self.core
        every = getattr(core.backend, "force_preempt_every", 0)
        if not every or core.count.forward_passes % every != every - 1:
            return
        for task in self._committed():
            if task.kind is JobClass.DECODE and task.target.segments and not resting(task.target):
                core.count.preemptions += 1
                core.drop_rows(task.tree, task.target)
                core.requeue(task)
                return
