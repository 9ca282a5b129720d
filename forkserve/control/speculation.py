"""From a request to speculate to queued work: candidates, the planner's answer, tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forkserve.control.candidates import Candidate
from forkserve.control.core import Core
from forkserve.control.planner import Admission, Load, Plan, Refusal
from forkserve.errors import AdmissionRefused, ForkServeError, NodeError
from forkserve.tree.node import Node
from forkserve.tree.rows import missing
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass, NodeMode
from forkserve.values import number

__all__ = ["Request", "Speculation", "speculate"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """One branch to speculate on: see `Engine.speculate`."""

    node: Node
    priority: float
    guess: Sequence[int] = ()
    q: float = 0.0
    schema_stable: bool = True


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the planner made of one request: tokens admitted, and every refusal with its reason."""

    node: int
    tokens: int
    refused: tuple[Refusal, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.tokens > 0


def speculate(
    core: Core, tree: ContextTree, requests: Sequence[Request], t_idle_ms: float
) -> dict[int, Speculation]:
    """Plan several branches under one budget and queue what was admitted.

    A planner that fails refuses everything: speculation is optional, and nobody waits for it.
    """
    t_idle_ms = number("t_idle_ms", t_idle_ms)
    candidates = [_candidate(core, tree, request, t_idle_ms) for request in requests]
    guesses = {request.node.id: request.guess for request in requests}
    core.count.speculates += len(requests)
    speculating = _speculating(core, tree, guesses)
    try:
        plan = core.planner.plan(
            candidates, core.pool_view(), speculating=speculating, load=_load(core, tree, guesses)
        )
    except ForkServeError:
        raise
    except Exception:
        _log.exception("the planner failed; nothing is speculated")
        core.count.refusals["planner_failed"] += len(requests)
        return {node: Speculation(node, 0) for node in guesses}
    admitted: dict[int, list[Admission]] = {}
    for admission in plan.admitted:
        admitted.setdefault(admission.candidate.node, []).append(admission)
    for node, parts in list(admitted.items()):
        full = _queue(core, tree, tree.get(node), parts, guesses[node], t_idle_ms)
        if full is not None:
            del admitted[node]
            plan = replace(plan, refused=(*plan.refused, full))
    answers = _answers(core, plan, admitted, guesses)
    core.journal.speculated(tree.session, answers)
    return answers


def _answers(
    core: Core, plan: Plan, admitted: Mapping[int, Sequence[Admission]], nodes: Mapping[int, object]
) -> dict[int, Speculation]:
    refused: dict[int, list[Refusal]] = {}
    for refusal in plan.refused:
        core.count.refusals[refusal.reason] += 1
        refused.setdefault(refusal.candidate.node, []).append(refusal)
    return {
        node: Speculation(
            node, sum(a.tokens for a in admitted.get(node, ())), tuple(refused.get(node, ()))
        )
        for node in nodes
    }


def _candidate(core: Core, tree: ContextTree, request: Request, t_idle_ms: float) -> Candidate:
    node = request.node
    if node.mode is not NodeMode.SPEC:
        raise NodeError(
            f"node {node.id} is {node.mode.value}: only a speculative fork is speculated"
        )
    if request.guess and node.known != node.length:
        raise NodeError(f"node {node.id} ends in a guess already")
    parts = missing(node, node.length)
    begin = parts[0][1] if parts else node.length
    assert node.parent is not None
    return Candidate(
        session=tree.session,
        node=node.id,
        parent=node.parent.id,
        branch=node.branch,
        generation=node.parent.generation,
        tenant=tree.tenant,
        known=max(node.known - begin, 0),
        guess=node.length - max(node.known, begin) + len(request.guess),
        p=number("priority", request.priority, 0, 1),
        q=number("q", request.q, 0, 1),
        schema_stable=request.schema_stable,
        t_idle_ms=t_idle_ms,
        context=begin,
    )


def _speculating(
    core: Core, tree: ContextTree, nodes: Mapping[int, object]
) -> dict[tuple[str, int], int]:
    """Children that have speculative rows or work already, per parent, other than `nodes`.

    The tree lists those that ever had.  While there are fewer of them than the cap they need not
    be looked at; then the list is cleared, so a call does not cost more for every sibling.
    """
    busy: dict[tuple[str, int], int] = {}
    asked = [tree.get(n) for n in nodes]
    for parent in {node.parent.id for node in asked if node.parent is not None}:
        listed = tree.guessed.get(parent, set())
        if len(listed) + len(asked) > core.config.branch_cap:
            listed -= {
                child
                for child in listed
                if child.mode is not NodeMode.SPEC
                or not (child.speculated or (tree.session, child.id) in core.tasks)
            }
        busy[tree.session, parent] = len(listed) - sum(node in listed for node in asked)
    return busy


def _load(core: Core, tree: ContextTree, replanned: Mapping[int, object]) -> Load:
    now = core.clock.now_ms()
    shapes = core.scheduler.backlog(tree.session, replanned)
    backlog = sum(n * core.backend.predict_ms(*shape) for shape, n in sorted(shapes.items()))
    return Load(
        decoding=core.scheduler.decoding,
        decode_share=core.scheduler.decode_share(now, tree.session),
        backlog_ms=backlog,
        tbt_factor={tree.tenant: core.meter.tbt_factor(tree.tenant, now)},
    )


def _queue(
    core: Core,
    tree: ContextTree,
    node: Node,
    parts: Sequence[Admission],
    guess: Sequence[int],
    t_idle_ms: float,
) -> Refusal | None:
    """Make one task of what was admitted for a node: the known part, then the guess.

    Returns why not, with nothing changed, when the queue is full.
    """
    now = core.clock.now_ms()
    candidate = parts[0].candidate
    tokens = sum(part.tokens for part in parts)
    added = guess if tokens > candidate.known else ()
    tree.extend(node, added)
    previous = core.tasks.get((tree.session, node.id))
    if previous is not None:
        core.finish(previous)
        for part in parts:  # finishing gave the node's pages back, the new promise included
            core.planner.ledger.reserve(tree.session, node.id, part.pages)
    task = core.new_task(tree, node, JobClass.SPEC)
    task.upto = candidate.context + tokens
    task.gain = sum(part.gain_ms for part in parts)
    task.cost = sum(part.cost_ms for part in parts)
    task.chunk = min(part.chunk for part in parts)
    # A tool that overruns its estimate must not cost the branch what was made ready for it.
    late_ms = now + t_idle_ms + 1e3 * core.config.ttl_max_s
    task.deadline_ms = late_ms
    task.work = parts[0].kind
    tree.note_guess(node)
    try:
        core.submit(task)
    except AdmissionRefused as error:
        core.planner.ledger.release(tree.session, node.id)
        del node.tokens[len(node.tokens) - len(added) :]
        return Refusal(candidate, parts[0].kind, error.reason, str(error), tokens)
    core.arm(node, late_ms)
    return None
