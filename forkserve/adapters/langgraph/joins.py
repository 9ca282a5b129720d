"""Decisions of join nodes: chosen while the node runs, carried out when it has ended well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forkserve.adapters.langgraph import turns
from forkserve.adapters.langgraph.branch import NodeBranch
from forkserve.adapters.langgraph.registry import Live, Registry
from forkserve.adapters.langgraph.state import Ref, checked
from forkserve.branch import Branch
from forkserve.errors import AdapterError, NodeError
from forkserve.types import Tokens

__all__ = ["Best", "Decision", "apply", "commit_winner", "join_refs", "join_text", "leaves"]

Best = int | Ref | Callable[[Sequence[Ref]], "int | Ref"]


@dataclass(slots=True)
class Decision:
    """What a join node chose: the new end of the trunk (None: it stays), and who lost."""

    tip: tuple[Live, int] | None
    losers: list[Ref]


def leaves(registry: Registry, refs: Sequence[Ref]) -> list[Ref]:
    """The refs from which no other of them goes on."""
    inner: set[tuple[str, int]] = set()
    for ref in refs:
        live = registry.find(ref)
        if live is not None:
            node = registry.engine.tree(live.session.id).get(ref["node"])
            inner.update((ref["session"], above.id) for above in node.ancestors())
    return [ref for ref in refs if (ref["session"], ref["node"]) not in inner]


def commit_winner(
    registry: Registry,
    here: NodeBranch,
    refs: Sequence[Ref],
    best: Best,
    text: str | Tokens | None,
) -> dict[str, Any]:
    """See `ForkServe.commit_winner`."""
    winner = _chosen(refs, best)
    live = registry.find(winner)
    if live is not None and _below(registry, live, winner, here.base):
        registry.touch(here._run, live)
        tip = live, winner["node"]
    elif live is not None:  # of another run: a cached result, or state of another thread
        registry.count["copied"] += 1
        tree = registry.engine.tree(live.session.id)
        node = tree.get(winner["node"])
        start = node
        while start.id != winner["branch"] and start.parent is not None:
            start = start.parent
        own = tree.tokens(node, start.alias_len, winner["length"]).tolist()
        tip = _continue(registry, here, here.base, own)
    else:
        registry.count["reopened"] += 1
        tip = _continue(registry, here, here.base, text or ())
    return _decide(registry, here, tip, refs)


def join_text(
    registry: Registry, here: NodeBranch, refs: Sequence[Ref], text: str | Tokens
) -> dict[str, Any]:
    """See `ForkServe.join_text`."""
    return _decide(registry, here, _continue(registry, here, here.base, text), refs)


def join_refs(
    registry: Registry, here: NodeBranch, refs: Sequence[Ref], scaffold: str | Tokens
) -> dict[str, Any]:
    """See `ForkServe.join`."""
    parts: list[tuple[Ref, list[int]]] = []
    for ref in refs:
        live = registry.find(ref)
        if live is None or not _below(registry, live, ref, here.base):
            raise AdapterError(
                f"branch {ref['index']} of the join is gone (node {ref['node']} of "
                f"'{ref['session']}'); take its text from the state and use join_text"
            )
        tree = registry.engine.tree(live.session.id)
        node = tree.get(ref["node"])
        parts.append((ref, tree.tokens(node, here.base["length"], ref["length"]).tolist()))
    if scaffold or not parts:
        ids = scaffold
        if isinstance(scaffold, str):
            ids = registry.engine.backend.tokenizer.encode(scaffold)
        body = [*ids, *(token for _, own in parts for token in own)]
        return _decide(registry, here, _continue(registry, here, here.base, body), refs)
    first, rest = parts[0][0], [token for _, own in parts[1:] for token in own]
    return _decide(registry, here, _continue(registry, here, first, rest), refs)  # its rows stay


def _chosen(refs: Sequence[Ref], best: Best) -> Ref:
    if callable(best):
        best = best(refs)
    if isinstance(best, dict):
        return checked(best)
    if not isinstance(best, int) or isinstance(best, bool):
        raise AdapterError(
            f"the winner is {best!r:.100}; give a ref, its index, or a function that returns one"
        )
    if not -len(refs) <= best < len(refs):
        raise AdapterError(f"winner {best} is not one of the {len(refs)} refs (counted from 0)")
    return refs[best]


def _below(registry: Registry, live: Live, ref: Ref, base: Ref) -> bool:
    """Whether the ref's node goes on from `base`."""
    if (ref["session"], ref["gen"]) != (base["session"], base["gen"]):
        return False
    node = registry.engine.tree(live.session.id).get(ref["node"])
    return node.id == base["node"] or any(above.id == base["node"] for above in node.ancestors())


def _continue(
    registry: Registry, here: NodeBranch, base: Ref, text: str | Tokens
) -> tuple[Live, int]:
    """A node with `text` after `base`; the base itself without any."""
    live = here._fork.live
    if not text:
        return live, base["node"]
    node = registry.engine.fork(live.session.id, base["node"], here.name, text)
    here._run.scratch.append((live, node))  # swept if the join fails
    return live, node


def _decide(
    registry: Registry, here: NodeBranch, tip: tuple[Live, int], refs: Sequence[Ref]
) -> dict[str, Any]:
    """Note the decision; the update that tells the graph."""
    live, node = tip
    refs = [checked(ref) for ref in refs]
    kept = {node, *(n.id for n in registry.engine.tree(live.session.id).get(node).ancestors())}
    losers = [
        ref
        for ref in refs
        if ref["session"] != live.session.id or (ref["branch"] or ref["node"]) not in kept
    ]
    within = here._fork.branch
    here._decision = Decision(None if within else tip, losers)
    ref = registry.ref(live, node, branch=within)
    if within:  # the join of a subgraph that is itself a branch
        return {"fork_parent": ref, "fork_refs": {"set": [ref]}}
    return {"fork_tip": ref, "fork_refs": None}


def apply(registry: Registry, here: NodeBranch) -> None:
    """Carry the decision out.  Waits for the pass in flight, if it belongs to the session."""
    decision: Decision | None = here._decision
    if decision is None:
        return
    if decision.tip is not None:
        live, node = decision.tip
        Branch(live.session, node, pinned=True).attempt()
        registry.engine.promote(live.session.id, node)
        registry.count["committed"] += 1
        turns.moved(here._run, live, registry.ref(live, node))
        path = registry.engine.tree(live.session.id).get(node)
        for member in (path, *path.ancestors()):
            fork = live.forks.get(member.id)
            if fork is not None and fork is not here._fork:
                registry.decided(fork)
    for ref in decision.losers:
        _drop(registry, here, ref)


def _drop(registry: Registry, here: NodeBranch, ref: Ref) -> None:
    """Abort a loser, if it is this run's or its thread's to abort."""
    live = registry.find(ref)
    if live is None:
        return
    node = ref["branch"] or ref["node"]
    fork = live.forks.get(node)
    if fork is not None:
        ours = fork.run is here._run or (fork.run is None and fork.thread == here._run.thread)
    else:  # sealed by another process
        ours = node in live.stored and live.home == here._run.home
    if ours:
        with suppress(NodeError):
            registry.abort(live, node)
