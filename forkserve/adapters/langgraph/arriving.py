"""What a decorated node is told when it is called: which run, which role, where it leaves from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.constants import START
from langgraph.runtime import ExecutionInfo, Runtime

from forkserve.adapters.langchain.current import running
from forkserve.adapters.langgraph.branch import NodeBranch
from forkserve.adapters.langgraph.registry import Registry, Run
from forkserve.adapters.langgraph.state import Ref, field, is_ref
from forkserve.adapters.langgraph.sweeper import Sweeper
from forkserve.errors import AdapterError

__all__ = ["Arrival", "Kind", "Parent", "Role", "arrive"]

Role = Literal["trunk", "branch", "join"]
Kind = Literal["node", "task", "entrypoint"]
Parent = Callable[[Any], Ref | None]
# In the config of a node: reads the graph's own state (of a Send's task), and the graph's saver.
_READ_STATE, _SAVER = "__pregel_read_state", "__pregel_checkpointer"


@dataclass(slots=True)
class Arrival:
    """One call of a decorated node, before it has a branch.

    ref: where it leaves from, None for a new session.  sent: what a Send or a branch gave it as
    ``fork_parent``.  read: the graph's own state, for the target of a Send.
    """

    name: str
    run: Run
    info: ExecutionInfo
    runtime: Runtime[Any]
    role: Role
    kind: Kind
    push: bool
    index: int | None
    step: int
    state: Any
    sent: Any
    read: Callable[[], Any] | None
    ref: Ref | None
    saver: Any
    began: float

    def tip(self) -> Any:
        """``fork_tip`` of the graph's state, if it has one."""
        here = field(self.state, "fork_tip")
        return here or (field(self.read(), "fork_tip") if self.read is not None else None)

    def rendered(self) -> Any:
        """What to render: the node's input, for a Send laid over the graph's state."""
        if self.read is None or not isinstance(self.state, Mapping):
            return self.state
        graph = self.read()
        if not isinstance(graph, Mapping):
            graph = vars(graph)
        return {**graph, **self.state}

    @property
    def continues(self) -> int:
        """First node of the branch that it is a step of; 0 on the trunk, and where one begins."""
        return 0 if self.push or self.ref is None else self.ref["branch"]

    @property
    def text(self) -> Any:
        """What its branch begins with, if a Send says so and it is the first to leave from it."""
        first = self.push or (self.sent is not None and not self.sent.get("branch"))
        return (field(self.state, "fork_text") if first else None) or ()


def arrive(
    registry: Registry,
    sweeper: Sweeper,
    role: Role | Literal["auto"],
    parent: Parent | None,
    args: Sequence[Any],
    more: Mapping[str, Any],
    config: RunnableConfig,
    runtime: Runtime[Any],
) -> Arrival:
    """Read a call.  AdapterError when its graph is not bound."""
    began, metadata = time.perf_counter(), config.get("metadata", {})
    name = str(metadata.get("langgraph_node", "node"))
    run = sweeper.runs.get(getattr(config.get("callbacks"), "parent_run_id", None))  # type: ignore[arg-type]
    info = runtime.execution_info
    if run is None or info is None:
        raise AdapterError(
            f"node '{name}' runs in a graph that is not bound, so nobody would know when its "
            "branches are over: wrap the compiled graph with fs.bind(graph)"
        )
    path: tuple[Any, ...] = metadata.get("langgraph_path") or ()
    push = bool(path) and path[0] == "__pregel_push"
    kind: Kind = "task" if push and path[3:] == (True,) else "node"
    if START in metadata.get("langgraph_triggers", ()):
        kind = "entrypoint"
    given = [*args, *more.values()]
    state = args[-1] if args else (given or [None])[-1]
    configurable = config.get("configurable", {})
    saver = configurable.get(_SAVER)
    if saver is None:  # nobody will come back, whatever thread it is said to be
        run.thread = None
    read = configurable.get(_READ_STATE) if push else None
    sent = field(state, "fork_parent")
    ref = (parent(state) if parent else None) or sent or field(state, "fork_tip") or None
    if ref is None and kind == "task":
        ref = next((value for value in given if is_ref(value)), None) or _caller(registry)
        ref = {**ref, "branch": 0} if ref is not None else None
    elif ref is None and kind == "entrypoint":
        ref = field(runtime.previous, "fork_tip")
    elif ref is None and read is not None:
        ref = field(read(), "fork_tip")
    chosen: Role
    if role != "auto":
        chosen = role
    else:
        chosen = "branch" if push or sent is not None else "trunk"
    return Arrival(
        name=name,
        run=run,
        info=info,
        runtime=runtime,
        role=chosen,
        kind=kind,
        push=push,
        index=next((part for part in path[1:3] if type(part) is int), None) if push else None,
        step=int(metadata.get("langgraph_step", 0)),
        state=state,
        sent=sent,
        read=read,
        ref=ref,
        saver=saver,
        began=began,
    )


def _caller(registry: Registry) -> Ref | None:
    """Where the node, task or entrypoint is that calls this task; a join's own is scratch."""
    here = running.get()
    if not isinstance(here, NodeBranch) or here._registry is not registry:
        return None
    return here.base if here.role == "join" else here.ref
