"""`ForkServe`: the object a program holds, beside its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Literal, TypeVar, overload

from langgraph.pregel import Pregel
from langgraph.types import Send
from pydantic import BaseModel

from forkserve.adapters.langchain.current import current_branch
from forkserve.adapters.langgraph import joins
from forkserve.adapters.langgraph.branch import NodeBranch
from forkserve.adapters.langgraph.nodes import Nodes, Parent, Role
from forkserve.adapters.langgraph.registry import Registry
from forkserve.adapters.langgraph.state import Ref, field
from forkserve.adapters.langgraph.stored import close_runs, close_thread
from forkserve.adapters.langgraph.sweeper import Sweeper
from forkserve.api import Engine
from forkserve.errors import AdapterError, ConfigError
from forkserve.prompt_text import PromptText
from forkserve.session import Prompt
from forkserve.types import Tokens

__all__ = ["ForkServe"]

F = TypeVar("F", bound=Callable[..., Any])
_COUNTERS = (
    *("opened", "reopened", "forks", "sealed", "committed"),
    *("aborted", "swept", "kept", "copied", "turns", "resumed", "unchosen"),
)
G = TypeVar("G", bound="Pregel[Any, Any, Any, Any]")


class ForkServe:
    """Forking for the nodes of LangGraph graphs, over one engine.

    render: state to prompt, as text, token ids or chat messages.  Called where a run with
    an input begins, and to re-open where a ref is foreign or dead; not to resume.  By default the
    state's ``messages``, or its ``prompt``.
    keep: sessions of threads that stay open between runs, the least used go first.  Their refs
    re-open from rendered state, and shared pages come back from the prefix index.
    stream_stats: report each node on the ``custom`` stream, under the key ``forkserve``.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        render: Callable[[Any], Prompt] | None = None,
        keep: int = 64,
        stream_stats: bool = True,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"ForkServe needs an Engine, not {type(engine).__name__}")
        self.engine = engine
        self._registry = Registry(engine, keep)
        close_runs(self._registry)
        self._sweeper = Sweeper(self._registry)
        self._nodes = Nodes(self._registry, self._sweeper, render or default_render, stream_stats)

    # ---------------------------------------------------------------- building graphs

    @overload
    def node(self, fn: F) -> F: ...
    @overload
    def node(
        self,
        fn: None = None,
        *,
        role: Role | Literal["auto"] = "auto",
        inject: str = "fork",
        parent: Parent | None = None,
        render: bool = False,
    ) -> Callable[[F], F]: ...
    def node(
        self,
        fn: F | None = None,
        *,
        role: Role | Literal["auto"] = "auto",
        inject: str = "fork",
        parent: Parent | None = None,
        render: bool = False,
    ) -> F | Callable[[F], F]:
        """Decorate a node: it gets a branch of its own as `fork`, if it has such a parameter.

        role: *trunk* commits what it added when it returns, and moves ``fork_tip``; *branch* seals
        and adds a ref to ``fork_refs``; *join* may call `commit_winner`, `join` or `join_text`,
        and its own branch is scratch.  auto: a Send makes a branch, anything else a trunk.
        parent: state to the ref it leaves from, instead of ``fork_parent`` or ``fork_tip``.
        render: begin at what the state renders to whenever the node is entered, as a turn begins:
        in a loop of model and tools the state has results that no node has put into the trunk.

        Works on functions, coroutine functions, methods, partials and callable objects, and under
        ``@task`` and ``@entrypoint`` of the functional API: a task is a branch that leaves from a
        ref among its arguments, or from what calls it.
        """

        def decorate(function: F) -> F:
            return self._nodes.wrap(function, role, inject, parent, render)

        return decorate if fn is None else decorate(fn)

    def send(
        self,
        node: str,
        arg: Any = None,
        *,
        parent: Ref | None = None,
        text: str | Tokens = (),
        timeout: Any = None,
    ) -> Send:
        """A Send whose node leaves from `parent`: by default the running node's branch, else the
        graph's ``fork_tip``.

        text: what its branch begins with; `Branch.hint` may have prefilled it.
        """
        here = current_branch()
        if parent is None and isinstance(here, NodeBranch):
            parent = here.ref
        extra: dict[str, Any] = {}
        if parent is not None:
            extra["fork_parent"] = {**parent, "branch": 0}  # what leaves here is a new branch
        elif arg is None or isinstance(arg, Mapping):
            extra["fork_parent"] = {}  # from the root; a subgraph sees that it is a branch
        if text:
            if isinstance(text, PromptText):  # its marks would not outlive a checkpoint
                text = self.engine.backend.tokenizer.encode(text)
            extra["fork_text"] = text if isinstance(text, str) else list(text)
        more = {} if timeout is None else {"timeout": timeout}
        return Send(node, _with(arg, extra), **more)

    def bind(self, graph: G) -> G:
        """The compiled graph with the sweeper installed.  Nodes refuse to run without it."""
        return graph.with_config(callbacks=[self._sweeper])

    # ---------------------------------------------------------------- joins

    def commit_winner(
        self, refs: Sequence[Ref], best: joins.Best = 0, *, text: str | Tokens | None = None
    ) -> dict[str, Any]:
        """Choose a branch: its text becomes the trunk's, the others are aborted.

        best: index into `refs`, one of them, or a function from refs to either.  A branch above the
        winner stays with it.  Returns the update for the state; the choice is carried out when the
        node has ended well.  text: the winner's text, for when its ref is foreign or dead (another
        process, time travel to before a choice that was made otherwise); without it the trunk goes
        on where it was.  A winner of another run, out of a node cache, is copied.
        """
        return joins.commit_winner(self._registry, self._join(), refs, best, text)

    def join(self, refs: Sequence[Ref], scaffold: str | Tokens = ()) -> dict[str, Any]:
        """The trunk goes on with `scaffold` and then the text of all branches, in order.

        Raises AdapterError if one of them is gone: then use `join_text`.
        """
        return joins.join_refs(self._registry, self._join(), refs, scaffold)

    def join_text(self, refs: Sequence[Ref], text: str | Tokens) -> dict[str, Any]:
        """The trunk goes on with `text`, a summary for instance; all branches are aborted."""
        return joins.join_text(self._registry, self._join(), refs, text)

    def leaves(self, refs: Sequence[Ref]) -> list[Ref]:
        """The refs from which no other of them goes on (of nested fan-outs)."""
        return joins.leaves(self._registry, refs)

    def _join(self) -> NodeBranch:
        here = current_branch()
        if (
            not isinstance(here, NodeBranch)
            or here.role != "join"
            or here._registry is not self._registry
        ):
            raise AdapterError(
                "only a join node decides: decorate it with @fs.node(role='join'), and call this "
                "while it runs, in its own task or thread"
            )
        return here

    # ---------------------------------------------------------------- looking in

    def alive(self, ref: Ref) -> bool:
        """Whether a ref names a live node of this engine."""
        return self._registry.find(ref) is not None

    def tokens(self, ref: Ref) -> list[int]:
        """All tokens up to a ref.  Raises AdapterError for a foreign or dead one."""
        live = self._registry.find(ref)
        if live is None:
            where = f"node {ref['node']} of session '{ref['session']}'"
            stored = ", or in the store until a run of its thread brings it back"
            raise AdapterError(f"{where} is gone{stored if self.engine.store is not None else ''}")
        return self.engine.tokens(ref["session"], ref["node"])[: ref["length"]]

    def text(self, ref: Ref) -> str:
        """The same as text, special tokens included."""
        return self.engine.backend.tokenizer.decode_bytes(self.tokens(ref)).decode(
            "utf-8", "replace"
        )

    def forget(self, thread_id: str) -> int:
        """Close the sessions of a thread (beside a saver's `delete_thread`); returns how many.

        Those that the engine's store has from earlier processes are closed there: gc may take them.
        """
        return close_thread(self._registry, str(thread_id))

    @property
    def stats(self) -> dict[str, int]:
        """What happened so far, and what is remembered now.

        opened, reopened, forks, sealed, committed, aborted, swept, kept, copied, turns,
        resumed, unchosen (sealed, and nobody's choice when their run ended): counters.
        sessions, undecided (nodes that run, or that nobody has chosen yet), running: sizes of the
        adapter's maps.
        """
        with self._registry.lock:
            return {
                **{name: self._registry.count[name] for name in _COUNTERS},
                "sessions": len(self._registry.sessions),
                "undecided": len(self._registry.tasks),
                "running": len(self._sweeper.runs),
            }


def default_render(state: Any) -> Prompt:
    """The state's ``messages`` as chat messages, or its ``prompt``."""
    messages = field(state, "messages")
    if messages:
        from langchain_core.messages.utils import convert_to_openai_messages

        return list(convert_to_openai_messages(list(messages)))
    prompt = field(state, "prompt")
    if prompt:
        return prompt  # type: ignore[no-any-return]
    raise AdapterError(
        "the state has neither 'messages' nor 'prompt', so there is nothing to open a session "
        "with: pass ForkServe(engine, render=lambda state: ...)"
    )


def _with(arg: Any, extra: Mapping[str, Any]) -> Any:
    """A Send argument with the adapter's fields."""
    if arg is None or isinstance(arg, Mapping):
        return {**(arg or {}), **extra}
    if isinstance(arg, BaseModel):
        missing = [name for name in extra if name not in type(arg).model_fields]
        if not missing:
            return arg.model_copy(update=dict(extra))
    elif is_dataclass(arg) and not isinstance(arg, type):
        missing = [name for name in extra if not hasattr(arg, name)]
        if not missing:
            return replace(arg, **extra)
    else:
        missing = list(extra)
    raise AdapterError(
        f"a Send argument of type {type(arg).__name__} has no field {', '.join(missing)}; "
        "declare it, or send a dict"
    )
