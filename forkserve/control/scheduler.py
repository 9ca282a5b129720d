"""What runs in the next tick: committed work first, speculation in what it leaves.

Committed: every generation gets one token, then commit tails, then root prefills.  Each is sure of
its rate, B^c = min(B_t, sum max(s_r * delta, 1)) in all, and what is left of the token budget goes
to committed prefill in order before speculation sees any of it.  Speculative chunks run only in a
tick that finishes all committed prefill, within the token budget and the predicted step time, so a
commit that arrives waits for one chunk at most.

Everything is keyed by (session, node): node ids restart in every session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import ceil, inf

from forkserve.config import ForkServeConfig
from forkserve.control.costs import least_chunk
from forkserve.control.fairness import FairMeter
from forkserve.control.jobs import Job, TickPlan, one_for_each_page
from forkserve.control.recovery import Recovery
from forkserve.errors import AdmissionRefused, ConfigError
from forkserve.types import JobClass

__all__ = ["Job", "Scheduler", "TickPlan"]

PredictMs = Callable[[int, int], float]

_PREFILL = (JobClass.TAIL, JobClass.ROOT)  # of committed work


@dataclass(slots=True)
class _Program:
    """A session's current stretch of committed work.

    arrived_ms: when it began.  service: ticks of service since then.  jobs: committed jobs queued.
    """

    arrived_ms: float
    service: float = 0.0
    jobs: int = 0


class Scheduler:
    """Two-class continuous batching.  Not thread-safe: the engine loop owns it."""

    def __init__(self, config: ForkServeConfig, meter: FairMeter) -> None:
        self.config = config
        self.meter = meter
        self._order: dict[Job, int] = {}  # every queued job, and its place in line
        self._placed = 0
        self._spec: set[Job] = set()  # those that came as speculation
        self._real: set[Job] = set()  # the others
        self._shapes: Counter[tuple[int, int]] | None = None  # of speculation, while none changes
        self._nodes: dict[str, dict[int, list[Job]]] = {}  # session -> node -> jobs in line
        self._programs: dict[str, _Program] = {}
        self._decoded_ms: dict[str, float] = {}  # session -> time of its last token
        self.recovery = Recovery(config.max_batch_tokens)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, job: Job) -> bool:
        return job in self._order

    @property
    def decoding(self) -> bool:
        """A generation is queued or running."""
        return any(job.kind is JobClass.DECODE for job in self._real)

    def backlog(self, session: str, without: Collection[int]) -> Counter[tuple[int, int]]:
        """How many queued SPEC jobs there are of each (remaining, context).

        Those at the nodes `without` of a session are left out.  Kept from call to call, as siblings
        are mostly of one shape.
        """
        if self._shapes is None:
            self._shapes = Counter((job.remaining, job.context) for job in self._spec)
        shapes = self._shapes.copy()
        for node in without:
            for job in self._nodes.get(session, {}).get(node, ()):
                if job in self._spec:
                    shapes[job.remaining, job.context] -= 1
        return +shapes

    def jobs(self, kind: JobClass | None = None) -> list[Job]:
        """Queued jobs in order of arrival, of one class or of all."""
        return [job for job in self._order if kind is None or job.kind is kind]

    def decode_share(self, now_ms: float, session: str) -> float:
        """Chance that a session other than this one decodes soon, in [0, 1].

        1 if one has just produced a token; falls to 0 in a line over `aging_ms`.
        """
        horizon = self.config.aging_ms
        for name in [s for s, t in self._decoded_ms.items() if now_ms - t >= horizon]:
            del self._decoded_ms[name]
        others = [t for s, t in self._decoded_ms.items() if s != session]
        if not others:
            return 0.0
        return max(0.0, min(1.0, 1.0 - (now_ms - max(others)) / horizon))

    # -- the queue -------------------------------------------------------------------------

    def submit(self, job: Job, *, again: bool = False) -> None:
        """Queue a job.  Raises AdmissionRefused("queue_full"), but not `again` for one that was in.

        Both classes have `max_queue` places, and speculation gets none while the two together use
        as many: a queue full of speculation never turns committed work away.
        """
        spec = job.kind is JobClass.SPEC
        if job.remaining < 1 or (spec and job.chunk < 1) or job in self._order:
            raise ConfigError(
                f"job at node {job.node} of session {job.session!r} with {job.remaining} tokens in "
                f"chunks of {job.chunk} is empty or already queued"
            )
        waiting = len(self) if spec else len(self) - len(self._spec)
        if waiting >= self.config.max_queue and not again:
            raise AdmissionRefused(
                "queue_full",
                f"{waiting} jobs wait already; finish or cancel some, or raise max_queue",
            )
        self._placed += 1
        self._order[job] = self._placed
        self._nodes.setdefault(job.session, {}).setdefault(job.node, []).append(job)
        if spec:
            self._spec.add(job)
            if self._shapes is not None:
                self._shapes[job.remaining, job.context] += 1
        else:
            self._real.add(job)
            self.meter.arrive(job.tenant)
            program = self._programs.setdefault(job.session, _Program(job.submitted_ms))
            program.jobs += 1

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it was not queued (any more)."""
        if self._order.pop(job, None) is None:
            return False
        nodes = self._nodes[job.session]
        nodes[job.node].remove(job)
        if not nodes[job.node]:
            del nodes[job.node]
            if not nodes:
                del self._nodes[job.session]
        if job in self._spec:
            self._spec.remove(job)
            self._shapes = None
        else:
            self._real.remove(job)
            self.meter.leave(job.tenant)
            program = self._programs[job.session]
            program.jobs -= 1
            if not program.jobs:
                del self._programs[job.session]
        return True

    def cancel_node(self, session: str, node: int) -> list[Job]:
        """Take out every job of a node."""
        return self._cancel(list(self._nodes.get(session, {}).get(node, ())))

    def cancel_session(self, session: str) -> list[Job]:
        """Take out every job of a session, and forget it."""
        self._decoded_ms.pop(session, None)
        return self._cancel(list(self._of_session(session)))

    def invalidate(self, session: str, parent: int, generation: int) -> list[Job]:
        """Take out speculation under `parent` that was admitted for another generation of it."""
        stale = [
            job
            for job in self._of_session(session)
            if job in self._spec and job.parent == parent and job.generation != generation
        ]
        return self._cancel(stale)

    def ran(self, job: Job, tokens: int, now_ms: float) -> None:
        """`tokens` of a job were executed: bill them, advance it, let it leave when it is done.

        Call it before `remaining` is recounted or the class changed.
        A job that was cancelled while it ran is billed all the same.
        """
        if not 0 <= tokens <= job.remaining:
            raise ConfigError(f"a job with {job.remaining} tokens left cannot have run {tokens}")
        self.meter.serve(job.tenant, job.kind, tokens)
        self._shapes = None
        job.remaining -= tokens
        job.attained += tokens
        job.context += tokens
        if job not in self._order:
            return
        if job.kind is JobClass.DECODE:
            self._decoded_ms[job.session] = now_ms
        if job not in self._spec:
            most = 1 if job.kind is JobClass.DECODE else self.config.prefill_chunk
            self._programs[job.session].service += tokens / most
        if not job.remaining:
            self.remove(job)

    # -- a tick ----------------------------------------------------------------------------

    def plan(self, now_ms: float, predict_ms: PredictMs) -> TickPlan:
        """Grants of the next tick.  Drops SPEC jobs whose deadline has passed, changes no other.

        predict_ms(tokens, context): predicted ms of a step of `tokens` rows whose mean context
        (weighted by rows) is `context` rows.
        """
        self.meter.tick()
        late = [
            job
            for job in self._spec
            if job.deadline_ms is not None and now_ms >= job.deadline_ms and not job.held
        ]
        late.sort(key=self._order.__getitem__)
        dropped = [(job, "deadline") for job in self._cancel(late)]
        committed, spec = self._ready()
        if (alone := self.recovery.alone(committed)) is not None:
            committed, spec = [alone], []
        grants, budget = self._committed_grants(committed, now_ms)
        tick = _Tick(predict_ms, list(grants.items()))
        works = self.config.max_batch_works - len(grants)
        unfinished = any(
            job.remaining > grants.get(job, 0) for job in self._real if job.kind in _PREFILL
        )
        committed_tokens = tick.tokens
        saturated = unfinished or not self._speculate(spec, tick, budget, works)
        return TickPlan(
            tick.items, committed_tokens, tick.tokens - committed_tokens, saturated, dropped
        )

    def _ready(self) -> tuple[list[Job], list[Job]]:
        """Committed and speculative jobs that may run now: at most one per node, the first in line.

        A job waits for the prefill of its own node and of its parent, whose rows it reads (of
        further ancestors too, if each one between has a job), unless that waits itself.
        Committed work never waits for speculation: whoever commits a node cancels or takes over
        the speculation that is queued there.
        """
        committed: list[Job] = []
        spec: list[Job] = []
        for nodes in self._nodes.values():
            for queue in nodes.values():
                # The first committed one, else the first.
                job = queue[0] if len(queue) == 1 else min(queue, key=_is_spec)
                if job.held:
                    continue
                above = nodes.get(job.parent, ()) if job.parent is not None else ()
                if job.kind is JobClass.SPEC:
                    if not above or all(j.kind is JobClass.DECODE for j in above):
                        spec.append(job)
                elif not above or not any(j.kind in _PREFILL and not j.held for j in above):
                    committed.append(job)
        return committed, spec

    def _committed_grants(self, jobs: list[Job], now_ms: float) -> tuple[dict[Job, int], int]:
        """Tokens per committed job, and what is left of the budget.

        By class, then the tenant with the least service, then program-FCFS: a program's place in
        line falls back by `aging_ms` with each tick of service it gets, so the one behind it
        overtakes after a bounded number of them.  One that has waited `aging_ms` for service counts
        as the class above, and so on: a stream of tails, or more generations than a tick has room
        for, could keep it waiting for ever.
        """
        aging_ms, chunk = self.config.aging_ms, self.config.prefill_chunk
        counters = {tenant: self.meter.counter(tenant) for tenant in {j.tenant for j in jobs}}
        places: dict[Job, tuple[int, float, float, float, int]] = {}
        for job in jobs:
            program = self._programs[job.session]
            due_ms = program.arrived_ms
            if program.service:  # aging_ms may be infinite: first come, first served
                due_ms += aging_ms * program.service
            rank: int = JobClass.DECODE
            if job.kind is not JobClass.DECODE:
                rank = job.kind - int(min(job.kind, max(now_ms - due_ms, 0.0) / aging_ms))
            places[job] = rank, counters[job.tenant], due_ms, job.attained, self._order[job]

        def urgent(job: Job) -> int:
            return int(places[job][0] == JobClass.DECODE)

        def most(_: Job) -> int:
            return chunk

        jobs = one_for_each_page(sorted(jobs, key=places.__getitem__))
        jobs = jobs[: self.config.max_batch_works]
        budget = self.recovery.room
        grants = dict.fromkeys(jobs, 0)
        for share in (urgent, self._rate_tokens, most):
            for job in jobs:
                more = max(0, min(min(share(job), job.remaining) - grants[job], budget))
                grants[job] += more
                budget -= more
            # After the first round a generation has all it gets.
            jobs = [job for job in jobs if job.kind is not JobClass.DECODE]
        return {job: tokens for job, tokens in grants.items() if tokens}, budget

    def _rate_tokens(self, job: Job) -> int:
        """Tokens per tick that keep a prefill within its SLO, at least 1 [max(s_r * delta, 1)].

        s_r is what is left per TTFT SLO.  (Of a generation it is one token per TBT SLO, but a pass
        gives it exactly one.)
        """
        config = self.config
        rate = job.remaining * config.tick_ms / config.ttft_slo_ms
        return max(1, ceil(min(config.prefill_chunk, rate)))  # before rounding: it may be infinite

    def _speculate(self, jobs: list[Job], tick: _Tick, budget: int, works: int) -> bool:
        """Add speculative chunks to the tick; False if there was no room for any."""
        config = self.config
        limit = config.gamma_ms if self.decoding else config.ttft_slo_ms / 2
        alone = not tick.items
        if budget < 1 or works < 1 or (tick.tokens and tick.ms() >= limit):
            return False
        counters = {tenant: self.meter.counter(tenant) for tenant in {j.tenant for j in jobs}}

        def place(job: Job) -> tuple[float, int, float, int]:
            density = job.gain / job.cost if job.cost > 0 else inf
            return counters[job.tenant], job.work, -density, self._order[job]

        before = len(tick.items)
        for job in sorted(jobs, key=place):
            if budget < 1 or works < 1:
                break
            want = min(job.chunk, job.remaining, budget)
            fit = self._fit(job, want, tick, limit)
            if fit < want and alone and len(tick.items) == before:
                # A machine too slow for the SLO must still get on when nothing else runs.
                fit = max(fit, min(want, self._least(job, tick)))
            if fit:
                tick.add(job, fit)
                budget -= fit
                works -= 1
            if fit < want:
                break  # the step is full: the next in line must not jump the queue
        return len(tick.items) > before or not jobs

    def _fit(self, job: Job, want: int, tick: _Tick, limit: float) -> int:
        """Tokens of a chunk that keep the step within `limit` ms: all, or whole pages."""
        if tick.ms(job, want) <= limit:
            return want
        size = self.config.page_size
        low, high = 0, (want - 1) // size
        while low < high:
            pages = (low + high + 1) // 2
            if tick.ms(job, pages * size) <= limit:
                low = pages
            else:
                high = pages - 1
        return low * size

    def _least(self, job: Job, tick: _Tick) -> int:
        """Tokens of a speculative chunk that runs alone, at least."""
        size = self.config.page_size
        most = self.config.c_spec // size
        if self.decoding:
            return size
        slo_ms = self.config.ttft_slo_ms
        return size * least_chunk(tick.predict_ms, size, most, job.context, slo_ms)

    def _of_session(self, session: str) -> Iterator[Job]:
        for queue in self._nodes.get(session, {}).values():
            yield from queue

    def _cancel(self, jobs: list[Job]) -> list[Job]:
        for job in jobs:
            self.remove(job)
        return jobs


class _Tick:
    """A step being put together: its items, tokens and mean context."""

    def __init__(self, predict_ms: PredictMs, items: list[tuple[Job, int]]) -> None:
        self.predict_ms = predict_ms
        self.items = items
        self.tokens = self._rows = 0  # rows: sum of contexts
        for job, tokens in items:
            self.tokens += tokens
            self._rows += tokens * job.context

    def ms(self, job: Job | None = None, tokens: int = 0) -> float:
        """Predicted ms of the step, with `tokens` of one more job."""
        total = self.tokens + tokens
        rows = self._rows + (tokens * job.context if job else 0)
        return self.predict_ms(total, rows // total)

    def add(self, job: Job, tokens: int) -> None:
        self.items.append((job, tokens))
        self.tokens += tokens
        self._rows += tokens * job.context


def _is_spec(job: Job) -> bool:
    return job.kind is JobClass.SPEC
