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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphBubbleUp, ParentCommand
from langgraph.runtime import Runtime

from forkserve import aio
from forkserve.adapters.langchain.current import running
from forkserve.adapters.langgraph import joins, turns
from forkserve.adapters.langgraph.arriving import Arrival, Kind, Parent, Role, arrive
from forkserve.adapters.langgraph.branch import NodeBranch
from forkserve.adapters.langgraph.output import merge_output, save_tip
from forkserve.adapters.langgraph.registry import Fork, Live, Registry, Run
from forkserve.adapters.langgraph.state import Ref, field
from forkserve.adapters.langgraph.stored import look, may_wait
from forkserve.adapters.langgraph.sweeper import Sweeper
from forkserve.branch import Branch
from forkserve.errors import AdapterError, NodeError
from forkserve.session import Prompt
from forkserve.values import flag

_log = logging.getLogger(__name__)

__all__ = ["Nodes", "Parent", "Role"]

F = TypeVar("F", bound=Callable[..., Any])


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

    def wrap(
        self,
        fn: F,
        role: Role | Literal["auto"],
        inject: str,
        parent: Parent | None,
        render: bool,
    ) -> F:
        """The node around `fn`, with a signature that LangGraph reads as it would read `fn`'s."""
        if role not in ("auto", "trunk", "branch", "join"):
            raise AdapterError(f"unknown role {role!r}; use auto, trunk, branch or join")
        render = flag("render", render)
        signature = inspect.signature(fn)
        wants = {name for name in ("config", "runtime", inject) if name in signature.parameters}
        ours = self._registry, self._sweeper

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
                at = arrive(*ours, role, parent, args, more, config, runtime)
                call = self._enter(at, await self._aplace(at, render))
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
                at = arrive(*ours, role, parent, args, more, config, runtime)
                call = self._enter(at, self._place(at, render))
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

    def _place(self, at: Arrival, render: bool) -> Fork:
        """The branch of a call.  It may wait: for the saver, the store, a session to open."""
        registry, run, ref = self._registry, at.run, at.ref
        if render and at.kind != "node":
            raise AdapterError(
                f"{at.kind} '{at.name}' has render=True, which is for nodes of a graph: append "
                "what is new to its branch instead"
            )
        look(registry, run, ref, at.saver if at.kind == "node" else None)
        stale = False
        if at.kind == "node" and ref is not None:
            stale = render or turns.before(registry, run, ref, at.tip)
        live, base = self._resolve(at, stale)
        fork = registry.fork(run, at.info.task_id, live, base, at.name, at.text)
        fork.branch = 0 if stale else at.continues
        return fork

    async def _aplace(self, at: Arrival, render: bool) -> Fork:
        """`_place` for a coroutine: in a thread, if it could wait."""
        if not may_wait(self._registry, at.run):
            return self._place(at, render)
        work = partial(copy_context().run, self._place, at, render)
        return await aio.in_thread(work, undo=self._registry.retract)

    def _enter(self, at: Arrival, fork: Fork) -> Call:
        branch = NodeBranch(
            self._registry,
            at.run,
            fork,
            role=at.role,
            state=at.state,
            index=at.index,
            attempt=at.info.node_attempt,
            step=at.step,
        )
        return Call(branch, at.run, fork.live, at.runtime, at.kind, running.set(branch), at.began)

    def _resolve(self, at: Arrival, stale: bool) -> tuple[Live, Ref]:
        """The live node that a ref names; for a stale one where the turn begins; a new session."""
        registry, run, ref = self._registry, at.run, at.ref
        if ref is not None and stale:
            return turns.begin(registry, run, ref, self._render(at.rendered()))
        live = registry.hold(run, ref) if ref is not None else None
        if live is not None and ref is not None:
            tree = registry.engine.tree(live.session.id)
            node = tree.get(ref["node"])
            if node.length == ref["length"]:
                return live, ref
            prompt: Prompt = tree.tokens(node, 0, ref["length"]).tolist()  # it has grown since
        else:
            prompt = self._render(at.rendered())
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
        """Whether leaving moves the main line, which waits for the pass in flight, or writes."""
        branch = call.branch
        if self._registry.engine.store is not None:
            return True
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
