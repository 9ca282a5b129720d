"""Upkeep of committed spines when nothing else is to do: re-align rows, give pages back."""

from __future__ import annotations

from forkserve.control.core import Core
from forkserve.tree.spine import finish, realign, realignable

__all__ = ["care"]


def care(core: Core) -> bool:
    """Re-align one committed spine that a frozen tail or a copy left crooked; True if it did.

    Only with pages to spare: the rows need a second home until they are copied.
    """
    for tree in core.trees.values():
        if (tree.session, tree.tip.id) in core.tasks:
            continue
        found = realignable(tree, tree.tip)
        if found is None:
            continue
        chain, begin = found
        need = core.pool.pages_for(tree.tip.kv_end - begin)
        if core.pool.free_pages < 2 * need + core.planner.ledger.total:
            continue
        move = realign(tree, chain, begin)
        core.copy_later(move.copies)
        finish(tree, move)
        core.publish(tree, tree.tip)
        return True
    return False
