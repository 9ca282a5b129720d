"""Commit: bind what was observed to the child that guessed most of it.

::

    x_u [----------]                  the node that is committed at
    x              [------------------------)      what was observed after it
    winner         [----- same -----)              longest common prefix, in mid-page if need be
    tail                            [------)       prefilled as committed work
    losers         [--- aborted ---)               only their own pages go back

The match goes on below the winner as long as a whole child was right, so that a guess that was
forked from a guess counts too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from forkserve.tree.node import Node
from forkserve.tree.rows import cut, missing
from forkserve.tree.tree import ContextTree, committed
from forkserve.types import HitClass, NodeMode

__all__ = ["CommitResult", "Outcome", "apply_commit", "matching"]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did.

    winner: the node that holds the observed text and is the tip now.
    lcp: positions of the whole sequence that were there already (never less than the length of
    the node committed at).  tail: observed tokens after them.  aborted: nodes that lost.
    hit: see `HitClass`.  skipped_prefill: observed tokens whose KV rows existed already.
    generation: of the node committed at, after the commit.
    """

    winner: int
    lcp: int
    tail: int
    aborted: tuple[int, ...]
    hit: HitClass
    skipped_prefill: int
    generation: int


@dataclass(slots=True)
class Outcome:
    """A commit that was applied to the tree, with what the engine must still do.

    losers: roots of the subtrees to abort.  used: speculated rows that turned out right; wasted:
    rows of the winner's own guess that were cut off.
    """

    result: CommitResult
    winner: Node
    losers: list[Node]
    used: int
    wasted: int


def apply_commit(
    tree: ContextTree,
    node: Node,
    observed: Sequence[int],
    chain: list[Node],
    branch: str | None,
    now_ms: float,
) -> Outcome:
    """Move the tip of the node's line over `observed`, along the nodes that `matching` found.

    Nothing here can fail half-way.
    """
    tokens = array("i", observed)
    lcp = node.length
    for winner in chain:
        lcp += tree.match(winner, tokens[lcp - node.length :])
    losers = _losers(node, chain, lcp)
    rest = tokens[lcp - node.length :]
    if chain:
        winner = chain[-1]
        hit = _classify(winner, lcp, len(rest) > 0)
        used = sum(n.speculated for n in chain)
        rows = winner.kv_end
        _truncate(tree, winner, lcp)
        wasted = min(max(rows - lcp, 0), winner.speculated)
        used -= wasted
        for member in chain:
            tree.set_mode(member, NodeMode.COMMIT)
            member.speculated = 0
            tree.move_tip(node.line, member)
        tree.extend(winner, rest)
    else:
        hit, used, wasted = HitClass.MISS, 0, 0
        winner = tree.fork(node, branch or "commit", rest, now_ms, mode=NodeMode.COMMIT)
        tree.move_tip(node.line, winner)
    winner.known = winner.length
    winner.used_ms = now_ms
    winner.ttl_deadline_ms = node.ttl_deadline_ms = None
    tree.set_mode(node, NodeMode.COMMIT)
    node.generation += 1
    parts = missing(winner, winner.length)
    ready = parts[0][1] if parts else winner.length
    result = CommitResult(
        winner=winner.id,
        lcp=lcp,
        tail=len(rest),
        aborted=tuple(n.id for loser in losers for n in loser.subtree()),
        hit=hit,
        skipped_prefill=max(min(ready, lcp) - node.length, 0),
        generation=node.generation,
    )
    return Outcome(result, winner, losers, used, wasted)


def matching(
    tree: ContextTree,
    node: Node,
    length: int,
    later: Sequence[Node],
    observed: Sequence[int],
    branch: str | None,
) -> list[Node]:
    """Nodes below `node` that hold a prefix of what was observed after its place `length`.

    Each holds it right to its end, but the last.  later: children that do not count.  `branch`
    breaks ties between children that match equally far; then the lowest id wins.
    """
    tokens = array("i", observed)
    chain: list[Node] = []
    parent, done = node, 0
    while done < len(tokens):
        best: tuple[int, bool, int] | None = None
        for child in parent.children.values():
            end = length if parent is node else parent.length
            if child not in later and (matched := tree.match(child, tokens[done:], end)):
                key = (matched, child.branch == branch, -child.id)
                best = max(best, key) if best is not None else key
        if best is None:
            break
        parent = parent.children[-best[2]]
        chain.append(parent)
        done += best[0]
        if parent.length - length != done:
            break
    return chain


def _losers(node: Node, chain: list[Node], lcp: int) -> list[Node]:
    """Subtrees that the commit rules out.

    Speculative siblings at every level; attempts beside the winner only when the winner is an
    attempt too (the choice among them has been made); anything that hangs on cut-off text.
    """
    picked = any(committed(n) for n in chain)
    losers: list[Node] = []
    for parent, kept in zip([node, *chain], [*chain, None], strict=True):
        for child in parent.children.values():
            if child is kept:
                continue
            if kept is None:
                if (chain and child.alias_len > lcp) or (not chain and child.mode is NodeMode.SPEC):
                    losers.append(child)
            elif child.mode is NodeMode.SPEC or (picked and child.line != node.line):
                losers.append(child)
    return losers


def _truncate(tree: ContextTree, node: Node, length: int) -> None:
    """Cut a node's guess at `length`, rows included."""
    if node.length > length:
        del node.tokens[length - node.alias_len :]
        if node.kv_end > length:
            cut(tree, node, length)


def _classify(winner: Node, lcp: int, tail: bool) -> HitClass:
    if lcp <= winner.known:
        return HitClass.KNOWN_SUFFIX
    return HitClass.RESIDUAL_PARTIAL if tail else HitClass.RESIDUAL_FULL
