"""The node decorator: what happens when a node is entered and left.

==============================  ========================================================
the node                        its branch
==============================  ========================================================
is entered                      forked; an earlier one of the same task is taken back
returns, trunk                  committed: the main line goes on with it
returns, branch                 sealed: a ref is added, somebody else decides
returns, join                   the decision is carried out; its own branch is aborted
raises or is cancelled          aborted at once
is interrupted                  held; on resume the node runs anew and forks anew
raises ``Command(graph=...)``   as if it had returned
==============================  ========================================================

Tasks and entrypoints of the functional API are nodes too.  They have no state to write to: a task's
value is its own, and an entrypoint's saved mapping gets ``fork_tip``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from langchain_core.runnables import RunnableConfig
from langgraph.constants import START
from langgraph.errors import GraphBubbleUp, ParentCommand
from langgraph.runtime import Runtime

from forkserve import aio
from forkserve.adapters.langchain.current import running
from forkserve.adapters.langgraph import joins, turns
from forkserve.adapters.langgraph.branch import NodeBranch
from forkserve.adapters.langgraph.output import merge_output, save_tip
from forkserve.adapters.langgraph.registry import Live, Registry, Run
from forkserve.adapters.langgraph.state import Ref, field, is_ref
from forkserve.adapters.langgraph.stored import revive
from forkserve.adapters.langgraph.sweeper import Sweeper
from forkserve.branch import Branch
from forkserve.errors import AdapterError, NodeError
from forkserve.session import Prompt

_log = logging.getLogger(__name__)

__all__ = ["Nodes", "Parent", "Role"]

F = TypeVar("F", bound=Callable[..., Any])
Role = Literal["trunk", "branch", "join"]
Kind = Literal["node", "task", "entrypoint"]
Parent = Callable[[Any], Ref | None]
_READ_STATE = "__pregel_read_state"  # in the config of a Send's task: reads the graph's own state


@dataclass(slots=True)
class Call:
    """One call of a decorated node."""

    branch: NodeBranch
    run: Run
    live: Live
    runtime: Runtime[Any]
    kind: Kind
    token: Token[Branch | None]
    began: float


class Nodes:
    """Makes decorated nodes of one adapter."""

    def __init__(
        self,
        registry: Registry,
        sweeper: Sweeper,
        render: Callable[[Any], Prompt],
        stream_stats: bool,
    ) -> None:
        self._registry = registry
        self._sweeper = sweeper
        self._render = render
        self._stream_stats = stream_stats

    def wrap(self, fn: F, role: Role | Literal["auto"], inject: str, parent: Parent | None) -> F:
        """The node around `fn`, with a signature that LangGraph reads as it would read `fn`'s."""
        if role not in ("auto", "trunk", "branch", "join"):
            raise AdapterError(f"unknown role {role!r}; use auto, trunk, branch or join")
        signature = inspect.signature(fn)
        wants = {name for name in ("config", "runtime", inject) if name in signature.parameters}

        def given(call: Call, config: RunnableConfig) -> dict[str, Any]:
            own = {"config": config, "runtime": call.runtime, inject: call.branch}
            return {name: own[name] for name in wants}

        node: Any
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - whether calling it gives a coroutine
        ):

            async def anode(
                *args: Any, config: RunnableConfig, runtime: Runtime[Any], **more: Any
            ) -> Any:
                call = self._enter(role, parent, args, more, config, runtime)
                with self._entered(call):
                    out = await fn(*args, **more, **given(call, config))
                    if self._waits(call):
                        extra = await aio.in_thread(
                            lambda: self._succeed(call), undo=lambda _: self._undo(call)
                        )
                    else:
                        extra = self._succeed(call)
                return self._leave(call, out, extra)

            node = anode
        else:

            def snode(
                *args: Any, config: RunnableConfig, runtime: Runtime[Any], **more: Any
            ) -> Any:
                call = self._enter(role, parent, args, more, config, runtime)
                with self._entered(call):
                    out = fn(*args, **more, **given(call, config))
                    extra = self._succeed(call)
                return self._leave(call, out, extra)

            node = snode
        functools.update_wrapper(node, fn)
        if not hasattr(fn, "__name__"):  # partials and callable objects
            inner = getattr(fn, "func", fn)
            node.__name__ = getattr(inner, "__name__", type(inner).__name__)
            hinted = inner if hasattr(inner, "__name__") else type(inner).__call__
            node.__annotations__ = dict(getattr(hinted, "__annotations__", {}))
        node.__signature__ = _signature(signature, inject)
        return cast(F, node)

    # ---------------------------------------------------------------- entering

    def _enter(
        self,
        role: Role | Literal["auto"],
        parent: Parent | None,
        args: Sequence[Any],
        more: Mapping[str, Any],
        config: RunnableConfig,
        runtime: Runtime[Any],
    ) -> Call:
        began, registry = time.perf_counter(), self._registry
        metadata = config.get("metadata", {})
        name = str(metadata.get("langgraph_node", "node"))
        run = self._sweeper.runs.get(getattr(config.get("callbacks"), "parent_run_id", None))  # type: ignore[arg-type]
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
        read = config.get("configurable", {}).get(_READ_STATE) if push else None
        sent = field(state, "fork_parent")
        ref = (parent(state) if parent else None) or sent or field(state, "fork_tip") or None
        if ref is None and kind == "task":
            ref = next((value for value in given if is_ref(value)), None) or self._caller()
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
        nested = "|" in str(metadata.get("langgraph_checkpoint_ns", ""))
        step = None if nested else int(metadata.get("langgraph_step", 0))

        def tip() -> Any:
            return field(state, "fork_tip") or (read is not None and field(read(), "fork_tip"))

        if ref is not None:
            revive(registry, run, ref, step)
        stale = kind == "node" and ref is not None and turns.before(registry, run, ref, tip, step)
        live, base = self._resolve(run, ref, state, read, stale)
        continues = 0 if push or ref is None or stale else ref["branch"]
        first = push or (sent is not None and not sent.get("branch"))
        text = field(state, "fork_text") if first else None
        fork = registry.fork(run, info.task_id, live, base, name, text or ())
        fork.branch = continues
        branch = NodeBranch(
            registry,
            run,
            fork,
            role=chosen,
            state=state,
            index=next((part for part in path[1:3] if type(part) is int), None) if push else None,
            attempt=info.node_attempt,
            step=int(metadata.get("langgraph_step", 0)),
        )
        return Call(branch, run, live, runtime, kind, running.set(branch), began)

    def _caller(self) -> Ref | None:
        """Where the node, task or entrypoint is that calls this task; a join's own is scratch."""
        here = running.get()
        if not isinstance(here, NodeBranch) or here._registry is not self._registry:
            return None
        return here.base if here.role == "join" else here.ref

    def _resolve(
        self,
        run: Run,
        ref: Ref | None,
        state: Any,
        read: Callable[[], Any] | None,
        stale: bool,
    ) -> tuple[Live, Ref]:
        """The live node that a ref names; for a stale one where the turn begins; a new session."""
        registry = self._registry
        live = registry.find(ref) if ref is not None else None
        if ref is not None and stale:
            return turns.begin(registry, run, ref, self._render(_rendered(state, read)))
        if live is not None and ref is not None:
            tree = registry.engine.tree(live.session.id)
            node = tree.get(ref["node"])
            if node.length == ref["length"]:
                return live, ref
            prompt: Prompt = tree.tokens(node, 0, ref["length"]).tolist()  # it has grown since
        else:
            prompt = self._render(_rendered(state, read))
        why: tuple[object, ...] = ()
        if ref is not None:
            why = ref["engine"], ref["session"], ref["node"], ref["length"]
        before = registry.count["opened"]
        live = registry.open(run, prompt, why)
        if ref is not None and registry.count["opened"] > before:
            registry.count["reopened"] += 1
            _log.warning(
                "session '%s' of thread '%s' is gone, and no store of this engine has it: its %d "
                "tokens are replaced by the %d that the state renders to, and what nodes generated "
                "or appended and the state does not hold is lost",
                *(
                    ref["session"],
                    run.thread,
                    ref["length"],
                    len(live.session.branch(1).full_tokens),
                ),
            )
        return live, registry.ref(live, live.session.branch(1).id)

    # ---------------------------------------------------------------- leaving

    def _waits(self, call: Call) -> bool:
        """Whether leaving moves the main line, which waits for the pass in flight."""
        branch = call.branch
        return branch._decision is not None or (branch.role == "trunk" and branch.added > 0)

    def _succeed(self, call: Call) -> dict[str, Any]:
        """Commit, seal or decide; the adapter's part of the update."""
        branch, registry, fork = call.branch, self._registry, call.branch._fork
        if call.run.ended:
            raise NodeError(f"the run of node '{branch.name}' ended before the node did")
        extra: dict[str, Any] = {}
        if branch.role == "join":
            joins.apply(registry, branch)
            if branch._decision is None and field(branch.state, "fork_refs"):
                call.run.idle_joins.add(branch.name)
            registry.abort(call.live, fork.node)
        elif branch.role == "branch":
            branch.attempt()
            fork.phase = "sealed"
            registry.count["sealed"] += 1
            extra = {"fork_refs": [branch.ref]}
            if field(branch.state, "fork_parent") is not None and branch.index is None:
                # a step of a subgraph that is a branch
                extra["fork_parent"] = branch.ref
        elif fork.node not in call.live.forks and call.kind == "entrypoint":
            pass  # a task that decided has made it part of the trunk
        elif branch.added:
            branch.attempt()
            extra = {"fork_tip": branch.ref}
            branch.promote()
            turns.moved(call.run, call.live, branch.ref)
            fork.phase = "done"
            registry.count["committed"] += 1
        else:  # it added nothing
            extra = {"fork_tip": branch.base}
            turns.moved(call.run, call.live, branch.base)
            registry.abort(call.live, fork.node)
        if call.kind == "entrypoint":
            extra = {"fork_tip": self._trunk(call)}
        return extra

    def _trunk(self, call: Call) -> Ref:
        """Where an entrypoint leaves the trunk: tasks may have moved it."""
        base, live = call.branch.base, call.live
        tip = self._registry.engine.tree(live.session.id).tip
        on = tip.id == base["node"] or any(above.id == base["node"] for above in tip.ancestors())
        return self._registry.ref(live, tip.id) if on else base

    def _undo(self, call: Call) -> None:
        """The node was cancelled while it was being committed."""
        self._registry.retract(call.branch._fork)

    @contextmanager
    def _entered(self, call: Call) -> Iterator[None]:
        """The node runs: what it raises ends its branch, and the branch is current no more."""
        try:
            yield
        except BaseException as error:
            instead = self._failed(call, error)
            if instead is not None:
                raise instead from error
            raise
        finally:
            running.reset(call.token)

    def _failed(self, call: Call, error: BaseException) -> BaseException | None:
        """The branch goes, or is held; what to raise instead, if anything."""
        fork = call.branch._fork
        if isinstance(error, ParentCommand):
            extra = self._succeed(call)
            self._report(call)
            return ParentCommand(merge_output(error.args[0], extra))
        if isinstance(error, GraphBubbleUp) and call.branch.role != "join":
            fork.phase = "held"
            self._registry.count["held"] += 1
        elif fork.phase == "done":
            self._undo(call)
        else:
            try:
                self._registry.abort(call.live, fork.node)
            except NodeError:  # the node itself had it promoted
                self._registry.decided(fork)
        return None

    def _leave(self, call: Call, out: Any, extra: Mapping[str, Any]) -> Any:
        self._report(call, extra)
        if call.kind == "task":
            return out
        if call.kind == "entrypoint":
            return save_tip(out, extra["fork_tip"])
        return merge_output(out, extra)

    def _report(self, call: Call, extra: Mapping[str, Any] | None = None) -> None:
        if not self._stream_stats:
            return
        branch = call.branch
        refs = (extra or {}).get("fork_refs") or ()
        end = (extra or {}).get("fork_tip") or (
            refs[0] if isinstance(refs, list) and refs else None
        )
        call.runtime.stream_writer(
            {
                "forkserve": {
                    "node": branch.name,
                    "role": branch.role,
                    "index": branch.index,
                    "attempt": branch.attempt_number,
                    "session": call.live.session.id,
                    "parent": branch.base["node"],
                    "shared_tokens": branch.base["length"],
                    "added_tokens": end["length"] - branch.base["length"] if end else 0,
                    "ms": round((time.perf_counter() - call.began) * 1e3, 3),
                }
            }
        )


def _rendered(state: Any, read: Callable[[], Any] | None) -> Any:
    """What to render: the node's input, for a Send laid over the graph's state."""
    if read is None or not isinstance(state, Mapping):
        return state
    graph = read()
    if not isinstance(graph, Mapping):
        graph = vars(graph)
    return {**graph, **state}


def _signature(signature: inspect.Signature, inject: str) -> inspect.Signature:
    """The user's, without the branch and with `config` and `runtime`."""
    kept = [p for p in signature.parameters.values() if p.name not in (inject, "config", "runtime")]
    last = [p for p in kept if p.kind is inspect.Parameter.VAR_KEYWORD]
    first = [p for p in kept if p.kind is not inspect.Parameter.VAR_KEYWORD]
    ours = [
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=RunnableConfig),
        inspect.Parameter("runtime", inspect.Parameter.KEYWORD_ONLY, annotation=Runtime),
    ]
    return signature.replace(parameters=[*first, *ours, *last])
