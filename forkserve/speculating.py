"""The verbs that use idle time: speculate and its variants, choice_mass, observe, drain_slack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forkserve.control import lines
from forkserve.control.candidates import grammar_branches
from forkserve.control.experience import UNBOUNDED_MS
from forkserve.control.probe import Probe, choice_mass, forks
from forkserve.control.speculation import Request, Speculation, speculate
from forkserve.control.task import Task
from forkserve.decoding import Decoding
from forkserve.errors import AdmissionRefused, ConfigError, NodeError
from forkserve.tree.node import Node
from forkserve.tree.tree import committed
from forkserve.types import JobClass, Tokens
from forkserve.values import flag, listed, mapping, number, text

__all__ = ["Speculating"]


class Speculating(Decoding):
    """The speculative part of `Engine`."""

    def speculate(
        self,
        session: str,
        node: int,
        *,
        priority: float = 1.0,
        t_idle_ms: float | None = None,
        tool: str | None = None,
        guess: Tokens | str = (),
        q: float = 0.0,
        schema_stable: bool = True,
        strict: bool = False,
    ) -> Speculation:
        """Let the engine prefill a branch while nothing better is to do.

        priority: probability that the branch is taken.  t_idle_ms: expected pause.
        guess, q: tokens that may follow the known ones, and the probability that they are a prefix
        of what will be observed; refused below config.q_min or for free-form text.
        tool: fills in what is left open from what `observe` has learned of this tool: the pause,
        and how its output begins.
        strict: raise AdmissionRefused when nothing was admitted, instead of only saying so.
        """
        ids = self._guard.ids(guess)
        strict = flag("strict", strict)
        stable = flag("schema_stable", schema_stable)
        if tool is not None:
            text("tool", tool)
        with self._core.lock:
            tree = self._core.tree(session)
            target = tree.get(node)
            learned = self._core.experience[session]
            if tool is not None and not ids and target.known == target.length:
                likely, q = learned.output(tool)
                ids = list(likely)
            self._guard.fits(target.length + len(ids), "guess")
            if target.parent is not None:
                self._expected(tree, target.parent)
            request = Request(target, priority, ids, q, stable)
            pause = learned.pause_ms(tool) if t_idle_ms is None else t_idle_ms
            got = speculate(self._core, tree, [request], pause)[node]
        if strict and not got:
            reason = next(iter(got.refused), None)
            raise AdmissionRefused(
                reason.reason if reason else "empty",
                reason.message if reason else f"node {node} has no token without KV",
            )
        return got

    def speculate_set(
        self,
        session: str,
        nodes: Mapping[int, float] | Sequence[int],
        *,
        t_idle_ms: float = UNBOUNDED_MS,
    ) -> dict[int, Speculation]:
        """`speculate` on several branches, chosen together under one budget.

        nodes: {node: priority}; a plain sequence takes the priorities from how often branches of
        these names were committed in this session, uniform at first.
        """
        asked = listed("nodes", nodes)
        with self._core.lock:
            tree = self._core.tree(session)
            targets = [tree.get(node) for node in asked]
            if len(set(targets)) != len(targets):
                raise ConfigError(f"speculate_set got a node twice: {asked}")
            if isinstance(nodes, Mapping):
                weights = [number("priority", p, 0, 1) for p in nodes.values()]
            else:
                weights = self._experienced(session, targets)
            requests = [Request(n, p) for n, p in zip(targets, weights, strict=True)]
            return speculate(self._core, tree, requests, t_idle_ms)

    def _experienced(self, session: str, targets: Sequence[Node]) -> list[float]:
        """Priorities of branches by what was taken before; names shared by several are split."""
        learned = self._core.experience[session]
        names = [n.branch for n in targets]
        role = targets[0].parent.branch if targets and targets[0].parent is not None else ""
        ranked = learned.priorities(role, list(dict.fromkeys(names)))
        return [ranked[name] / names.count(name) for name in names]

    def observe(
        self,
        session: str,
        tool: str,
        *,
        ms: float | None = None,
        output: Tokens | str | None = None,
        schema_stable: bool = False,
    ) -> None:
        """Tell the engine how long a tool took, and what it returned.

        ms feeds the expected pause of this tool, in this session.  output is learned only for a
        tool whose output has a stable shape (JSON, XML, a diff): the model never drafts it.
        """
        ids = self._guard.ids(output) if output is not None else None
        text("tool", tool)
        schema_stable = flag("schema_stable", schema_stable)
        if ms is not None:
            ms = number("ms", ms, 0, UNBOUNDED_MS)
        with self._core.lock:
            tree = self._core.tree(session)
            learned = self._core.experience[session]
            learned.tool_ran(tool, ms, ids, schema_stable)
            if ms is not None:
                self._core.journal.tool_ran(session, tool, ms)
            if ids is not None:
                head = learned.head(ids) if schema_stable else None
                self._core.journal.tool_returned(session, tool, head)
            self._expected(tree, tree.tip)

    def choice_mass(
        self, session: str, node: int, texts: Mapping[str, Tokens | str]
    ) -> dict[str, float]:
        """Probability of each text if the model must go on from `node` with one of them.

        What decoding constrained to these texts would do at temperature 1, without sampling: one
        pass reads the logits wherever the texts part ways, and the tree stays as it is.  They sum
        to 1.  Waits for that pass.  node: committed, with no generation on it.

        Raises ConfigError (no text, an empty one, two that are equal), ContextOverflow, NodeError,
        SessionError.
        """
        ids = {name: self._guard.ids(text) for name, text in mapping("texts", texts).items()}
        places = forks(ids)
        task, probe = self._ask(session, node, places)
        if task is not None:
            self._loop.run_until(lambda: task.done or not probe.pending())
            if probe.pending():
                raise task.error or NodeError(f"node {node} was dropped while it was asked")
        return choice_mass(ids, {text: probe.rows[i] for i, text in enumerate(places)})

    def _ask(
        self, session: str, node: int, places: Sequence[tuple[int, ...]]
    ) -> tuple[Task | None, Probe]:
        """Queue a probe of these texts at a node, after the one that another thread has there."""
        core = self._core
        with core.lock:
            core.tree(session).get(node)
        while True:
            self._loop.run_until(lambda: not core.probing(session, node))
            with core.lock:
                if core.probing(session, node):
                    continue
                tree = core.tree(session)
                target = tree.get(node)
                self._guard.idle(tree, target)
                if not committed(target):
                    raise NodeError(
                        f"node {node} is speculative: the model is asked on real text only"
                    )
                lines.require_known(target)
                self._guard.fits(target.length + max(map(len, places), default=0), "sequence")
                probe = Probe(places, target.length)
                return core.ensure(tree, target, probe=probe) if places else None, probe

    def speculate_from_grammar(
        self,
        session: str,
        parent: int,
        masses: Mapping[str, float] | None,
        wrappers: Mapping[str, Tokens | str],
        generic: Tokens | str,
        *,
        t_idle_ms: float = UNBOUNDED_MS,
    ) -> dict[str, int]:
        """Fork and speculate on the likeliest tool wrappers; returns node ids by branch name.

        masses: probability of each tool name under constrained decoding; None asks the model, by
        `choice_mass` over the wrappers.  The top config.grammar_top_m get a branch each, the rest
        share "other" with the generic wrapper.
        """
        mapping("wrappers", wrappers)
        if masses is None:
            masses = self.choice_mass(session, parent, wrappers)
        texts = {name: self._guard.ids(wrapper) for name, wrapper in wrappers.items()}
        rest = self._guard.ids(generic)
        core = self._core
        number("t_idle_ms", t_idle_ms)
        mapping("masses", masses)
        branches = grammar_branches(masses, texts, rest, self.config.grammar_top_m)
        with core.lock:
            tree = core.tree(session)
            target = tree.get(parent)
            self._guard.fits(target.length + max(len(b.tokens) for b in branches), "branch")
            now = core.clock.now_ms()
            requests = [
                Request(tree.fork(target, branch.branch, branch.tokens, now), branch.p)
                for branch in branches
            ]
            core.count.forks += len(requests)
            speculate(core, tree, requests, t_idle_ms)
            return {request.node.branch: request.node.id for request in requests}

    def drain_slack(self) -> int:
        """Run speculation: one tick's share, or with a background loop all that is queued.

        Returns the tokens that ran, 0 when nothing is left; rows that a fork left unaligned are put
        in order then.
        """
        core, loop = self._core, self._loop
        before = core.speculated
        whole = self.config.background

        def done() -> bool:
            return (not whole and core.speculated > before) or not core.scheduler.jobs(
                JobClass.SPEC
            )

        loop.run_until(done)
        if core.speculated == before:
            loop.upkeep()
        return core.speculated - before
