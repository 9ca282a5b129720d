"""The branch of the node that is running: how a chat model inside a LangGraph node finds it.

A context variable, because what is given per call ends up in tracing and in cache keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from forkserve.api import Engine
from forkserve.branch import Branch
from forkserve.errors import NodeError, SessionError
from forkserve.tree.rows import missing

__all__ = ["current_branch", "place", "rows_there", "running"]

running: ContextVar[Branch | None] = ContextVar("forkserve_branch", default=None)


def current_branch() -> Branch | None:
    """The branch of the decorated node that is running here, or None."""
    return running.get()


def place(engine: Engine, prompt: Sequence[int]) -> Branch | None:
    """The running node's branch with `prompt` in place, if the prompt goes on with its text.

    None outside of nodes, for another engine's branch, and while somebody generates on it.
    """
    branch = current_branch()
    if branch is None or branch.engine is not engine or not branch.alive:
        return None
    own = branch.full_tokens
    if list(prompt[: len(own)]) != own:
        return None
    try:
        branch.attempt()
        if len(prompt) > len(own):
            branch.append(prompt[len(own) :])
    except (NodeError, SessionError):
        return None
    return branch


def rows_there(branch: Branch, upto: int) -> int:
    """How many of the first `upto` tokens of a branch need not be computed."""
    node = branch.session._tree.get(branch.tip)
    return upto - sum(end - begin for _, begin, end in missing(node, min(upto, node.length)))
