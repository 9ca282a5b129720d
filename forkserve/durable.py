"""The verbs over a store: publish, restore, resume, warm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from forkserve.control.experience import Experience
from forkserve.control.lines import require_quiet
from forkserve.engine.protocol import Portable
from forkserve.errors import ConfigError, NodeError, SessionError, StoreError
from forkserve.handle import SessionHandle
from forkserve.restoring import Restoring
from forkserve.tree.node import Node
from forkserve.tree.revive import revive
from forkserve.tree.tree import ContextTree, committed
from forkserve.values import text
from forkserve.warming import Warmed, hold, read_link, ready

if TYPE_CHECKING:
    from forkserve.store import Publication, Store

__all__ = ["Durable"]


class Durable(Restoring):
    """The durable part of `Engine`.  Without a store these verbs raise StoreError."""

    # ---------------------------------------------------------------- verbs

    def publish(
        self,
        session: str,
        node: int | None = None,
        *,
        name: str | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> Publication:
        """Store the KV of a committed state (default: the tip), and perhaps give it a name.

        Whole chunks of 256 tokens are stored; a rest is computed again when the state is restored.
        Of a state whose first rows fell out of a sliding window the tokens alone are stored.
        wait: until it is durable, computing missing rows first.  With wait=False only rows that
        exist are stored, in the background, and a full queue drops the request
        (`Publication.accepted`); nothing ever waits for the store then.
        replace: the name may be taken, and then stands for this state from the moment on that it is
        durable; until then, and if anything fails, it stands for what it stood for.

        Raises StoreError (no store, name taken, disk full, ...), NodeError for speculation.
        """
        store, core = self._require(), self._core
        if name is not None:
            self._usable(store, name, replace=replace)
        elif replace:
            raise ConfigError("replace=True needs name=: there is nothing else to replace")
        with core.lock:
            tree = core.tree(session)
            target = tree.tip if node is None else tree.get(node)
            if not committed(target):
                raise NodeError(
                    f"node {target.id} is speculative: only what is committed is stored"
                )
            finish = wait and self._finishable(tree, target)
        if finish:
            self._complete(tree, target)
        patience_s = 60.0 if wait else 0.0
        ticket = self._capture(tree, target, name, patience_s, replace=replace)
        if wait:
            ticket.wait()
        return ticket

    def restore(
        self, name: str, *, session: str | None = None, tenant: str | None = None
    ) -> SessionHandle:
        """Open a new session at a named state; its rows come from the store where that is faster.

        tenant: defaults to the one that published it.  Raises StoreError (unknown name, wrong
        key, made by another model), SessionError (id in use), ContextOverflow.
        """
        from forkserve.store.records import read_name, require_model

        store = self._require()
        found = read_name(store.catalog, text("name", name), store.sealer)
        require_model(store.catalog, self._print, found.fingerprint, f"the state '{name}'")
        return self._reopen(
            found.tokens.tolist(), session, tenant or found.tenant, found.salt, found.seed
        )

    def resume(self, session: str) -> SessionHandle:
        """Bring back a session of the store as it was last written: nodes, lines, tips, seeds.

        Its KV is absent at first; the rows of the tip are restored where that is predicted to be
        faster than computing them.  Raises SessionError (open already, not in the store),
        StoreError (damaged, wrong key, made by another model, not the owner of the store).
        """
        from forkserve.store.records import read_session, require_model

        store, core = self._require(), self._core
        text("session", session)
        journal = self._journal
        if journal is None:
            raise StoreError(
                "only the owner of a store resumes sessions; open it with role='owner'"
            )
        record = read_session(store.catalog, session, store.sealer)
        if record is None:
            raise SessionError(f"the store has no session '{session}'")
        require_model(store.catalog, self._print, record.fingerprint, f"session '{session}'")
        for values in record.nodes:
            self._guard.ids(values.tokens)
            self._guard.fits(values.start + len(values.tokens), "stored sequence")
        with core.lock:
            self._loop.check()
            if session in core.trees:
                raise SessionError(f"session '{session}' is open already")
            tree = ContextTree(
                session,
                core.pool,
                tenant=record.tenant,
                salt=record.salt,
                tail=self.config.tail,
            )
            now = core.clock.now_ms()
            revive(tree, record.nodes, record.tips, record.next_node, record.next_line, now)
            core.trees[session] = tree
            learned = core.experience[session] = Experience(self.config)
            core.meter.restore(record.tenant, record.meters)
            self._seeds[session] = record.seed
            for role, branch in record.bindings:
                learned.took(role, branch)
            for tool, ms in record.tool_times:
                learned.tool_ran(tool, ms, None, False)
            for tool, output in record.tool_outputs:
                learned.tool_ran(tool, None, output, True)
            journal.opened(tree, record.seed, record.next_binding, known=True)
            tip = tree.tip
        journal.reopened(session)
        warmed = self._bring_back(tree, tip, press=False)
        return SessionHandle(self, tree, warmed.tokens)

    def stored_sessions(self) -> list[str]:
        """Ids of the sessions in the store, the latest first."""
        rows = self._require().catalog.read("SELECT id FROM session ORDER BY updated_at DESC, id")
        return [str(row[0]) for row in rows]

    def warm(self, session: str, node: int | None = None) -> Warmed:
        """Bring missing rows of a committed node (default: the tip) back from the store now.

        Says what was done and why; with ``Store(restore="auto")`` rows that are computed faster
        stay absent until they are needed.
        """
        self._require()
        with self._core.lock:
            tree = self._core.tree(session)
            target = tree.tip if node is None else tree.get(node)
            if not committed(target):
                raise NodeError(f"node {target.id} is speculative: it has no stored rows")
            require_quiet(self._core, tree, target)
        return self._bring_back(tree, target)

    # ---------------------------------------------------------------- hooks of the other verbs

    def _saved(self, session: str, *, now: bool = False) -> None:
        """Make what changed of a session durable.  now: not only if a generation has ended."""
        journal = self._journal  # a shutdown may take it away meanwhile
        if journal is not None:
            if now:
                journal.sync(session)
            else:
                journal.settle(session)

    def _named(self, wanted: str | None) -> str | None:
        """An id for a new session that the store does not hold already.

        A catalog that cannot be read holds up nobody: the journal will say that it cannot write.
        """
        if self._journal is None or self.store is None:
            return wanted
        catalog, open_here = self.store.catalog, self._core.trees
        sql = "SELECT 1 FROM session WHERE id = ?"
        try:
            if wanted is None:
                while (name := f"s{self._opened + 1}") in open_here or catalog.read(sql, (name,)):
                    self._opened += 1
                return name
            taken = wanted not in open_here and bool(catalog.read(sql, (wanted,)))
        except StoreError as error:
            self.store.failed(error)
            return wanted
        if taken:
            raise SessionError(
                f"the store holds a session '{wanted}': resume it, or choose another id"
            )
        return wanted

    def _closing(self) -> None:
        """The engine is about to shut down."""

    def _complete(self, tree: ContextTree, node: Node) -> None:
        """Wait until a node's rows are computed.  SessionError when it is closed before that."""
        with self._core.lock:
            self._require_open(tree, node)
            task = self._core.ensure(tree, node)
        self._loop.run_until(lambda: task.done)
        if task.error is not None:
            raise task.error

    def _reopen(
        self, tokens: Sequence[int], session: str | None, tenant: str, salt: str, seed: int
    ) -> SessionHandle:
        """`Engine.open`, which stands above this class."""
        raise NotImplementedError

    # ---------------------------------------------------------------- publish

    @staticmethod
    def _usable(store: Store, name: str, *, replace: bool) -> None:
        """Refuse what is no name, and one that is taken, before anything is computed for it."""
        from forkserve.store.records import TAKEN, require_name

        require_name(name)
        if not replace and store.catalog.read("SELECT 1 FROM name WHERE name = ?", (name,)):
            raise StoreError(f"the name '{name}' is taken; {TAKEN}")

    def _finishable(self, tree: ContextTree, node: Node) -> bool:
        """True if whole chunks lack rows that can be computed now."""
        from forkserve.store.identity import CHUNK_TOKENS

        task = self._core.tasks.get((tree.session, node.id))
        busy = task is not None and task.generation_handle is not None
        return not busy and ready(node) < node.length // CHUNK_TOKENS * CHUNK_TOKENS

    def _capture(
        self,
        tree: ContextTree,
        node: Node,
        name: str | None,
        patience_s: float,
        most: int | None = None,
        *,
        replace: bool = False,
    ) -> Publication:
        """Pin the rows of the whole chunks that exist (up to `most` tokens), and queue them."""
        from forkserve.store.identity import plan_chain
        from forkserve.store.publish import Capture
        from forkserve.store.records import NameRecord, write_name

        store, core = self._require(), self._core
        backend = core.backend
        assert isinstance(backend, Portable)
        while True:
            with core.lock:
                if core.trees.get(tree.session) is not tree or not node.live:
                    raise NodeError(f"node {node.id} of session '{tree.session}' is gone")
                if not core.pending:
                    tokens = tree.tokens(node)
                    links = plan_chain(tokens, tree.salt)
                    limit = ready(node) if most is None else min(ready(node), most)
                    if any(n.floor for n in (node, *node.ancestors())):
                        limit = 0  # its first rows fell out of the window, and were given back
                    there = [x for x in links if x.start + x.count <= limit]
                    upto = there[-1].start + there[-1].count if there else 0
                    parts, pages = hold(core, tree, node, upto)
                    break
            self._loop.run_until(lambda: not core.pending)

        def release() -> None:
            with core.lock:
                core.pool.unpin(pages)
                core.changed.notify_all()

        after = None
        if name is not None:
            chain = there[-1].id.hex() if there else None
            record = NameRecord(
                name,
                tree.session,
                node.id,
                tree.tenant,
                tree.salt,
                self._seeds.get(tree.session, 0),
                tokens,
                chain,
            )
            catalog, made, sealer = store.catalog, self._print, store.sealer
            after = partial(write_name, catalog, made, record, sealer, replace=replace)
        read = partial(read_link, backend, parts, core.backend.info.kv_bytes_per_token)
        capture = Capture(self._print, there, read, release, after)
        return store.publisher.offer(capture, patience_s=patience_s)
