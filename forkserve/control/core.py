"""The engine's state under one lock, and the small operations the verbs are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from forkserve.control.experience import Experience
from forkserve.control.fairness import FairMeter
from forkserve.control.generation import Generation
from forkserve.control.journal import Journal, NullJournal
from forkserve.control.planner import Planner, PoolView
from forkserve.control.pressure import make_room
from forkserve.control.probe import Probe
from forkserve.control.scheduler import Scheduler
from forkserve.control.stats import Counters, EngineStats, PrefilledTokens
from forkserve.control.task import Task
from forkserve.errors import SessionError
from forkserve.tree.eviction import path_rows, resting, shed
from forkserve.tree.index import PrefixIndex
from forkserve.tree.invariants import standing_rows
from forkserve.tree.node import MAIN_LINE, Node
from forkserve.tree.pool import PagePool
from forkserve.tree.rows import release
from forkserve.tree.spine import publish
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass, NodeMode, RowCopy

if TYPE_CHECKING:
    from forkserve.engine.protocol import Backend

__all__ = ["Core"]

_MOMENT_S = 0.005  # after a pass, within which another is likely to follow


class Core:
    """Pool, trees, queues and counters.  Every method expects the lock to be held."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.config = backend.config
        self.clock = backend.clock
        # Rows that any layer of the model sees, if each has a window; 0: all of them.
        self.window = int(backend.info.extra.get("window") or 0)
        self.lost: set[Task] = set()  # need rows that were given back
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.pool = PagePool(
            self.config.capacity_pages,
            self.config.page_size,
            shuffle=self.config.seed if self.config.shuffle_pages else None,
            on_free=backend.discard,
        )
        self.index = PrefixIndex(self.pool)
        self.trees: dict[str, ContextTree] = {}
        self.closing: set[str] = set()  # sessions that only a store still looks at
        self.experience: dict[str, Experience] = {}
        self.meter = FairMeter(self.config)
        self.scheduler = Scheduler(self.config, self.meter)
        self.planner = Planner(self.config, backend.predict_ms)
        self.count = Counters()
        self.journal: Journal = NullJournal()
        # Asks a store for the pages that it holds for reading; True while it still holds some.
        self.lent: Callable[[], bool] = lambda: False
        self.short = False  # work waits for such pages
        self.tasks: dict[tuple[str, int], Task] = {}
        self.parked: list[Task] = []  # committed tasks that wait for pages of older ones
        self.waiting = 0  # verbs that wait for the batch in flight: they go before the next one
        self.flying = False  # a batch runs
        self.landed_s = -inf  # when the last one ended, on the real clock
        self.driver: int | None = None  # thread that runs a tick
        self.in_flight: set[str] = set()  # sessions with a work in the running batch
        self.writing: Collection[Node] = ()  # nodes whose rows the running batch writes
        self.pending: list[tuple[list[RowCopy], list[int]]] = []  # copies to run, pages pinned
        self._serial = 0
        self.speculated = 0  # tokens of speculation run so far
        self.finished = 0  # tasks that ended so far
        self.due_ms = inf  # no armed time to live ends before this

    # ---------------------------------------------------------------- look-up

    def inside(self) -> None:
        """Raise SessionError in a callback of the engine itself: waiting there would never end."""
        if self.driver == threading.get_ident():
            raise SessionError(
                "called from inside an engine step (a constraint, a callback): it cannot wait for "
                "the engine; call it from outside"
            )

    def passing(self) -> bool:
        """Passes run: one does now, or did a moment ago.  The lock need not be held."""
        return self.flying or time.monotonic() - self.landed_s < _MOMENT_S

    def owned(self) -> bool:
        """True if this very thread holds the lock already."""
        try:
            self.changed.notify(0)  # wakes nobody, and raises unless this thread holds the lock
        except RuntimeError:
            return False
        return True

    def tree(self, session: str) -> ContextTree:
        """The tree of an open session, or a SessionError."""
        tree = self.trees.get(session) if isinstance(session, str) else None
        if tree is None or session in self.closing:
            raise SessionError(f"no open session '{session}': it was never opened, or was closed")
        return tree

    def pool_view(self) -> PoolView:
        """The pool as the planner sees it: pages that are merely cached count as free."""
        reload_ms = self.backend.predict_ms(self.config.page_size, 0)
        free = self.pool.free_pages + self.pool.index_only
        return PoolView(free, self.pool.capacity, reload_ms)

    # ---------------------------------------------------------------- tasks

    def submit(self, task: Task) -> None:
        """Queue a task; raises AdmissionRefused when the queue is full."""
        task.refresh()
        self.scheduler.submit(task)
        self.tasks[task.session, task.node] = task
        self.changed.notify_all()

    def requeue(self, task: Task) -> None:
        """Queue a task again after its rows or its class changed; if none is left it ends."""
        self.scheduler.remove(task)
        task.refresh()
        if task.remaining:
            self.scheduler.submit(task, again=True)
        else:  # another path has computed what it speculated on
            self.finish(task)

    def finish(self, task: Task, error: BaseException | None = None) -> None:
        """Take a task out, with the error that ended it if any."""
        if task.done:
            return
        task.done, task.error = True, error
        self.lost.discard(task)
        self.finished += 1
        self.scheduler.remove(task)
        if self.tasks.get((task.session, task.node)) is task:
            del self.tasks[task.session, task.node]
        if task.kind is JobClass.SPEC:
            self.planner.ledger.release(task.session, task.node)
        handle = task.generation_handle
        if handle is not None and not handle.done:
            handle.end("error" if error else "cancelled", error)
        if self.parked and any(other.privileged for other in self.tasks.values()):
            waited = []  # they would take its rows, again and again
        else:
            waited, self.parked = self.parked, []
        for parked in waited:
            parked.parked = parked.held = False
            if not parked.done:
                self.requeue(parked)  # some of its rows may have gone
        self.changed.notify_all()

    def release(self, task: Task) -> None:
        """The task's generation has ended: so has the task, unless the model is asked here too."""
        if task.probing and not task.done:
            task.generation_handle = None
            self.requeue(task)
            self.changed.notify_all()
        else:
            self.finish(task)

    def sweep(self) -> None:
        """Cancel generations whose iterator was dropped while the engine was busy."""
        for task in list(self.tasks.values()):
            handle = task.generation_handle
            if handle is not None and handle.abandoned:
                handle.end("cancelled")
                self.release(task)

    def ensure(
        self,
        tree: ContextTree,
        node: Node,
        handle: Generation | None = None,
        probe: Probe | None = None,
    ) -> Task:
        """The committed task that completes a node's rows, with a handle or a probe attached."""
        task = self.tasks.get((tree.session, node.id))
        if task is not None and task.kind is JobClass.SPEC:
            self.finish(task)
            task = None
        if task is None:
            task = self.new_task(tree, node, JobClass.TAIL if node.parent else JobClass.ROOT)
            task.generation_handle, task.probe = handle, probe
            self.submit(task)
        elif handle is not None or probe is not None:
            task.generation_handle = handle or task.generation_handle
            task.probe = probe or task.probe
            task.held, task.wake_ms = task.parked, 0.0
            try:
                self.requeue(task)
            except BaseException as error:  # nobody would ever run it
                self.finish(task, error)
                raise
            self.changed.notify_all()
        return task

    def probing(self, session: str, node: int) -> bool:
        """The model is being asked at this node."""
        task = self.tasks.get((session, node))
        return task is not None and task.probing

    def new_task(self, tree: ContextTree, node: Node, kind: JobClass) -> Task:
        """A task of this moment, not queued yet."""
        self._serial += 1
        return Task(
            serial=self._serial,
            session=tree.session,
            node=node.id,
            tenant=tree.tenant,
            kind=kind,
            remaining=1,
            parent=node.parent.id if node.parent is not None else None,
            generation=node.parent.generation if node.parent is not None else 0,
            submitted_ms=self.clock.now_ms(),
            chunk=self.config.c_spec,
            tree=tree,
            target=node,
        )

    # ---------------------------------------------------------------- nodes

    def abort(self, tree: ContextTree, node: Node, *, lazy: bool) -> int:
        """Kill a subtree; returns the pages that became free (0 when lazy)."""
        gone = tree.detach(node)
        for dead in gone:
            self.forget(tree, dead)
            self.count.aborts += 1
            self.count.wasted += dead.speculated
        if lazy:
            tree.dead.extend(reversed(gone))
            return 0
        return sum(release(tree, dead) for dead in reversed(gone))

    def forget(self, tree: ContextTree, node: Node) -> None:
        """Drop what the queues and timers know about a node."""
        task = self.tasks.get((tree.session, node.id))
        if task is not None:
            self.finish(task)

    def drain(self) -> int:
        """Give back the pages of lazily aborted branches; returns how many became free."""
        freed = 0
        for tree in self.trees.values():
            for node in tree.dead:
                freed += release(tree, node)
            tree.dead.clear()
        return freed

    def make_room(
        self,
        wanted: int,
        preempt: Callable[[], bool] = lambda: False,
        keep: Mapping[Node, int] = MappingProxyType({}),
    ) -> bool:
        """Free pages for committed work; see `forkserve.control.pressure`."""
        return make_room(self, wanted, preempt, keep)

    def drop_rows(self, tree: ContextTree, node: Node, reason: str = "preempted") -> None:
        """Evict a node's KV as far as no rows below rest on it; its tokens stay."""
        self.shed(tree, node, resting(node), None, reason)

    def shed(
        self, tree: ContextTree, node: Node, keep: int, wanted: int | None, reason: str = "pages"
    ) -> None:
        """Drop rows from the end of a node (`forkserve.tree.eviction.shed`), and note what went."""
        if node.parent is None:
            tree.reached = max(tree.reached, node.kv_end)
        rows = shed(tree, node, keep, wanted)
        if rows:
            self.count.evicted_nodes += 1
            self.journal.evicted(tree, node, rows, reason)
        lost = min(rows, node.speculated)
        self.count.wasted += lost
        node.speculated -= lost
        # Speculation that would have to begin with these rows has lost its place.
        for task in [t for t in self.tasks.values() if rows and t.tree is tree]:
            spec = task.kind is JobClass.SPEC
            if spec and path_rows(task.target).get(node, 0) > node.kv_end:
                self.count.refusals["pages"] += 1
                self.finish(task)

    def publish(self, tree: ContextTree, node: Node) -> None:
        """Enter what is new and full on the committed main line into the prefix index."""
        fresh = node.kv_end // self.config.page_size > node.published
        spine = node.line == MAIN_LINE and node.mode is NodeMode.COMMIT
        if fresh and spine and self.config.prefix_index:
            publish(tree, self.index, node)

    def copy_later(self, copies: list[RowCopy]) -> None:
        """Run copies at the start of the next batch; their source pages are pinned until then."""
        pages = sorted({copy.src_page for copy in copies})
        self.pool.pin(pages)
        self.pending.append((copies, pages))
        self.count.copied_rows += sum(copy.rows for copy in copies)

    def drop_copies(self) -> None:
        """Forget copies into pages that nobody holds any more, and let their sources go."""
        if self.flying:
            return  # they are running
        kept = []
        for copies, pages in self.pending:
            if any(self.pool.refs[copy.dst_page] for copy in copies):
                kept.append((copies, pages))
            else:
                self.pool.unpin(pages)
        self.pending = kept

    # ---------------------------------------------------------------- time to live

    def arm(self, node: Node, deadline_ms: float) -> None:
        """Drop the node's KV at `deadline_ms` unless it is committed or armed again before."""
        node.ttl_deadline_ms = deadline_ms
        self.due_ms = min(self.due_ms, deadline_ms)

    def expire(self, now_ms: float) -> int:
        """Drop the KV of residuals whose time is over, leaves first; returns how many nodes.

        What rows below rest on stays until they go.
        """
        if now_ms < self.due_ms:
            return 0
        expired, due_ms = 0, inf
        for tree in self.trees.values():
            for node in sorted(tree, key=lambda n: -n.id):  # a child's id is above its parent's
                due = node.ttl_deadline_ms
                if due is None or node.mode is NodeMode.COMMIT:
                    continue
                if due <= now_ms:
                    self.drop_rows(tree, node, "expired")
                    if not node.segments:
                        node.ttl_deadline_ms = None
                        expired += 1
                        continue
                due_ms = min(due_ms, max(due, now_ms + 1.0))
        self.due_ms = due_ms
        self.count.expired_nodes += expired
        return expired

    # ---------------------------------------------------------------- numbers

    def stats(self) -> EngineStats:
        """A snapshot of pages, rows and counters."""
        pool, count = self.pool, self.count
        speculative = {
            page
            for tree in self.trees.values()
            for node in tree
            if node.mode is NodeMode.SPEC
            for segment in node.segments
            for page in segment.pages
        }
        return EngineStats(
            live_pages=pool.live_pages,
            shared_pages=pool.capacity - pool.refs.count(0) - pool.refs.count(1),
            speculative_pages=len(speculative),
            index_pages=pool.index_only,
            free_pages=pool.free_pages,
            capacity_pages=pool.capacity,
            live_rows=sum(standing_rows(pool, self.trees.values()).values()),
            sessions=len(self.trees),
            nodes=sum(len(tree.nodes) for tree in self.trees.values()),
            queued=len(self.scheduler),
            prefilled_tokens=PrefilledTokens(count.committed, count.speculative, count.wasted),
            cached_tokens=count.cached_tokens,
            forks=count.forks,
            speculates=count.speculates,
            commits=count.commits,
            joins=count.joins,
            aborts=count.aborts,
            hits={hit.value: n for hit, n in count.hits.items()},
            refusals=dict(count.refusals),
            decode_steps=count.decode_steps,
            forced_tokens=count.forced_tokens,
            forward_passes=count.forward_passes,
            failed_passes=count.failed_passes,
            copied_rows=count.copied_rows,
            evicted_nodes=count.evicted_nodes,
            preemptions=count.preemptions,
            expired_nodes=count.expired_nodes,
            tbt_misses=count.tbt_misses,
        )

    def begin_close(self, tree: ContextTree) -> None:
        """From here on a session stays as it is; who waits on it gets a SessionError."""
        self.closing.add(tree.session)
        for node in list(tree):
            task = self.tasks.get((tree.session, node.id))
            if task is not None:
                self.finish(task, SessionError(f"session '{tree.session}' was closed meanwhile"))

    def close_tree(self, tree: ContextTree) -> None:
        """Release everything a session holds."""
        self.begin_close(tree)
        for node in [*tree, *tree.dead]:
            release(tree, node)
            node.mode = NodeMode.DEAD
        tree.nodes.clear()
        tree.dead.clear()
        self.journal.closed(tree.session)
        self.drop_copies()
        del self.trees[tree.session], self.experience[tree.session]
        self.closing.discard(tree.session)
        self.planner.ledger.release_session(tree.session)
        if not any(other.tenant == tree.tenant for other in self.trees.values()):
            self.meter.close(tree.tenant)
