"""LangGraph on a tree: nodes fork, Send branches run as attempts, the join commits.

::

    fs = ForkServe(engine)

    class State(ForkState): ...

    @fs.node
    async def research(state, fork: Branch): ...

    def fan(state):
        tip = state["fork_tip"]
        return [fs.send("research", {"topic": t}, parent=tip) for t in state["topics"]]

    @fs.node(role="join")
    def pick(state, fork):
        return fs.commit_winner(state["fork_refs"], best)

    graph = fs.bind(builder.compile(checkpointer=saver))

docs/adapters/langgraph.md says what each LangGraph event does to the tree.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forkserve.errors import MissingExtra

if find_spec("langgraph") is None:
    raise MissingExtra("the LangGraph adapter", "langgraph", "langgraph")

if TYPE_CHECKING:
    from forkserve.adapters.langgraph.adapter import ForkServe
    from forkserve.adapters.langgraph.branch import NodeBranch as Branch
    from forkserve.adapters.langgraph.cache import cache_key
    from forkserve.adapters.langgraph.middleware import ForkServeMiddleware
    from forkserve.adapters.langgraph.state import ForkBranchState, ForkModel, ForkState, Ref

_HOMES = {
    "Branch": ("branch", "NodeBranch"),
    "ForkBranchState": ("state", "ForkBranchState"),
    "ForkModel": ("state", "ForkModel"),
    "ForkServe": ("adapter", "ForkServe"),
    "ForkServeMiddleware": ("middleware", "ForkServeMiddleware"),
    "ForkState": ("state", "ForkState"),
    "Ref": ("state", "Ref"),
    "cache_key": ("cache", "cache_key"),
}

__all__ = [
    "Branch",
    "ForkBranchState",
    "ForkModel",
    "ForkServe",
    "ForkServeMiddleware",
    "ForkState",
    "Ref",
    "cache_key",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value
