"""What the scheduler schedules: tokens at a node, and the grants of one tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkserve.types import JobClass, WorkKind

__all__ = ["Job", "TickPlan", "one_for_each_page"]


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Tokens to run at a node, in order.  `ran` moves `remaining`, `attained` and `context` on.

    The owner may recount `remaining` and turn one committed class into another while the job is
    queued (a tail whose rows are complete becomes a generation), but never SPEC.

    remaining: tokens left; of a DECODE, tokens still to generate.  parent, generation: for SPEC,
    the node whose commit makes it stale, and that node's generation when it was admitted.
    gain, cost: G and C in ms.  chunk: tokens of one speculative chunk, at most.  deadline_ms: when
    a SPEC job is of no use any more.  attained: tokens served.  held: in flight or waiting for
    pages, skip it.  context: rows before the next token.  work: certainty of a SPEC job.
    page: name of the page it computes next, if others may want the same one; one job a tick does.
    """

    session: str
    node: int
    tenant: str
    kind: JobClass
    remaining: int
    submitted_ms: float
    parent: int | None = None
    generation: int = 0
    gain: float = 0.0
    cost: float = 0.0
    chunk: int = 0
    deadline_ms: float | None = None
    attained: float = 0.0
    held: bool = False
    context: int = 0
    work: WorkKind = WorkKind.KNOWN
    page: bytes | None = None


@dataclass(frozen=True, slots=True)
class TickPlan:
    """Grants of one tick, in order, at most one per node.

    saturated: there was no room for speculation, whether or not any was queued.
    dropped: SPEC jobs that left the queue while planning, with the reason.
    """

    items: list[tuple[Job, int]]
    committed_tokens: int
    speculative_tokens: int
    saturated: bool
    dropped: list[tuple[Job, str]]


def one_for_each_page(jobs: Sequence[Job]) -> list[Job]:
    """Of those that would compute the same page the one that has most of it, at the first place."""
    places: dict[bytes, int] = {}
    kept: list[Job] = []
    for job in jobs:
        place = places.get(job.page) if job.page is not None else None
        if place is None:
            if job.page is not None:
                places[job.page] = len(kept)
            kept.append(job)
        elif job.context > kept[place].context:
            kept[place] = job
    return kept
