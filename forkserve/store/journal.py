"""The trees of the open sessions on their way to the catalog.

`changed` and its kin take notes under the engine's lock; `sync` compares a session with what was
last written, and writes the difference in one transaction, outside that lock.  Since it is a
difference, a write that failed (a full disk) is made good by the next one that succeeds, and until
then nothing waits for it.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from forkserve.errors import BackendError, StoreError
from forkserve.store import faults
from forkserve.store.bills import CHARGE, Charges
from forkserve.store.catalog import Catalog
from forkserve.store.identity import Fingerprint, token_bytes
from forkserve.store.seal import Sealer
from forkserve.store.shadow import Change, Row, Shadow, keep, row_of
from forkserve.store.statements import ADD_COUNT, CAP_DECISIONS
from forkserve.threads import started
from forkserve.tree import ContextTree, Node, committed

__all__ = ["TreeJournal"]

_log = logging.getLogger(__name__)
OUTPUTS = 32  # of one tool that are kept: as many as the predictor looks at
NOTES = 4096  # notes of one session that wait for a write; further ones are dropped and counted


class _Result(Protocol):
    """What a commit says of itself (`forkserve.control.commit.CommitResult`)."""

    @property
    def hit(self) -> Any: ...
    @property
    def lcp(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def skipped_prefill(self) -> int: ...
    @property
    def aborted(self) -> Sequence[int]: ...
    @property
    def generation(self) -> int: ...


class TreeJournal:
    """Satisfies `forkserve.control.journal.Journal`.

    lock: the engine's; `sync` takes it briefly, and must not be called while it is held.
    on_failure: told of every write that failed.  meters: what a tenant was billed so far in this
    process; the catalog has the sum over all of them, so charges are added there, never replaced.
    """

    def __init__(
        self,
        catalog: Catalog,
        made: Fingerprint,
        lock: AbstractContextManager[Any],
        sealer: Sealer | None = None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        meters: Callable[[str], Mapping[str, float]] = lambda tenant: {},
    ) -> None:
        self._catalog = catalog
        self._made = made
        self._lock = lock
        self._sealer = sealer
        self._on_failure = on_failure
        self._meters = meters
        self._order = threading.Lock()  # one sync at a time: differences apply in order
        self._sessions: dict[str, Shadow] = {}
        self._over: list[str] = []
        self._charges = Charges(lambda tenant: meters(tenant).get("charged", 0.0))
        self._dirty: set[str] = set()
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- notes, under the lock

    def opened(self, tree: ContextTree, seed: int, bindings: int = 0, known: bool = False) -> None:
        """A session is there: new, or (known) brought back from the catalog."""
        shadow = Shadow(tree, seed, created=known, bindings=bindings)
        others = any(one.tree.tenant == tree.tenant for one in self._sessions.values())
        if known and not others:  # its meter goes on from the catalog's sum
            self._charges.goes_on(tree.tenant)
        else:
            self._charges.look(tree.tenant)
        if known:  # its rows are exactly the tree's
            shadow.head = self._head(shadow)
            shadow.tips = {line: node.id for line, node in tree.tips.items()}
            for node in tree:
                shadow.nodes[node.id] = keep(tree, node, shadow.nodes)
        self._sessions[tree.session] = shadow

    def changed(self, session: str) -> None:
        """A generation ended: write it soon, if nobody who waits for it does so first."""
        if session in self._sessions:
            self._dirty.add(session)
            with suppress(BackendError):  # no thread: the next verb on it writes, or `close`
                self._thread = self._thread or started(self._serve, "forkserve-journal")
            self._wake.set()

    def committed(self, tree: ContextTree, node: Node, winner: Node, result: _Result) -> None:
        """Note a commit."""
        shadow = self._sessions.get(tree.session)
        if shadow is None:
            return
        row = (
            tree.session,
            shadow.bindings,
            node.id,
            winner.id,
            node.branch,
            winner.branch,
            result.hit.value,
            result.lcp,
            result.tail,
            result.skipped_prefill,
            len(result.aborted),
            result.generation,
            self._catalog.now(),
        )
        shadow.bindings += 1
        self._note(shadow, "INSERT OR REPLACE INTO binding VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", row)

    def tool_ran(self, session: str, tool: str, ms: float) -> None:
        """Note how long a tool took."""
        shadow = self._sessions.get(session)
        if shadow is not None:
            sql = "INSERT INTO tool_time (session, tool, ms, at) VALUES (?,?,?,?)"
            self._note(shadow, sql, (session, tool, ms, self._catalog.now()))

    def tool_returned(self, session: str, tool: str, output: Sequence[int] | None) -> None:
        """Note what a tool returned, as far as a guess can use it; None forgets the tool."""
        shadow = self._sessions.get(session)
        if shadow is None:
            return
        if output is None:
            sql = "DELETE FROM tool_output WHERE session = ? AND tool = ?"
            self._note(shadow, sql, (session, tool))
            return
        tool = _storable(tool)  # what is sealed is bound to the name that is stored
        ids = self._sealed(token_bytes(output), f"tool{session}/{tool}".encode())
        sql = "INSERT INTO tool_output (session, tool, ids, at) VALUES (?,?,?,?)"
        self._note(shadow, sql, (session, tool, ids, self._catalog.now()))
        old = "SELECT id FROM tool_output WHERE session = ? AND tool = ? ORDER BY id DESC"
        sql = f"DELETE FROM tool_output WHERE id IN ({old} LIMIT -1 OFFSET {OUTPUTS})"
        self._note(shadow, sql, (session, tool))

    def evicted(self, tree: ContextTree, node: Node, rows: int, reason: str) -> None:
        """Note that committed rows left their pages."""
        if committed(node):
            self.decided(tree.session, node.id, "evict", "dropped", reason, rows)
            shadow = self._sessions.get(tree.session)
            if shadow is not None:
                self._note(shadow, ADD_COUNT, (f"evicted_tokens/device/{reason}", rows))

    def speculated(self, session: str, answers: dict[int, Any]) -> None:
        """Note what the planner decided, with its reasons."""
        for node, answer in answers.items():
            if answer.tokens:
                self.decided(session, node, "speculate", "admitted", "", answer.tokens)
            for refusal in answer.refused:
                self.decided(session, node, "speculate", "refused", refusal.reason, refusal.tokens)

    def decided(
        self,
        session: str,
        node: int,
        what: str,
        verdict: str,
        reason: str,
        tokens: int = 0,
        gain_ms: float | None = None,
        cost_ms: float | None = None,
        actual_ms: float | None = None,
        worth: float | None = None,
        against: float | None = None,
    ) -> None:
        """Note one decision.  worth, against: see `forkserve.store.host.Weighed`."""
        shadow = self._sessions.get(session)
        if shadow is None:
            return
        sql = (
            "INSERT INTO decision (session, node, what, verdict, reason, tokens, gain_ms, cost_ms,"
            " actual_ms, worth, against, at) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
        )
        times, at = (gain_ms, cost_ms, actual_ms), self._catalog.now()
        row = (session, node, what, verdict, reason, tokens, *times, worth, against, at)
        self._note(shadow, sql, row)

    def closed(self, session: str) -> None:
        """The session is over: gc may take it after its grace, unless it is resumed before."""
        shadow = self._sessions.pop(session, None)
        if shadow is not None:
            self._charges.look(shadow.tree.tenant)  # its meter may end with its last session
            self._over.append(session)

    def _note(self, shadow: Shadow, sql: str, row: Row) -> None:
        if len(shadow.notes) >= NOTES:
            shadow.dropped += 1
        else:
            shadow.notes.append((sql, row))

    # ---------------------------------------------------------------- writing, outside the lock

    def sync(self, session: str, *, begun: bool = False) -> bool:
        """Write what changed of a session; True when it is durable now.

        begun: leave one alone that was never written: its `open` has not returned.
        A catalog that cannot be written is reported to `on_failure`, never raised: the tokens go
        on, and the next sync writes what this one could not.
        """
        with self._order:
            with self._lock:
                over, self._over = self._over, []
                shadow = self._sessions.get(session)
                if begun and shadow is not None and not shadow.created:
                    shadow = None
                self._dirty.discard(session)
                change = self._difference(shadow) if shadow is not None else Change()
                owed: dict[str, float] = {}
                if change.statements or over or self._stop:
                    owed = self._charges.take()
            change.add(CHARGE, list(owed.items()))
            if over:
                now = self._catalog.now()
                sql = "UPDATE session SET closed_at = ? WHERE id = ?"
                change.add(sql, [(now, name) for name in over])
            if not change.statements:
                return True
            try:
                self._write(change)
            except (StoreError, sqlite3.Error, OSError) as error:
                with self._lock:
                    self._over = over + self._over
                    self._charges.owe(owed)
                self._on_failure(error)
                return False
            if shadow is not None:
                self._adopt(shadow, change)
            return True

    def settle(self, session: str) -> None:
        """`sync`, if something was noted as changed or a write is under way."""
        if session in self._dirty or self._order.locked():
            self.sync(session)

    def reopened(self, session: str) -> None:
        """A session of the catalog lives again."""
        try:
            with self._catalog.write(owned=True) as db:
                db.execute("UPDATE session SET closed_at = NULL WHERE id = ?", (session,))
        except StoreError as error:
            self._on_failure(error)

    def flush(self) -> None:
        """Write what changed of every session."""
        with self._lock:
            names = [*self._sessions, *self._over]
        for name in dict.fromkeys(names):
            self.sync(name)

    def close(self) -> None:
        """Write everything and end the thread.  Idempotent.

        The engine closes its trees next: a `sync` that comes later must not take them for the text.
        """
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        with self._lock:
            self._sessions.clear()

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop:
                return
            with self._lock:
                dirty = list(self._dirty)
            for session in dirty:
                self.sync(session)

    def _write(self, change: Change) -> None:
        faults.reach("journal.begin")
        with self._catalog.write(owned=True) as db:
            which = self._catalog.fingerprint(db, self._made)
            for sql, rows in change.statements:
                if sql.startswith("INSERT INTO session"):
                    rows = [(*row, which) for row in rows]
                db.executemany(sql, [tuple(map(_storable, row)) for row in rows])
            faults.reach("journal.written")
        faults.reach("journal.committed")

    def _adopt(self, shadow: Shadow, change: Change) -> None:
        shadow.created, shadow.head, shadow.tips = True, change.head, change.tips
        shadow.nodes.update(change.nodes)
        for node in change.gone:
            shadow.nodes.pop(node, None)
        for _ in range(change.notes):  # notes come in at the right, meanwhile too
            shadow.notes.popleft()

    # ---------------------------------------------------------------- the difference

    def _head(self, shadow: Shadow) -> Row:
        tree = shadow.tree
        return (tree.next_id, tree.next_line)

    def _difference(self, shadow: Shadow) -> Change:
        """What has to be written so that the catalog holds this tree; called under the lock."""
        tree, change, now = shadow.tree, Change(head=self._head(shadow)), self._catalog.now()
        name = tree.session
        self._charges.look(tree.tenant)
        if not shadow.created:
            salt = self._sealed(tree.salt.encode(), b"salt" + name.encode())
            change.add(
                "INSERT INTO session (id, tenant, salt, seed, next_node, next_line, created_at,"
                " updated_at, fingerprint) VALUES (?,?,?,?,?,?,?,?,?)",
                [(name, tree.tenant, salt, str(shadow.seed), *change.head, now, now)],
            )
        live = [node for node in tree if committed(node)]
        for node in live:
            self._compare(shadow, node, change)
        present = {node.id for node in live}
        change.gone = [n for n in shadow.nodes if n not in present]
        # Children first would break nothing either: the parent's key is checked at the end.
        change.add(
            "DELETE FROM node WHERE session = ? AND id = ?", [(name, n) for n in change.gone]
        )
        change.tips = {line: node.id for line, node in tree.tips.items()}
        moved = set(change.tips.items()) - set(shadow.tips.items())
        change.add(
            "INSERT OR REPLACE INTO tip VALUES (?,?,?)", [(name, *pair) for pair in sorted(moved)]
        )
        ended = shadow.tips.keys() - change.tips.keys()
        change.add("DELETE FROM tip WHERE session = ? AND line = ?", [(name, x) for x in ended])
        if shadow.created and (change.statements or change.head != shadow.head):
            change.add(
                "UPDATE session SET next_node = ?, next_line = ?, updated_at = max(updated_at, ?),"
                " closed_at = NULL WHERE id = ?",
                [(*change.head, now, name)],
            )
        if change.statements:
            meters = self._meters(tree.tenant).items()
            rows = [(tree.tenant, k, float(value)) for k, value in meters if k != "charged"]
            change.add("INSERT OR REPLACE INTO meter VALUES (?,?,?)", rows)
        change.notes = len(shadow.notes)
        for sql, row in shadow.notes:
            change.add(sql, [row])
        if change.notes:
            change.add(CAP_DECISIONS, [()])
        return change

    def _compare(self, shadow: Shadow, node: Node, change: Change) -> None:
        """Rows for one node if it is new or has changed."""
        name, kept = shadow.tree.session, shadow.nodes.get(node.id)
        row = row_of(node)
        if kept is not None and kept.row == row and kept.tokens == node.tokens:
            return
        now = keep(shadow.tree, node, ChainMap(change.nodes, shadow.nodes))
        change.nodes[node.id] = now
        chain = now.links[-1].hex() if now.links else None
        before = len(kept.tokens) if kept is not None else 0
        grown = kept is not None and kept.tokens == node.tokens[:before]
        if kept is not None and not grown:
            change.add("DELETE FROM run WHERE session = ? AND node = ?", [(name, node.id)])
            before = 0
        change.add(
            "INSERT INTO node VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (session, id) DO UPDATE"
            " SET parent = excluded.parent, branch = excluded.branch, start = excluded.start,"
            " tokens = excluded.tokens, mode = excluded.mode, line = excluded.line,"
            " generation = excluded.generation, known = excluded.known, chain = excluded.chain",
            [(name, *row, chain)],
        )
        if len(node.tokens) > before:
            place = f"{name}/{node.id}/{before}".encode()
            ids = self._sealed(token_bytes(node.tokens[before:]), b"run" + place)
            change.add("INSERT INTO run VALUES (?,?,?,?)", [(name, node.id, before, ids)])

    def _sealed(self, plain: bytes, place: bytes) -> bytes:
        return self._sealer.seal(plain, place) if self._sealer is not None else plain


def _storable(value: Any) -> Any:
    """A name as the database can hold it: half of a surrogate pair is written as an escape.

    Names of branches come from programs, which may have them from a model.
    """
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode()
