"""Every verb that changes a tree, as rules of the identity test's state machine."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import rule

from forkserve.types import JoinPolicy

from .harness import core, mock, tick
from .machine import CONTEXT, Bench, number, some, text
from .model import MAIN, TreeModel


class Schedules(Bench):
    """Any order of verbs."""

    # ---------------------------------------------------------------- branches

    @rule(n=number, m=number, branch=st.sampled_from("pqr"), letters=text, back=number)
    def fork(self, n: int, m: int, branch: str, letters: list[int], back: int) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        parent = sorted(model.nodes)[m % len(model.nodes)]
        if len(model.nodes[parent].full) > CONTEXT or len(model.nodes) > 12:
            return
        tokens = self.ids(name, letters)
        before = list(core(self.eng).pool.refs)
        at = None if back % 3 else 1 + back // 3 % len(model.nodes[parent].full)
        got = self.eng.fork(name, parent, branch, tokens, at=at)
        assert got == model.fork(parent, branch, tokens, at=at)
        assert core(self.eng).pool.refs == before

    @rule(n=number, m=number, letters=some)
    def append(self, n: int, m: int, letters: list[int]) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        fit = [
            i
            for i, node in sorted(model.nodes.items())
            if (node.mode == "spec" or i in model.tips.values())
            and node.known == len(node.full) < CONTEXT
            and not self.busy(name, i)
        ]
        if not fit:
            return
        target, tokens = fit[m % len(fit)], self.ids(name, letters)
        self.eng.append(name, target, tokens)
        model.append(target, tokens)

    @rule(n=number, m=number)
    def attempt(self, n: int, m: int) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        fit = [
            i
            for i, node in sorted(model.nodes.items())
            if node.mode == "spec"
            and node.parent is not None
            and model.committed(node.parent)
            and node.known == len(node.full)
        ]
        if fit:
            self.eng.attempt(name, fit[m % len(fit)])
            model.attempt(fit[m % len(fit)])

    @rule(n=number, m=number)
    def promote(self, n: int, m: int) -> None:
        if m % 3 or not (found := self.pick(n)):
            return
        name, model = found
        fit = [
            i
            for i in sorted(model.nodes)
            if all(model.nodes[p].known == len(model.nodes[p].full) for p in model.path(i))
        ]
        if fit:
            target = fit[m // 3 % len(fit)]
            moved = [model.tips[MAIN], *model.path(target)[1:]]
            if self.exclusive(name, moved, lambda: self.eng.promote(name, target)) is not None:
                model.promote(target)

    @rule(n=number, m=number, lazy=st.sampled_from([None, True, False]), cascade=st.booleans())
    def abort(self, n: int, m: int, lazy: bool | None, cascade: bool) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        fit = [i for i in sorted(model.nodes) if model.abortable(i)]
        if fit:
            target = fit[m % len(fit)]
            self.eng.abort(name, target, lazy=lazy, cascade=cascade)
            model.abort(target, cascade=cascade)
            self.sync()

    @rule()
    def drain_aborts(self) -> None:
        self.eng.drain_aborts()
        assert not any(t.dead for t in core(self.eng).trees.values())

    @rule(n=number, m=number, tool_s=st.sampled_from([0.0, 1.0]), late=st.booleans())
    def mark_idle(self, n: int, m: int, tool_s: float, late: bool) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        tips = [t for t in model.tip_nodes() if not self.busy(name, t)]
        if not tips:
            return
        target = tips[m % len(tips)]
        life = self.eng.mark_idle(name, target, tool_s)
        model.nodes[target].mode = "idle"
        if late:
            mock(self.eng).clock.advance(life * 1e3 + 1)
            with core(self.eng).lock:
                core(self.eng).expire(mock(self.eng).clock.now_ms())

    # ---------------------------------------------------------------- speculation

    @rule(n=number, m=number, letters=text, idle=st.sampled_from([1e9, 1e9, 0.3]))
    def speculate(self, n: int, m: int, letters: list[int], idle: float) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        fit = [i for i, node in sorted(model.nodes.items()) if node.mode == "spec"]
        if not fit:
            return
        target = fit[m % len(fit)]
        node = model.nodes[target]
        room = node.known == len(node.full) < CONTEXT
        guess = self.ids(name, letters) if room and m % 2 else []
        self.eng.speculate(name, target, guess=guess, q=0.9, t_idle_ms=idle)
        length = self.eng.tree(name).get(target).length
        assert length in {len(node.full), len(node.full) + len(guess)}
        if length > len(node.full):
            model.append(target, guess, known=False)

    @rule(n=number)
    def speculate_set(self, n: int) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        fit = [i for i, node in sorted(model.nodes.items()) if node.mode == "spec"]
        if fit:
            self.eng.speculate_set(name, {i: 1.0 / (1 + i % 3) for i in fit})

    @rule(
        n=number,
        m=number,
        texts=st.lists(some, min_size=1, max_size=3),
        guess=some,
        cut=number,
        rest=text,
        drains=st.integers(0, 6),
    )
    def turn(
        self,
        n: int,
        m: int,
        texts: list[list[int]],
        guess: list[int],
        cut: int,
        rest: list[int],
        drains: int,
    ) -> None:
        """A whole agent step: branches, guesses, some slack, then what was really observed."""
        if not (found := self.pick(n)):
            return
        name, model = found
        tips = [i for i in model.tip_nodes() if len(model.nodes[i].full) < CONTEXT - 16]
        tips = [i for i in tips if not self.busy(name, i)]
        if not tips or len(model.nodes) > 14:
            return
        at = tips[m % len(tips)]
        for letters in texts:
            child = self.eng.fork(name, at, "p", self.ids(name, letters))
            assert child == model.fork(at, "p", self.ids(name, letters))
            want = self.ids(name, guess) if cut % 2 else []
            self.eng.speculate(name, child, guess=want, q=0.9)
            length = self.eng.tree(name).get(child).length
            if length > len(model.nodes[child].full):
                model.append(child, want, known=False)
        for _ in range(drains):
            self.eng.drain_slack()
            self.sync()
        self.commit(n, self._place(model, at), cut // 2, rest, bool(m % 2))

    def _place(self, model: TreeModel, at: int) -> int:
        """The argument with which `commit` picks this tip and its last branch."""
        tips = [i for i in model.tip_nodes() if len(model.nodes[i].full) < CONTEXT]
        below = len(model.subtree(at)) - 1
        place, size = tips.index(at), len(tips)
        return next(
            m for m in range(place, 7 * size * below * 8, size) if m // 7 % below == below - 1
        )

    @rule()
    def drain_slack(self) -> None:
        assert self.eng.drain_slack() >= 0
        self.sync()

    @rule()
    def drain_all(self) -> None:
        for _ in range(100):
            if not self.eng.drain_slack():
                break
        else:
            raise AssertionError("speculation never ends")
        self.sync()

    @rule()
    def tick(self) -> None:
        tick(self.eng)
        self.sync()

    # ---------------------------------------------------------------- commit and join

    @rule(n=number, m=number, cut=number, letters=text, full=st.booleans(), back=number)
    def commit(
        self, n: int, m: int, cut: int, letters: list[int], full: bool, back: int = 1
    ) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        tips = [i for i in model.tip_nodes() if len(model.nodes[i].full) < CONTEXT]
        if not tips:
            return
        tip = tips[m % len(tips)]
        here = list(model.nodes[tip].full)
        at = len(here) if back % 4 else 1 + back // 4 % len(here)
        owner = model.owner(tip, at) if at < len(here) else tip
        if model.nodes[owner].line != model.nodes[tip].line:
            return
        here, whole = here[:at], full and at == len(here)
        observed = self.observation(name, model, owner, at, m // 7, cut)
        observed = (observed + self.ids(name, letters)) or [self.bases[name]]
        branch = [None, "p", "q"][m % 3]
        trial, doomed = deepcopy(model), model.after(tip, at)
        trial.retract(tip, at)
        moved = [tip, *doomed, *trial.chain(owner, here + observed, branch)[0]]
        winner, lcp, dead = trial.commit(owner, observed, branch)
        given = here + observed if whole else observed
        result = self.exclusive(
            name,
            moved,
            lambda: self.eng.commit(
                name, tip, given, full=whole, branch=branch, at=None if whole else at
            ),
        )
        if result is None:
            return
        self.models[name] = trial
        assert (result.winner, result.lcp, set(result.aborted)) == (winner, lcp, dead)
        assert result.tail == at + len(observed) - lcp
        assert result.generation == trial.nodes[owner].generation
        assert 0 <= result.skipped_prefill <= lcp - at

    def observation(
        self, name: str, model: TreeModel, owner: int, at: int, which: int, cut: int
    ) -> list[int]:
        """A beginning of what one of the branches below says after `at` tokens."""
        below = [
            model.nodes[i].full[at:]
            for i in sorted(model.subtree(owner))
            if i != owner and model.nodes[i].full[:at] == model.nodes[owner].full[:at]
        ]
        hint = below[which % len(below)] if below else []
        return hint[: cut % (len(hint) + 1)]

    @rule(
        n=number,
        m=number,
        policy=st.sampled_from(list(JoinPolicy)),
        scaffold=text,
        blend=some,
        count=st.integers(1, 3),
    )
    def join(
        self, n: int, m: int, policy: JoinPolicy, scaffold: list[int], blend: list[int], count: int
    ) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        tips = [i for i in model.tip_nodes() if model.children(i)]
        if not tips:
            return
        parent = tips[m % len(tips)]
        inputs = [c.id for c in model.children(parent)][:count]
        blends = policy is JoinPolicy.SUMMARY or (
            m % 2 and policy in (JoinPolicy.ALL, JoinPolicy.KOFN)
        )
        options = {
            "scaffold": self.ids(name, scaffold),
            "blend": self.ids(name, blend) if blends else None,
            "k": {JoinPolicy.KOFN: 1 + m % len(inputs), JoinPolicy.WINNER: m % len(inputs)}.get(
                policy
            ),
        }
        body, losers, adopts = self.join_text(model, parent, inputs, policy, options)
        if not body or len(model.nodes[parent].full) + len(body) > CONTEXT:
            return
        branch = model.nodes[inputs[options["k"] or 0]].branch if adopts else None
        target = model.nodes[parent].full + body
        moved = [parent, *(model.chain(parent, target, branch)[0] if adopts else [])]
        result = self.exclusive(name, moved, lambda: self.eng.join(name, inputs, policy, **options))
        if result is None:
            return
        if adopts:
            node, _, dead = model.commit(parent, body, branch)
        else:
            node, dead = model.join(parent, inputs, losers, body, policy.value)
        assert (result.node, set(result.aborted)) == (node, dead)
        assert len(result.aborted) == len(dead)

    def join_text(
        self,
        model: TreeModel,
        parent: int,
        inputs: list[int],
        policy: JoinPolicy,
        options: dict[str, Any],
    ) -> tuple[list[int], list[int], bool]:
        """Tokens after the parent, who loses, and whether an input is adopted as it is."""
        residuals = [model.nodes[i].full[model.nodes[i].base :] for i in inputs]
        k = options["k"]
        winners = {
            JoinPolicy.FIRST: inputs[:1],
            JoinPolicy.WINNER: [inputs[k]] if k is not None and k < len(inputs) else [],
            JoinPolicy.KOFN: inputs[:k],
        }.get(policy, inputs)
        losers = [i for i in inputs if i not in winners]
        body = list(options["scaffold"])
        if options["blend"] is not None:
            body += options["blend"]
        else:
            for i in winners:
                body += residuals[inputs.index(i)]
        alone = policy in (JoinPolicy.FIRST, JoinPolicy.WINNER) and not options["scaffold"]
        return body, losers, alone
