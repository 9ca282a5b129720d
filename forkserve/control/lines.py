"""Committed lines: attempts that run beside the main line, promotion, and abort.

A tree has one main line.  An *attempt* is a branch that the program runs for real: it is the tip of
a committed line of its own, so it may be generated on and committed to, and a commit on the main
line that observes its text adopts it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from forkserve.control.core import Core
from forkserve.errors import NodeError, SessionError
from forkserve.tree.node import MAIN_LINE, Node
from forkserve.tree.rows import cut
from forkserve.tree.spine import trim
from forkserve.tree.tree import ContextTree, committed
from forkserve.types import JobClass, NodeMode

__all__ = [
    "abort",
    "after",
    "attempt",
    "promote",
    "require_known",
    "require_quiet",
    "require_tip",
    "retract",
    "settle_speculation",
]


def require_tip(tree: ContextTree, node: Node, doing: str) -> None:
    """Raise NodeError unless `node` is the committed tip of its line."""
    if node.mode is NodeMode.SPEC:
        raise NodeError(
            f"cannot {doing} node {node.id}: it is speculative; commit it, or make it an attempt"
        )
    tip = tree.tips.get(node.line)
    if tip is not node:
        where = f"; the tip of its line is node {tip.id}" if tip is not None else ""
        raise NodeError(
            f"cannot {doing} node {node.id}: it is not the tip of its line{where}; "
            "fork it to go another way"
        )


def require_known(node: Node) -> None:
    """Raise NodeError if the node ends in text that nobody has observed."""
    if node.known != node.length:
        raise NodeError(
            f"the last {node.length - node.known} tokens of node {node.id} are a guess; "
            "commit what was really observed"
        )


def require_quiet(core: Core, tree: ContextTree, node: Node) -> None:
    """Raise SessionError while a generation runs on the node."""
    task = core.tasks.get((tree.session, node.id))
    if task is not None and task.generation_handle is not None:
        if task.generation_handle.abandoned:
            return core.sweep()
        raise SessionError(
            f"a generation is running on node {node.id} of session '{tree.session}'; wait for it, "
            "cancel it, or give each thread a branch of its own"
        )


def attempt(core: Core, tree: ContextTree, node: Node) -> None:
    """Give a speculative node a committed line of its own.  A committed one stays as it is."""
    if committed(node):
        return
    if node.parent is not None and not committed(node.parent):
        raise NodeError(
            f"node {node.id} hangs under the speculative node {node.parent.id}; "
            "make that an attempt first"
        )
    require_known(node)
    settle_speculation(core, tree, [node])
    tree.start_line(node)


def promote(core: Core, tree: ContextTree, node: Node) -> None:
    """Make a live node the tip of the main line; what the main line had instead goes idle."""
    path = [node]
    while path[-1].line != MAIN_LINE or not committed(path[-1]):
        above = path[-1].parent
        assert above is not None, "the root is on the main line"
        path.append(above)
    fresh, base = path[:-1], path[-1]
    for member in fresh:
        require_known(member)
        if member is not node:  # it would be the tip of nothing, and go on growing
            require_quiet(core, tree, member)
    for child in list(base.children.values()):
        if child.line == MAIN_LINE and committed(child):
            tree.split_line(child)
    settle_speculation(core, tree, fresh)
    for member in [base, *reversed(fresh)]:
        tree.set_mode(member, NodeMode.COMMIT)
        tree.move_tip(MAIN_LINE, member)
        member.ttl_deadline_ms = None
    for member in path[1:]:
        _trim(tree, member)
    core.publish(tree, tree.tip)


def after(tree: ContextTree, tip: Node, length: int) -> tuple[Node, list[Node]]:
    """The node that holds a line's last token before `length`, and what hangs on later ones.

    Raises NodeError when the place is in another line's text.
    """
    if length == tip.length:
        return tip, []
    owner = tree.owner(tip, length)
    if owner.line != tip.line:
        raise NodeError(
            f"position {length} is in text that line {tip.line} shares with line {owner.line}; "
            "fork there instead"
        )
    children = owner.children.values()
    own = {child.id for child in children if committed(child) and child.line == tip.line}
    return owner, [child for child in children if child.id in own or child.alias_len > length]


def retract(core: Core, tree: ContextTree, owner: Node, later: Sequence[Node], length: int) -> None:
    """Take a line back to its first `length` tokens.  owner, later: what `after` says.

    What the line held after them dies, with all that hangs on it; branches that left at or before
    that place stay.

    ::

        line      [-------- owner -------|-- later nodes --]
        kept      [---- length ----)
        dropped                    [-----------------------)    tokens, rows, branches on them
    """
    for child in later:
        core.abort(tree, child, lazy=core.config.lazy_abort)
    if owner.length > length:
        core.forget(tree, owner)
        del owner.tokens[length - owner.alias_len :]
        owner.known, owner.floor = min(owner.known, length), min(owner.floor, length)
        if owner.kv_end > length:
            cut(tree, owner, length)
        if owner.published * core.pool.page_size > length:
            owner.published, owner.digest = 0, b""


def settle_speculation(core: Core, tree: ContextTree, nodes: Sequence[Node]) -> None:
    """These nodes stop being guesses: end their speculative tasks and bill their rows in full."""
    for node in nodes:
        task = core.tasks.get((tree.session, node.id))
        if task is not None and task.kind is JobClass.SPEC:
            core.finish(task)
        core.meter.commit_speculative(tree.tenant, node.speculated)
        node.speculated = 0
        node.ttl_deadline_ms = None


def abort(core: Core, tree: ContextTree, node: Node, *, lazy: bool, cascade: bool) -> int:
    """Drop a subtree, and with `cascade` the speculative ancestors that it leaves childless."""
    if any(n.line == MAIN_LINE and committed(n) for n in node.subtree()):
        raise NodeError(
            f"node {node.id} carries the committed main line; promote another node, or close the "
            "session"
        )
    above = node.parent
    freed = core.abort(tree, node, lazy=lazy)
    while cascade and above is not None and above.mode is NodeMode.SPEC and not above.children:
        orphan, above = above, above.parent
        freed += core.abort(tree, orphan, lazy=lazy)
    if above is not None and above.live:
        freed += _trim(tree, above)
    return freed


def _trim(tree: ContextTree, node: Node) -> int:
    """Give back a tail that the only child, of the same line, has copied; returns pages freed.

    Not to a guess, which may be dropped with its copy.
    """
    children = node.children.values()
    sure = all(committed(child) and child.alias_len >= node.kv_end for child in children)
    return trim(tree, node) if committed(node) and sure else 0
