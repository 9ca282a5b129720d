"""Turns: a thread that has a trunk is told something new.

A run with an input begins a turn; runs that resume it (None, a command) belong to it.  The end of
the trunk from before knows nothing of the input, so nodes leave from what the state renders to now.
What that shares with the trunk is shared in the tree, and what it hasn't goes idle.

A run that resumes asks the checkpoint that it resumes from whether its turn has begun: the versions
of the input and of ``fork_tip`` say which was written later.  So it does not matter which process
was told, how the graph is run, or whether somebody goes back in time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as made_by
from typing import TYPE_CHECKING, Any

from langgraph.constants import START
from langgraph.types import Command

from forkserve.adapters.langgraph.state import Ref, field, is_ref
from forkserve.session import Prompt
from forkserve.tree.tree import lcp

if TYPE_CHECKING:
    from forkserve.adapters.langgraph.registry import Live, Registry, Run
    from forkserve.tree.tree import ContextTree

__all__ = [
    "Place",
    "Turn",
    "before",
    "begin",
    "end",
    "moved",
    "place",
    "resumed",
    "told",
    "waiting",
]

Place = tuple[str, str, int, int, int]
_NAME = "turn"  # of the node at which one begins


def place(ref: Ref) -> Place:
    """What a ref names, whatever its role."""
    return ref["engine"], ref["session"], ref["gen"], ref["node"], ref["length"]


@dataclass(eq=False, slots=True)
class Turn:
    """bases: where it begins, by old tip and prompt.  made: nodes that were added for that."""

    bases: dict[tuple[object, ...], tuple[Live, Ref]] = made_by(default_factory=dict)
    made: list[tuple[Live, Ref]] = made_by(default_factory=list)


def told(registry: Registry, run: Run, given: Any, known: Mapping[str, Any]) -> None:
    """A graph begins: with an input, or to go on.  known: its metadata."""
    checkpoint = known.get("checkpoint_id")
    run.checkpoint = str(checkpoint) if checkpoint else None
    run.tips = set()
    if given is None or isinstance(given, Command):
        resumed(registry, run, str(known.get("checkpoint_ns") or ""))
        return
    with registry.lock:
        earlier = registry.turns.get(run.thread or "")
        run.turn, run.resumes = Turn(), None
        if earlier is not None:  # never finished
            run.turn.bases.update(earlier.bases)
            run.turn.made.extend(earlier.made)
        tip = field(given, "fork_tip")
        if is_ref(tip):  # the input says where to go on
            run.tips.add(place(tip))


def resumed(registry: Registry, run: Run, namespace: str) -> None:
    """The run goes on with what a checkpoint has.  namespace: of its graph's checkpoints."""
    with registry.lock:
        run.turn, run.resumes = registry.turns.get(run.thread or ""), namespace
        run.waits, run.asked = None, False


def moved(run: Run, live: Live, ref: Ref) -> None:
    """A node of the run left the trunk here."""
    live.tip = place(ref)
    run.tips.add(live.tip)


def waiting(checkpoint: Mapping[str, Any]) -> Place | None:
    """The trunk's end, if an input has come to the state since it was written there."""
    versions, values = checkpoint["channel_versions"], checkpoint["channel_values"]
    tip, given, moved = values.get("fork_tip"), versions.get(START), versions.get("fork_tip")
    if not is_ref(tip) or type(given) is not type(moved) or moved >= given:
        return None
    if is_ref(field(values.get(START), "fork_tip")):  # the input says where to go on
        return None
    return place(tip)


def before(registry: Registry, run: Run, ref: Ref, tip: Callable[[], Any]) -> bool:
    """Whether a ref is the end of the thread's trunk from before the turn.

    An older place, that a node or a Send chose, is meant as it is.
    tip: reads ``fork_tip`` of the state.
    """
    with registry.lock:
        live, here = registry.find(ref), tip()
        if run.thread is None or live is None or place(ref) in run.tips:
            return False
        if run.resumes is not None:
            return place(ref) == run.waits and not (is_ref(here) and place(here) != run.waits)
        if run.turn is None:
            return False
        ours = live.home == run.home and place(ref) == live.tip
        return ours or (is_ref(here) and place(ref) == place(here))


def begin(registry: Registry, run: Run, tip: Ref, prompt: Prompt) -> tuple[Live, Ref]:
    """Where a turn begins: at `prompt`, sharing with the trunk up to `tip` what they share.

    Nodes of one turn with equal `tip` and prompt begin at one place.
    """
    ids = array("i", registry.ids(prompt))
    key = (place(tip), ids.tobytes())
    with registry.door(run.home):  # not the lock: to open may take a while
        turn = run.turn = run.turn or Turn()
        known = turn.bases.get(key)
        if known is not None and registry.hold(run, known[1]) is not None:
            return known
        registry.count["turns"] += 1
        live, found = registry.hold(run, tip), None
        if live is not None and live.home == run.home:  # a cached node's tip is another thread's
            found = _shared(registry, turn, live, tip, ids)
        if found is None:
            live = registry.open(run, ids.tolist(), place(tip))
            found = live, registry.ref(live, live.session.branch(1).id)
        turn.bases[key] = found
        return found


def _shared(
    registry: Registry, turn: Turn, live: Live, tip: Ref, ids: array[int]
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
    base = _stored(live, tree, ids)
    if base is None:  # the first node that commits above it brings it to the main line
        base = engine.fork(session, node.id, _NAME, ids[shared:].tolist(), at=shared)
        engine.attempt(session, base)
    found = live, registry.ref(live, base)
    turn.made.append(found)
    return found


def _stored(live: Live, tree: ContextTree, ids: array[int]) -> int | None:
    """Where an earlier process began the turn: its branches stand there."""
    for number, length in live.stored.items():
        node = tree.nodes.get(number)
        if node is None or node.branch != _NAME or not length == node.length == len(ids):
            continue
        if tree.tokens(node) == ids:
            return number
    return None


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
