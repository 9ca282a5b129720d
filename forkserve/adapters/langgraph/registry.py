"""Open sessions, undecided forks and running graphs: all that the adapter remembers.

Ownership::

    run      one invocation of a bound graph, from root start to root end
    session  opened by a run; of its thread if it has one, else it ends with the run
    fork     taken when a node is entered, dropped when it is decided

An undecided fork is `live` (its node runs), `sealed` (its node ended well, nobody has chosen yet),
`held` (its node was interrupted) or `done` (a trunk node committed it; kept until the run ends or a
node builds on it, because an edge function that fails has the whole node run again).  Everything
is dropped at the end of a run, but what a thread may resume: that stays until its next run ends, or
until its session is the oldest of more than `keep`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from blake3 import blake3

from forkserve.adapters.langgraph import turns
from forkserve.adapters.langgraph.state import Ref, checked
from forkserve.adapters.langgraph.turns import Place, Turn
from forkserve.api import Engine
from forkserve.branch import Branch
from forkserve.errors import AdapterError, ForkServeError, NodeError, SessionError
from forkserve.session import Prompt, Session, as_text
from forkserve.types import NodeMode, Tokens, derive_seed

_log = logging.getLogger(__name__)

__all__ = ["Fork", "Live", "Registry", "Run", "prefix"]

_DOORS = 64  # threads whose sessions are opened at the same time, at most
Phase = Literal["live", "sealed", "held", "done"]

_ids: weakref.WeakKeyDictionary[Engine, tuple[str, list[int]]] = weakref.WeakKeyDictionary()


class Live:
    """An open session."""

    def __init__(self, session: Session, gen: int, home: str, seed: int) -> None:
        self.session = session
        self.gen = gen
        self.home = home
        self.seed = seed
        self.forks: dict[int, Fork] = {}  # undecided ones, by their first node
        self.hints: dict[int, int] = {}  # speculated nodes that nobody claimed -> their parent
        self.users = 0  # runs under way
        self.tip: Place | None = None  # where a run of its thread last left the trunk
        self.stored: dict[int, int] = {}  # nodes that came out of a store -> their length then


@dataclass(eq=False, slots=True)
class Fork:
    """One node call's branch.  base: where it left; node: its first node."""

    task: str
    live: Live
    base: Ref
    node: int
    run: Run | None
    thread: str | None
    branch: int = 0  # first node of the branch it continues; 0 on the trunk
    phase: Phase = "live"


@dataclass(eq=False)
class Run:
    """One invocation of a graph.

    tips: where its nodes left the trunk.  resumes: the namespace of the checkpoints that it goes on
    with; None if it has an input.  checkpoint: the one that was named.  waits: the trunk's end, if
    nodes have not seen the input yet, known when `asked`.
    """

    key: str
    thread: str | None = None
    turn: Turn | None = None
    tips: set[Place] = field(default_factory=set)
    resumes: str | None = None
    checkpoint: str | None = None
    waits: Place | None = None
    asked: bool = False
    interrupted: bool = False
    ended: bool = False
    touched: dict[str, Live] = field(default_factory=dict)
    opened: dict[tuple[object, ...], Live] = field(default_factory=dict)
    scratch: list[tuple[Live, int]] = field(default_factory=list)  # children that nodes left behind
    idle_joins: set[str] = field(default_factory=set)  # that had branches and decided nothing

    @property
    def home(self) -> str:
        """Owner of the sessions that it opens."""
        return f"run:{self.key}" if self.thread is None else f"thread:{self.thread}"


class Registry:
    """See above.  All methods may be called from any thread."""

    def __init__(self, engine: Engine, keep: int) -> None:
        if keep < 1:
            raise AdapterError(f"keep={keep}: at least one session must be kept")
        self.engine = engine
        self.keep = keep
        self.count: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.sessions: OrderedDict[str, Live] = OrderedDict()  # oldest first
        self.tasks: dict[str, Fork] = {}
        self.turns: dict[str, Turn] = {}  # of threads that wait to be resumed
        self._doors = [threading.RLock() for _ in range(_DOORS)]
        self.engine_id, self._gens = _ids.setdefault(engine, (uuid4().hex[:8], [0]))

    def door(self, home: str) -> threading.RLock:
        """Held while a session of a thread is opened or brought back; taken before `lock`."""
        return self._doors[hash(home) % _DOORS]

    # ---------------------------------------------------------------- refs

    def ref(self, live: Live, node: int, *, branch: int = 0, index: int | None = None) -> Ref:
        """The present end of a node as a ref."""
        return Ref(
            engine=self.engine_id,
            session=live.session.id,
            gen=live.gen,
            node=node,
            length=self.engine.tree(live.session.id).get(node).length,
            branch=branch,
            index=-1 if index is None else index,
        )

    def find(self, ref: Ref) -> Live | None:
        """The session of a ref whose node lives; None for a foreign or a dead one."""
        with self.lock:
            live = self.sessions.get(checked(ref)["session"])
            if live is None:
                return None
            ours = ref["engine"] == self.engine_id and ref["gen"] == live.gen
            # An earlier engine's node that was not stored: its number may mean another one now.
            if not ours and ref["length"] > live.stored.get(ref["node"], 0):
                return None
            self.sessions.move_to_end(ref["session"])
        if live.session.closed:
            return None
        node = self.engine.tree(live.session.id).nodes.get(ref["node"])
        return live if node is not None and node.length >= ref["length"] else None

    def hold(self, run: Run, ref: Ref) -> Live | None:
        """`find`, and what it finds stays open until the run ends, whoever needs room meanwhile."""
        with self.lock:
            live = self.find(ref)
            if live is not None:
                self.touch(run, live)
            return live

    # ---------------------------------------------------------------- sessions

    def open(self, run: Run, prompt: Prompt, why: tuple[object, ...]) -> Live:
        """A session for `prompt`; calls of one run with equal `why` and prompt share one.

        A session of the run's thread that began with this prompt is taken again.  AdapterError when
        the run has ended meanwhile: nobody would close what it opens.
        """
        ids = self.ids(prompt)
        key = (*why, tuple(ids))
        with self.door(run.home):
            with self.lock:
                _require_running(run)
                live = run.opened.get(key) or self._begun(run, ids)
                if live is not None and not live.session.closed:
                    run.opened[key] = live
                    return live
                gen, seed = self.next_gen()
            name = f"{prefix(run.thread)}{self.engine_id}-{gen}"
            session = Session(self.engine, ids, session=name, seed=seed)  # rows may come from disk
            with self.lock:
                if run.ended:
                    session.close()
                _require_running(run)
                live = Live(session, gen, run.home, seed)
                self.sessions[name] = run.opened[key] = live
                self.count["opened"] += 1
                self.touch(run, live)
                self._shrink()
                return live

    def next_gen(self) -> tuple[int, int]:
        """A number that no session of this engine had, and the seed that goes with it."""
        with self.lock:
            self._gens[0] += 1
            return self._gens[0], derive_seed(self.engine.config.seed, "langgraph", self._gens[0])

    def _begun(self, run: Run, ids: Tokens) -> Live | None:
        for live in reversed(self.sessions.values()) if run.thread is not None else ():
            if live.home == run.home and not live.session.closed:
                root = self.engine.tree(live.session.id).root
                if root.length == len(ids) and root.tokens.tolist() == list(ids):
                    return live
        return None

    def touch(self, run: Run, live: Live) -> None:
        """The run works in the session, which stays open until the run ends."""
        with self.lock:
            _require_running(run)
            if live.session.id not in run.touched:
                run.touched[live.session.id] = live
                live.users += 1

    def close(self, live: Live) -> None:
        """End a session and forget its forks."""
        with self.lock:
            self.sessions.pop(live.session.id, None)
            for fork in list(live.forks.values()):
                self._forget(fork)
            live.session.close()
            if not any(other.home == live.home for other in self.sessions.values()):
                self.turns.pop(live.home.removeprefix("thread:"), None)

    def forget_thread(self, thread: str) -> int:
        """Close the sessions of a thread; returns how many."""
        with self.lock:
            gone = [s for s in self.sessions.values() if s.home == f"thread:{thread}"]
            for live in gone:
                self.close(live)
            return len(gone)

    def _shrink(self) -> None:
        idle = [live for live in self.sessions.values() if not live.users]
        for live in idle[: max(len(self.sessions) - self.keep, 0)]:
            self.close(live)

    def ids(self, prompt: Prompt) -> Tokens:
        """A prompt as token ids.  Raises ConfigError for what is none."""
        return self.engine._guard.ids(as_text(self.engine, prompt), begins=True)

    # ---------------------------------------------------------------- forks

    def fork(
        self, run: Run, task: str, live: Live, base: Ref, name: str, text: str | Tokens
    ) -> Fork:
        """The branch of a node call.  A task has one at most: an earlier one is taken back."""
        with self.lock:
            _require_running(run)
            earlier = self.tasks.get(task)
            if earlier is not None:
                self.retract(earlier)
            self.touch(run, live)
            node = self._claim(live, base, text)
            if node is None:
                node = self.engine.fork(live.session.id, base["node"], name, text)
            fork = Fork(task, live, base, node, run, run.thread)
            self.tasks[task] = live.forks[node] = fork
            below = live.forks.get(base["node"])
            if below is not None and below.phase == "done":
                self._forget(below)
            self.count["forks"] += 1
            return fork

    def hint(self, run: Run, live: Live, parent: int, text: str | Tokens, idle_ms: float) -> int:
        """Speculate how a branch of `parent` will begin; the node call that begins so takes it."""
        with self.lock:
            _require_running(run)
            node = self._claim(live, {"node": parent}, text)  # type: ignore[typeddict-item]
            if node is None:
                node = self.engine.fork(live.session.id, parent, "hint", text)
                run.scratch.append((live, node))
                self.touch(run, live)
            live.hints[node] = parent
            self.engine.speculate(live.session.id, node, t_idle_ms=idle_ms)
            return node

    def _claim(self, live: Live, base: Ref, text: str | Tokens) -> int | None:
        if not text or not live.hints:
            return None
        ids = list(self.engine.backend.tokenizer.encode(text) if isinstance(text, str) else text)
        nodes = self.engine.tree(live.session.id).nodes
        for hint, parent in list(live.hints.items()):
            node = nodes.get(hint)
            if node is None or node.mode is not NodeMode.SPEC:
                del live.hints[hint]
            elif parent == base["node"] and node.tokens.tolist() == ids:
                del live.hints[hint]
                return hint
        return None

    def decided(self, fork: Fork) -> None:
        """The fork is nobody's to sweep any more."""
        with self.lock:
            self._forget(fork)

    def abort(self, live: Live, node: int) -> None:
        """Drop a subtree and what is remembered of it; what is gone already stays gone."""
        with self.lock:
            if live.session.closed:
                return
            tree = self.engine.tree(live.session.id)
            root = tree.nodes.get(node)
            below = {n.id for n in root.subtree()} if root is not None else {node}
            for fork in [f for f in live.forks.values() if f.node in below]:
                self._forget(fork)
            if root is None:
                return
            self.engine.abort(live.session.id, node, cascade=False)
            self.count["aborted"] += 1

    def retract(self, fork: Fork) -> None:
        """Take a fork back, also one that is committed already."""
        with self.lock:
            if fork.phase == "done":
                with suppress(NodeError, SessionError):
                    self.engine.promote(fork.live.session.id, fork.base["node"])
            with suppress(NodeError):
                self.abort(fork.live, fork.node)
            self._forget(fork)

    def _forget(self, fork: Fork) -> None:
        fork.live.forks.pop(fork.node, None)
        if self.tasks.get(fork.task) is fork:
            del self.tasks[fork.task]

    # ---------------------------------------------------------------- the end of a run

    def finish(self, run: Run, *, failed: bool) -> None:
        """Sweep.  An interrupted run keeps all; a failed one of a thread keeps what is sealed."""
        with self.lock:
            if run.ended:
                return
            run.ended = True
            resumable = run.thread is not None and (run.interrupted or failed)
            for live in run.touched.values():
                live.users -= 1
            unchosen = 0
            ours: list[Live] = []
            if run.touched:  # update_state is a run too, of the edge functions alone
                ours = [live for live in self.sessions.values() if live.home == run.home]
            for live in {id(live): live for live in (*run.touched.values(), *ours)}.values():
                for fork in list(live.forks.values()):
                    if fork.run is not run and not (
                        fork.run is None and fork.thread == run.thread and not resumable
                    ):
                        continue
                    if resumable and (run.interrupted or fork.phase != "live"):
                        self._hold(fork)
                    elif fork.phase == "done":
                        self._forget(fork)
                    else:
                        unchosen += fork.phase == "sealed"
                        self.sweep(live, fork.node)
            if not resumable:
                for live, node in run.scratch:
                    self.sweep(live, node)
            self.count["unchosen"] += unchosen
            if unchosen and run.idle_joins:
                _log.warning(
                    "%d branches were aborted at the end of the run with their text: join '%s' "
                    "decided nothing; let it return commit_winner, join or join_text",
                    unchosen,
                    "', '".join(sorted(run.idle_joins)),
                )
            turns.end(self, run, resumable=resumable)
            for live in list(run.touched.values()):
                if live.home == f"run:{run.key}":
                    self.close(live)
            run.scratch.clear()
            run.touched.clear()
            run.opened.clear()
            self._shrink()

    def _hold(self, fork: Fork) -> None:
        """Keep a fork for a run to come; its rows may go when nobody comes for long."""
        fork.run = None
        if fork.phase == "done":
            return
        with suppress(ForkServeError):
            tip = Branch(fork.live.session, fork.node).tip
            self.engine.mark_idle(fork.live.session.id, tip, self.engine.config.ttl_max_s)
        self.count["kept"] += 1

    def sweep(self, live: Live, node: int) -> None:
        """Abort what is left, unless it has become part of the main line."""
        with suppress(NodeError, SessionError):
            before = self.count["aborted"]
            self.abort(live, node)
            self.count["swept"] += self.count["aborted"] - before


def prefix(thread: str | None) -> str:
    """How the ids of sessions of a thread begin, or of those that end with their run."""
    kind = "run" if thread is None else blake3(thread.encode("utf-8", "replace")).hexdigest()[:12]
    return f"langgraph-{kind}-"


def _require_running(run: Run) -> None:
    """A node in a thread may come after its run was cancelled."""
    if run.ended:
        raise AdapterError("the run that this node belongs to has ended")
