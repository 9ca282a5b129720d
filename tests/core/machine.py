"""The bench of the identity test: sessions, generations, and what must hold after every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forkserve import Engine
from forkserve.control.generation import Generation
from forkserve.errors import AdmissionRefused, OutOfPages, SessionError
from forkserve.types import SamplingParams

from .harness import (
    Alphabet,
    assert_nothing_left,
    assert_rows_as_cold,
    cold,
    engine,
    snapshot,
)
from .model import TreeModel

LETTERS = 3  # few, so that guesses and observations often agree
CONTEXT = 44
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
EXAMPLES = 3_000 if DEEP else 420  # of each of five machines: 2,100 schedules in CI

number = st.integers(0, 2**16)
text = st.lists(st.integers(0, LETTERS - 1), max_size=9)
some = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=7)


@dataclass
class Running:
    """A generation that was started and is advanced by whatever drives the loop."""

    handle: Generation
    prompt: list[int]
    limit: int
    seen: int = 0


class Bench(RuleBasedStateMachine):
    """Up to three sessions over one tiny pool, with a model of each beside it."""

    fixed: ClassVar[dict[str, Any]] = {}

    @initialize(
        capacity=st.integers(8, 24),
        seed=number,
        preempt=st.sampled_from([0, 0, 2, 3]),
        lazy=st.booleans(),
        own=st.booleans(),
        chunk=st.sampled_from([3, 4, 8, 64]),
        batch=st.sampled_from([2, 7, 64]),
    )
    def begin(
        self, capacity: int, seed: int, preempt: int, lazy: bool, own: bool, chunk: int, batch: int
    ) -> None:
        config = {
            "capacity_pages": capacity,
            "seed": seed,
            "lazy_abort": lazy,
            "c_spec": 8 if chunk > 8 else 4,
            "prefill_chunk": chunk,
            "max_batch_tokens": batch,
            "branch_cap": 20,
            **self.fixed,
        }
        self.window = config.pop("window", 0)
        backend = {"force_preempt_every": preempt, "window": self.window}
        self.eng: Engine = engine(backend, **config)
        self.capacity, self.own, self.page = capacity, own, self.eng.config.page_size
        self.models: dict[str, TreeModel] = {}
        self.bases: dict[str, int] = {}
        self.running: list[Running] = []
        self.opened = 0
        self.open(seed, [], True, "a")

    # ---------------------------------------------------------------- helpers

    def pick(self, n: int) -> tuple[str, TreeModel] | None:
        if not self.models:
            return None
        name = sorted(self.models)[n % len(self.models)]
        return name, self.models[name]

    def ids(self, name: str, letters: list[int]) -> list[int]:
        return [self.bases[name] + letter for letter in letters]

    def params(self, name: str, n: int) -> SamplingParams:
        base = self.bases[name]
        constraint = Alphabet(base, base + LETTERS) if self.own else None
        if n % 3:
            return SamplingParams(ignore_eos=True, constraint=constraint)
        return SamplingParams(
            temperature=0.5 + n % 2,
            seed=n,
            top_k=n % 5,
            repetition_penalty=(1.0, 1.3)[n % 7 < 3],
            frequency_penalty=(0.0, 1.5)[n % 11 < 4],
            ignore_eos=True,
            constraint=constraint,
        )

    def busy(self, name: str, node: int | None = None) -> bool:
        return any(
            r.handle.session == name and (node is None or r.handle.node == node)
            for r in self.running
        )

    def whole(self, name: str, verb: Callable[[], Any]) -> Any:
        """Run a verb; OutOfPages must leave the session as it was.  None if it failed."""
        before = snapshot(self.eng, name)
        try:
            return verb()
        except OutOfPages:
            self.sync()
            if not self.running:
                assert snapshot(self.eng, name) == before
            return None

    def exclusive(self, name: str, nodes: Iterable[int], verb: Callable[[], Any]) -> Any:
        """Run a verb that moves these nodes: refused (None) while one of them generates."""
        if not any(self.busy(name, node) for node in nodes):
            return self.whole(name, verb)
        with pytest.raises(SessionError):
            verb()
        return None

    def sync(self) -> None:
        """Take over what running generations have produced."""
        still = []
        for run in self.running:
            handle, model = run.handle, self.models.get(run.handle.session)
            fresh = handle.tokens[run.seen :]
            run.seen += len(fresh)
            expected = cold(run.prompt, run.limit, handle.params, self.window)
            assert handle.tokens == expected[: len(handle.tokens)]
            if model is not None and handle.node in model.nodes:
                model.append(handle.node, fresh)
            if not handle.done:
                still.append(run)
            elif handle.finish_reason == "length":
                assert len(handle.tokens) == run.limit
        self.running = still

    # ---------------------------------------------------------------- open and close

    @rule(n=number, letters=text, shared=st.booleans(), tenant=st.sampled_from(["a", "b"]))
    def open(self, n: int, letters: list[int], shared: bool, tenant: str) -> None:
        if len(self.models) == 3:
            return
        self.opened += 1
        name = f"s{self.opened}"
        self.bases[name] = 10 * self.opened if self.own else 10
        prompt = self.ids(name, [0, 1, 2, 0, 1, 1, 2, 2, 0, 1][: 4 + n % 7] if shared else [])
        if self.models and shared and not self.own and n % 2:
            _, other = self.pick(n // 2) or ("", TreeModel([]))
            prompt = other.nodes[other.tips[0]].full[: CONTEXT - 10]  # what somebody holds already
        prompt += self.ids(name, letters)
        prompt = prompt or [self.bases[name]]
        salt = [None, None, "x", "x", "y", ""][n % 6]
        try:
            handle = self.eng.open(
                prompt, session=name, tenant=tenant, salt=salt, prefill=bool(n % 4)
            )
        except (OutOfPages, AdmissionRefused):
            assert name not in self.eng.sessions()
            return
        finally:
            self.sync()
        assert handle.cached_tokens < len(prompt)
        assert handle.cached_tokens % self.page == 0
        if self.own:
            assert handle.cached_tokens == 0
        self.models[name] = TreeModel(prompt)

    @rule(n=number)
    def close(self, n: int) -> None:
        if n % 3 or not (found := self.pick(n // 3)):
            return
        name, _ = found
        self.eng.close(name)
        del self.models[name]
        self.sync()
        assert not self.busy(name)

    # ---------------------------------------------------------------- generation

    @rule(n=number, m=number, count=st.integers(1, 4))
    def generate(self, n: int, m: int, count: int) -> None:
        if not (found := self.pick(n)):
            return
        name, model = found
        tips = [t for t in model.runnable_tips() if not self.busy(name, t)]
        if tips and len(model.nodes[tips[m % len(tips)]].full) < CONTEXT:
            self.run(name, tips[m % len(tips)], count, self.params(name, m))

    def run(self, name: str, node: int, count: int, params: SamplingParams) -> None:
        model = self.models[name]
        prompt = list(model.nodes[node].full)
        if model.nodes[node].known != len(prompt):
            return
        begun = self.start_one(name, node, count, params)
        if begun is None:
            return
        try:
            got = begun.handle.result()
        except OutOfPages:
            self.sync()
            self.assert_excused(model, node, count)
        else:
            assert got == cold(prompt, count, params, self.window)
            self.sync()

    def assert_excused(self, model: TreeModel, node: int, count: int) -> None:
        """Running out must be true: alone, a path that fits the pool must get through.

        Where a branch leaves it a page may be filled in part only, and one more while it is copied.
        """
        path = model.path(node)
        places = {child.base for member in path for child in model.children(member)}
        need = -(-(len(model.nodes[node].full) + count) // self.page) + len(places) + 1
        assert self.running or need >= self.capacity, (
            f"out of pages with {need} wanted of {self.capacity} and nothing else running"
        )

    def start_one(self, name: str, node: int, count: int, params: SamplingParams) -> Running | None:
        prompt = list(self.models[name].nodes[node].full)
        try:
            handle = self.eng.start(name, count, node=node, params=params)
        except AdmissionRefused:
            if "max_queue" not in self.fixed:
                raise
            return None
        begun = Running(handle, prompt, count)
        self.running.append(begun)
        return begun

    @rule(n=number, m=number, count=st.integers(1, 6))
    def start(self, n: int, m: int, count: int) -> None:
        if len(self.running) == 3 or not (found := self.pick(n)):
            return
        name, model = found
        tips = [t for t in model.runnable_tips() if not self.busy(name, t)]
        if not tips:
            return
        node = tips[m % len(tips)]
        if len(model.nodes[node].full) < CONTEXT:
            self.start_one(name, node, count, self.params(name, m))

    @rule(n=number)
    def cancel(self, n: int) -> None:
        if self.running:
            run = self.running[n % len(self.running)]
            run.handle.cancel()
            run.handle.cancel()
            assert run.handle.finish_reason == "cancelled"
            self.sync()

    @rule(count=st.integers(1, 3))
    def generate_many(self, count: int) -> None:
        targets = [
            (name, node)
            for name, model in sorted(self.models.items())
            for node in model.runnable_tips()
            if not self.busy(name, node) and len(model.nodes[node].full) < CONTEXT
        ]
        if not targets or self.own:
            return
        params = SamplingParams(ignore_eos=True)
        prompts = [list(self.models[s].nodes[n].full) for s, n in targets]
        try:
            got = self.eng.generate_many(targets, count, params=params)
        except (OutOfPages, AdmissionRefused):
            got = None
        for i, (name, node) in enumerate(targets):
            model = self.models[name]
            now = self.eng.tokens(name, node)[len(prompts[i]) :]
            expected = cold(prompts[i], count, params, self.window)
            assert now == expected[: len(now)]
            assert got is None or got[i] == expected == now
            model.append(node, now)
        self.sync()

    # ---------------------------------------------------------------- what must always hold

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "eng"):
            return
        self.eng.check()
        for name, model in self.models.items():
            tree = self.eng.tree(name)
            assert {n.id for n in tree} == set(model.nodes)
            for node in tree:
                want = model.nodes[node.id]
                assert tree.tokens(node).tolist() == want.full
                assert (node.mode.value, node.line, node.known, node.alias_len) == (
                    want.mode,
                    want.line,
                    want.known,
                    want.base,
                )
                if self.own:
                    base = self.bases[name]
                    assert all(base <= t < base + LETTERS for t in want.full)
            assert {line: tip.id for line, tip in tree.tips.items()} == model.tips

    def teardown(self) -> None:
        if not hasattr(self, "eng"):
            return
        for run in list(self.running):
            run.handle.cancel()
        self.sync()
        for name, model in self.models.items():
            assert_rows_as_cold(self.eng, name)
            for tip in model.runnable_tips():
                self.run(name, tip, 2, self.params(name, 1))
            assert_rows_as_cold(self.eng, name)
        self.sound()
        assert_nothing_left(self.eng)
