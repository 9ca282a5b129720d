"""The engine: a tree of tokens in the program's hands.

    open  fork  speculate  commit  join  abort  generate

Every verb happens whole, or raises a `ForkServeError` and changes nothing.  Sessions and nodes are
named by (session id, node id); a dead or foreign name is a typed error.  All verbs may be called
from any thread: commits, joins and promotions of one session take turns, and what would change a
node while a generation runs on it is a SessionError.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forkserve.config import ForkServeConfig
from forkserve.control import lines, merging
from forkserve.control.commit import CommitResult
from forkserve.control.core import Core
from forkserve.control.join import JoinResult, plan_join
from forkserve.control.retention import ttl_s
from forkserve.engine.protocol import require_backend
from forkserve.errors import ConfigError, NodeError
from forkserve.handle import SessionHandle
from forkserve.opening import Opening
from forkserve.types import JoinPolicy, NodeMode, Tokens
from forkserve.values import flag, listed, number, string

if TYPE_CHECKING:
    from forkserve.engine.protocol import Backend
    from forkserve.store import Store

__all__ = ["Engine", "SessionHandle"]

_NOTHING: Tokens = ()

_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def _claim(backend: Backend, engine: Engine) -> None:
    """One engine at a time: two would hand out the same pages twice."""
    known = _owners.get(backend)
    other = known() if known is not None else None
    loop = getattr(other, "_loop", None)
    if loop is not None and not loop.stopped:
        raise ConfigError(
            "this backend already serves an engine; shut that one down first, or make another "
            "backend"
        )
    _owners[backend] = weakref.ref(engine)


class Engine(Opening):
    """Verbs over a backend.

    config: defaults to the backend's.  With ``config.background`` the loop runs in a thread of its
    own; otherwise it runs in whichever thread waits (`generate`, `drain_slack`, ...).
    store: a directory, or a `forkserve.store.Store`: sessions are then kept there (`resume`), and
    states can be published and restored.  The engine closes what it opened itself.
    """

    def __init__(
        self,
        backend: Backend,
        config: ForkServeConfig | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
    ) -> None:
        require_backend(backend)
        if config is not None and config != backend.config:
            raise ConfigError("engine and backend have different configs; give both the same one")
        mine = store is not None and isinstance(store, (str, os.PathLike))
        _claim(backend, self)
        if store is not None:
            from forkserve.store import Store

            if isinstance(store, (str, os.PathLike)):
                store = Store(store)
            elif not isinstance(store, Store):
                raise ConfigError(
                    f"store={store!r} is {type(store).__name__}; give a directory, or a "
                    "forkserve.store.Store"
                )
        try:
            super().__init__(Core(backend), store)
        except BaseException:
            if mine and store is not None:
                store.close()
            raise
        self._closes_store = mine
        if self.config.background:  # an engine that is dropped must not leave its thread behind
            weakref.finalize(self, self._loop.retire)

    # ---------------------------------------------------------------- branches

    def fork(
        self,
        session: str,
        parent: int,
        branch: str = "",
        tokens: Tokens | str = (),
        *,
        at: int | None = None,
    ) -> int:
        """A speculative child of `parent` that shares everything before it.  Returns its node id.

        Costs the same however long the trunk is: no page is touched.  `tokens` is the text that is
        known to follow on this branch.  at: leave the parent's path after that many tokens, rather
        than at its end; the child hangs under the node that holds them.
        """
        # Flat, for its first call after a pass: whatever it touches then comes from far memory.
        core, ids = self._core, _NOTHING if tokens is _NOTHING else self._guard.ids(tokens)
        if branch.__class__ is not str:
            string("branch", branch)
        with core.lock:
            try:
                tree = core.trees[session]
                node = tree.nodes[parent]
            except (KeyError, TypeError):
                tree = core.tree(session)
                node = tree.get(parent)  # what isn't there is an error that says why
            if core.closing:
                core.tree(session)
            length = end = node.alias_len + len(node.tokens)
            if at is not None:
                length = self._guard.place(node, at)
                if length < end:
                    node = tree.owner(node, length)
            if ids:
                self._guard.fits(length + len(ids), "branch")
            core.count.forks += 1
            if self._mover is not None:
                self._expected(tree, node)
            return tree.fork(node, branch, ids, core.clock.now_ms(), length).id

    def append(self, session: str, node: int, tokens: Tokens | str) -> int:
        """Add known text to a speculative node or to the tip of a line; returns its new length.

        Nodes forked before keep the view they forked from.
        """
        ids = self._guard.ids(tokens)
        with self._core.lock:
            self._loop.check()  # what changes after a shutdown is written by nobody
            tree = self._core.tree(session)
            target = tree.get(node)
            self._guard.fits(target.length + len(ids), "sequence")
            self._guard.idle(tree, target)
            if target.mode is not NodeMode.SPEC:
                lines.require_tip(tree, target, "append to")
            lines.require_known(target)
            tree.extend(target, ids)
            target.known = length = target.length
        if target.mode is not NodeMode.SPEC:
            self._saved(session, now=True)
        return length

    def attempt(self, session: str, node: int) -> int:
        """Run a branch for real: it becomes the committed tip of a line of its own.

        Unlike a guess, an attempt may be generated on and committed to while the main line and
        other attempts live on.  A commit on its parent that observes its text adopts it.
        """
        with self._core.lock:
            self._loop.check()
            tree = self._core.tree(session)
            lines.attempt(self._core, tree, tree.get(node))
        self._saved(session, now=True)
        return node

    def promote(self, session: str, node: int) -> int:
        """Make a live node the tip of the main line without an observation; returns its id.

        What the main line held beyond the common ancestor becomes a line of its own, idle.
        """
        with self._guard.settled(session) as tree:
            self._guard.idle(tree, tree.tip)
            lines.promote(self._core, tree, tree.get(node))
        self._saved(session, now=True)
        return node

    def abort(
        self, session: str, node: int, *, lazy: bool | None = None, cascade: bool = True
    ) -> int:
        """Drop a branch and all below it; returns the pages that became free.

        Only what the branch wrote is given back, whatever the length of its trunk.  lazy: mark
        now, reclaim in `drain_aborts` (default: config.lazy_abort).  cascade: also drop speculative
        ancestors that are left without a child.  Aborting a dead node does nothing.
        """
        core = self._core
        late = self.config.lazy_abort if lazy is None else flag("lazy", lazy)
        cascade = flag("cascade", cascade)
        with core.lock:
            tree = core.tree(session)
            if tree.is_dead(node):
                return 0
            target = tree.get(node)
            kept = target.mode is not NodeMode.SPEC
            freed = lines.abort(core, tree, target, lazy=late, cascade=cascade)
        if kept:
            self._saved(session, now=True)
        return freed

    def drain_aborts(self) -> int:
        """Give back the pages of lazily aborted branches; returns how many became free."""
        with self._core.lock:
            return self._core.drain()

    def mark_idle(self, session: str, node: int, tool_s: float) -> float:
        """The tip waits for a tool of about `tool_s` seconds; returns its time to live in s.

        When that is over the node's own KV may be dropped.  Its tokens stay: the next commit on it
        brings the rows back by prefill.
        """
        core = self._core
        tool_s = number("tool_s", tool_s)
        with core.lock:
            tree = core.tree(session)
            target = tree.get(node)
            self._guard.idle(tree, target)
            lines.require_tip(tree, target, "idle")
            rows = target.kv_end - target.kv_begin
            reload_s = core.backend.predict_ms(rows, target.kv_begin) / 1e3 if rows else 0.0
            pages = core.pool.pages_for(rows)
            life = ttl_s(tool_s, reload_s, 0.0, 1.0, pages, self.config)
            tree.set_mode(target, NodeMode.IDLE)
            core.arm(target, core.clock.now_ms() + life * 1e3)
            self._idled(tree, target, tool_s)
            return life

    # ---------------------------------------------------------------- commit and join

    def commit(
        self,
        session: str,
        node: int,
        tokens: Tokens | str,
        *,
        full: bool = False,
        branch: str | None = None,
        at: int | None = None,
    ) -> CommitResult:
        """Bind what was really observed after `node`, the tip of its line.

        tokens: the observation; with full=True the whole sequence, which must extend the node's.
        at: the observation follows the line's first `at` tokens, not all of them; the line is taken
        back to there first, and what it held after them is dropped with the branches on it (a chat
        template that writes an earlier turn anew).
        The live child with the longest common prefix wins (ties: the one named `branch`, then the
        lowest id) and is cut where the observation differs; only the rest is prefilled, as
        committed work of the passes to come, and the other speculative children are aborted.  If
        no child fits, a new node is made, and `branch` is its name: no branch need have it before.
        """
        full = flag("full", full)
        observed = self._guard.ids(tokens, begins=full)
        if branch is not None:
            string("branch", branch)
        self._touched(session, node)
        with self._guard.settled(session) as tree:
            target = tree.get(node)
            self._guard.idle(tree, target)
            lines.require_tip(tree, target, "commit at")
            length = self._guard.place(target, at)
            if full and length < target.length:
                raise ConfigError("commit takes full=True or at=, not both")
            if full:
                own = tree.tokens(target).tolist()
                if isinstance(tokens, str) and observed[: len(own)] != own:
                    observed = self._guard.ids(tokens)  # begun without begin-of-text
                if observed[: len(own)] != own:
                    raise NodeError(
                        f"the full sequence of {len(observed)} tokens does not extend the "
                        f"{len(own)} tokens of node {node}"
                    )
                observed = observed[len(own) :]
            if not observed:
                raise ConfigError("commit needs at least one observed token")
            self._guard.fits(length + len(observed), "sequence")
            result = merging.commit(self._core, tree, target, length, observed, branch)
        self._saved(session, now=True)
        return result

    def join(
        self,
        session: str,
        children: Sequence[int],
        policy: JoinPolicy | str = JoinPolicy.ALL,
        *,
        scaffold: Tokens | str = (),
        blend: Tokens | str | None = None,
        k: int | None = None,
        parent: int | None = None,
    ) -> JoinResult:
        """One committed continuation from several branches; see `forkserve.control.join`.

        It hangs under the common parent (or `parent`), which must be the tip of its line.
        """
        opening = self._guard.ids(scaffold)
        blended = self._guard.ids(blend) if blend is not None else None
        inputs = listed("children", children)
        with self._guard.settled(session) as tree:
            plan = plan_join(tree, inputs, policy, opening, blended, k, parent)
            self._guard.idle(tree, plan.parent)
            lines.require_tip(tree, plan.parent, "join at")
            self._guard.fits(plan.parent.length + len(plan.tokens), "join")
            self._core.count.joins += 1
            result = merging.join(self._core, tree, plan, JoinPolicy(policy))
        self._saved(session, now=True)
        return result
