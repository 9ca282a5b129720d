"""Turns: a thread that has a trunk is told something new.

A run with an input begins a turn; runs that resume it (None, a command) belong to it.  The end of
the trunk from before knows nothing of the input, so nodes leave from what the state renders to now.
What that shares with the trunk is shared in the tree, and what it hasn't goes idle.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as made_by
from typing import TYPE_CHECKING, Any

from langgraph.types import Command

from forkserve.adapters.langgraph.state import Ref, field, is_ref
from forkserve.session import Prompt
from forkserve.tree.tree import lcp

if TYPE_CHECKING:
    from forkserve.adapters.langgraph.registry import Live, Registry, Run
    from forkserve.tree.node import Node
    from forkserve.tree.tree import ContextTree

__all__ = ["Place", "Turn", "before", "begin", "end", "moved", "place", "told", "unfinished"]

Place = tuple[str, str, int, int, int]


def place(ref: Ref) -> Place:
    """What a ref names, whatever its role."""
    return ref["engine"], ref["session"], ref["gen"], ref["node"], ref["length"]


@dataclass(eq=False, slots=True)
class Turn:
    """tips: where its nodes left the trunk.  bases: where it begins, by old tip and prompt.
    made: nodes that were added for that.  step: of the graph at its first node.
    """

    tips: set[Place] = made_by(default_factory=set)
    bases: dict[tuple[object, ...], tuple[Live, Ref]] = made_by(default_factory=dict)
    made: list[tuple[Live, Ref]] = made_by(default_factory=list)
    step: int | None = None


def told(registry: Registry, run: Run, given: Any) -> None:
    """A graph begins: with an input, or to go on."""
    with registry.lock:
        earlier = registry.turns.get(run.thread or "")
        if given is None or isinstance(given, Command):
            run.turn = earlier
            return
        run.turn = Turn()
        if earlier is not None:  # never finished, and its own tips are old now
            run.turn.bases.update(earlier.bases)
            run.turn.made.extend(earlier.made)
        tip = field(given, "fork_tip")
        if is_ref(tip):  # the input says where to go on
            run.turn.tips.add(place(tip))


def moved(run: Run, live: Live, ref: Ref) -> None:
    """A node of the run left the trunk here."""
    live.tip = place(ref)
    if run.turn is not None:
        run.turn.tips.add(live.tip)


def before(
    registry: Registry, run: Run, ref: Ref, tip: Callable[[], Any], step: int | None
) -> bool:
    """Whether a ref is the end of the thread's trunk from before the turn.

    An older place, that a node or a Send chose, is meant as it is.
    tip: reads ``fork_tip`` of the state.  step: of the node in its graph; None inside a subgraph,
    which counts its own.
    """
    with registry.lock:
        turn = run.turn
        if turn is None or run.thread is None:
            return False
        if turn.step is None:
            turn.step = step
        elif step is not None and step < turn.step:
            return False  # time travel
        live = registry.find(ref)
        if live is None or live.home != run.home or place(ref) in turn.tips:
            return False
        if place(ref) == live.tip:
            return True
        here = tip()
        return is_ref(here) and place(ref) == place(here)


def begin(registry: Registry, run: Run, tip: Ref, prompt: Prompt) -> tuple[Live, Ref]:
    """Where a turn begins: at `prompt`, sharing with the trunk up to `tip` what they share.

    Nodes of one turn with equal `tip` and prompt begin at one place.
    """
    turn, ids = run.turn, array("i", registry.ids(prompt))
    assert turn is not None, "nothing is from before"
    key = (place(tip), ids.tobytes())
    with registry.lock:
        live = registry.find(tip)
        known = turn.bases.get(key)
        if known is not None and registry.find(known[1]) is not None:
            return known
        registry.count["turns"] += 1
        found = _shared(registry, run, live, tip, ids) if live is not None else None
        if found is None:
            live = registry.open(run, ids.tolist(), place(tip))
            found = live, registry.ref(live, live.session.branch(1).id)
        turn.bases[key] = found
        return found


def _shared(
    registry: Registry, run: Run, live: Live, tip: Ref, ids: array[int]
) -> tuple[Live, Ref] | None:
    """A place in the trunk's own tree; None if they share nothing."""
    engine, session = registry.engine, live.session.id
    tree = engine.tree(session)
    node = tree.get(tip["node"])
    shared = lcp(tree.tokens(node, 0, tip["length"]), ids)
    owner = tree.owner(node, shared) if shared else node
    if shared == len(ids) == owner.length:
        return live, registry.ref(live, owner.id)
    shared = min(shared, len(ids) - 1)  # a node has a token of its own
    if shared < 1:
        return None
    registry.touch(run, live)
    assert run.turn is not None
    name = f"turn@{run.turn.step or 0}"  # a store keeps it
    base = engine.fork(session, node.id, name, ids[shared:].tolist(), at=shared)
    engine.attempt(session, base)  # the first node that commits above it brings it to the main line
    found = live, registry.ref(live, base)
    run.turn.made.append(found)
    return found


def unfinished(tree: ContextTree, node: Node, step: int | None) -> bool:
    """Whether a turn had begun by `step` that `node`, which an earlier process left, is before."""
    path = {node.id, *(above.id for above in node.ancestors())}
    for later in tree:
        word, _, at = later.branch.partition("@")
        begins = word == "turn" and at.isdecimal() and later.id > node.id and later.id not in path
        if begins and (step is None or int(at) <= step):
            return True
    return False


def end(registry: Registry, run: Run, *, resumable: bool) -> None:
    """Keep the turn for a run to come, or drop the beginnings that nothing goes on from."""
    turn = run.turn
    if run.thread is None:
        return
    if resumable and turn is not None:
        if any(live.home == run.home for live in registry.sessions.values()):
            registry.turns[run.thread] = turn
        return
    if not run.touched:  # update_state: the turn goes on waiting
        return
    registry.turns.pop(run.thread, None)
    for live, base in turn.made if turn is not None else ():
        if not live.session.closed and live.tip != place(base):
            spine = registry.engine.tree(live.session.id).spine()
            if base["node"] not in {node.id for node in spine}:
                registry.sweep(live, base["node"])
