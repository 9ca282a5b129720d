"""Commit and join as the engine does them: the tree's part, then bills, aborts and queues."""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.control.commit import CommitResult, apply_commit, matching
from forkserve.control.core import Core
from forkserve.control.join import JoinPlan, JoinResult
from forkserve.control.lines import after, require_quiet, retract
from forkserve.errors import AdmissionRefused, OutOfPages
from forkserve.tree.node import Node, new_segment
from forkserve.tree.rows import missing, spans
from forkserve.tree.spine import copy_plan, trim
from forkserve.tree.tree import ContextTree
from forkserve.types import JobClass, JoinPolicy, NodeMode

__all__ = ["commit", "join"]

_COMPANION_MS = 2.0  # how long a commit's tail waits for a generation that shares its pass


def commit(
    core: Core,
    tree: ContextTree,
    tip: Node,
    length: int,
    observed: Sequence[int],
    branch: str | None,
) -> CommitResult:
    """Bind `observed` after the first `length` tokens of a line: take it back to there, abort the
    losers, queue the tail as committed work.

    Raises SessionError, and changes nothing, when it would drop, cut or extend an attempt on which
    a generation runs.
    """
    now = core.clock.now_ms()
    node, later = after(tree, tip, length)
    chain = matching(tree, node, length, later, observed, branch)
    for member in [*(below for child in later for below in child.subtree()), *chain]:
        require_quiet(core, tree, member)
    retract(core, tree, node, later, length)
    outcome = apply_commit(tree, node, observed, chain, branch, now)
    for loser in outcome.losers:
        core.abort(tree, loser, lazy=core.config.lazy_abort)
    trim(tree, node)
    core.count.commits += 1
    core.experience[tree.session].took(node.branch, outcome.winner.branch)
    core.count.hits[outcome.result.hit] += 1
    core.count.wasted += outcome.wasted
    core.meter.commit_speculative(tree.tenant, outcome.used)
    for job in core.scheduler.invalidate(tree.session, node.id, node.generation):
        core.finish(core.tasks[job.session, job.node])
    _take_over(core, tree, outcome.winner, now)
    core.journal.committed(tree, node, outcome.winner, outcome.result)
    return outcome.result


def _take_over(core: Core, tree: ContextTree, tip: Node, now_ms: float) -> None:
    """The tip is committed now: end its speculation, publish its rows, queue what is missing."""
    for node in (tip, *tip.ancestors()):
        task = core.tasks.get((tree.session, node.id))
        if task is not None and task.kind is JobClass.SPEC:
            core.finish(task)
    core.publish(tree, tip)
    if missing(tip, tip.length):
        try:
            task = core.ensure(tree, tip)
        except AdmissionRefused:
            return  # the queue is full: the rows are computed for the generation that needs them
        task.held, task.wake_ms = True, now_ms + _COMPANION_MS


def join(core: Core, tree: ContextTree, plan: JoinPlan, policy: JoinPolicy) -> JoinResult:
    """Carry out a checked join."""
    alone = policy in (JoinPolicy.FIRST, JoinPolicy.WINNER)
    if alone and plan.winners[0].parent is plan.parent and plan.adopts:
        at, branch = plan.parent.length, plan.winners[0].branch
        result = commit(core, tree, plan.parent, at, plan.tokens, branch)
        return JoinResult(
            node=result.winner,
            reused_prefix=plan.parent.length + result.skipped_prefill,
            tail=len(plan.tokens) - result.skipped_prefill,
            policy=policy,
            winners=(plan.winners[0].id,),
            aborted=result.aborted,
        )
    now = core.clock.now_ms()
    node = tree.fork(plan.parent, policy.value, plan.tokens, now, mode=NodeMode.COMMIT)
    try:
        shared = _share(core, tree, node)
    except OutOfPages:
        shared = 0  # the rows are computed instead
    tree.move_tip(plan.parent.line, node)
    tree.set_mode(plan.parent, NodeMode.COMMIT)
    plan.parent.generation += 1
    aborted = tuple(dict.fromkeys(n.id for loser in plan.losers for n in loser.subtree()))
    for loser in plan.losers:
        if loser.live:
            core.abort(tree, loser, lazy=core.config.lazy_abort)
    _take_over(core, tree, node, now)
    return JoinResult(
        node=node.id,
        reused_prefix=plan.parent.length + shared,
        tail=len(plan.tokens) - shared,
        policy=policy,
        winners=tuple(n.id for n in plan.winners),
        aborted=aborted,
    )


def _share(core: Core, tree: ContextTree, node: Node) -> int:
    """Copy the rows that the new node has in common with one of its siblings; returns how many.

    Worth it from a page on: fewer rows are recomputed as cheaply.
    """
    parent = node.parent
    assert parent is not None
    best: tuple[int, int, Node] | None = None
    for child in parent.children.values():
        if child is node or not child.segments or child.alias_len != node.alias_len:
            continue
        if child.floor > child.alias_len:
            continue  # its first rows were given back
        rows = min(tree.match(child, node.tokens), child.kv_end - node.alias_len)
        if rows >= tree.pool.page_size and (best is None or rows > best[0]):
            best = (rows, -child.id, child)
    if best is None:
        return 0
    rows, _, source = best
    begin, end = source.kv_begin, node.alias_len + rows
    pages = core.pool.alloc(core.pool.pages_for(end - begin))
    parts = [span for span in spans(tree, source, end) if span.start >= begin]
    core.copy_later(copy_plan(parts, begin, pages, core.pool.page_size))
    node.segments.append(new_segment(begin, pages, end))
    node.floor = source.floor  # the copy stands alone where the one it was made from does
    return rows
