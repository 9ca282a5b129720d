"""Masses of texts under the model: against whole logits, in one pass, with nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkserve import Engine
from forkserve.control.probe import choice_mass, forks
from forkserve.errors import BackendError, ConfigError, ContextOverflow, NodeError, SessionError
from forkserve.types import Work
from tests.waiting import HANGS_S

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    engine,
    mock,
    refs,
    snapshot,
)
from .scenarios import OTHER, PROMPT, WRAP

TOOLS = {"bash": 'bash", "', "search": 'search", "', "seek": 'seek", "', "web": 'web", "'}


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """The mock's logits after a path, from a pass over all of it."""
    work = Work("", 0, list(tokens), 0, (), None, logits=True)
    row = mock(engine())._run(work, {})[1].logits
    assert row is not None
    return row.astype(np.float64)


def walked(prompt: list[int], texts: dict[str, list[int]]) -> dict[str, float]:
    """The masses by walking every text token by token."""
    out = {}
    for name, text in texts.items():
        mass = 1.0
        for i in range(len(text) + 1):
            onward = {t[i] for t in texts.values() if t[:i] == text[:i] and len(t) > i}
            p = np.exp(logits_after([*prompt, *text[:i]]))
            here = text[:i] in texts.values()
            whole = p.sum() if here else p[list(onward)].sum()
            if i < len(text):
                mass *= p[text[i]] / whole
            elif onward:
                mass *= 1 - p[list(onward)].sum() / whole
        out[name] = mass
    return out


words = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.lists(words, min_size=1, max_size=7, unique_by=tuple), st.sampled_from([2, 7, 64]))
def test_masses_are_those_of_walking_each_text(found: list[list[int]], batch: int) -> None:
    texts = {str(n): text for n, text in enumerate(found)}
    eng = engine(max_batch_tokens=batch)
    s = eng.open(PROMPT).id
    got = eng.choice_mass(s, 1, texts)
    assert got == pytest.approx(walked(PROMPT, texts))
    assert sum(got.values()) == pytest.approx(1)
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_texts_that_the_model_would_never_write() -> None:
    """Their mass is told apart however far they are below what it would write."""
    row = np.full(8, 5000.0, np.float32)
    row[[3, 4]] = 1.0, 0.0
    masses = choice_mass({"a": [3], "b": [4]}, {(): row})
    assert masses["a"] == pytest.approx(1 / (1 + np.exp(-1)))
    assert sum(masses.values()) == pytest.approx(1)
    certain = np.zeros(8, np.float32)
    certain[4] = 9000
    assert choice_mass({"a": [3], "b": [3, 4]}, {(3,): certain}) == {"a": 0.0, "b": 1.0}


def test_one_pass_and_the_tree_stays_as_it_is() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    eng.commit(s, 1, WRAP)
    eng.generate(s, 1)
    before, passes = snapshot(eng, s), eng.stats().forward_passes
    eng.choice_mass(s, eng.tip(s), TOOLS)
    pages, once = refs(eng), eng.stats().forward_passes
    assert once - passes == 2, "the pending row of the last token, then all texts"
    eng.choice_mass(s, eng.tip(s), TOOLS)
    assert eng.stats().forward_passes - once == 1
    assert snapshot(eng, s) == before
    assert refs(eng) == pages
    assert eng.choice_mass(s, 1, {"only": [1, 2, 3]}) == {"only": 1.0}
    assert eng.stats().forward_passes - once == 1, "nothing to ask"


def test_only_places_where_texts_part_are_run() -> None:
    ids = {"a": [1, 2, 3], "b": [1, 2, 4, 5, 6, 7], "c": [1, 2, 4, 5, 9], "d": [1, 2]}
    assert forks(ids) == [(1, 2), (1, 2, 4, 5)]
    assert forks({"a": [5]}) == []


def test_it_feeds_the_planner() -> None:
    eng = engine(capacity_pages=128)
    s = eng.open(PROMPT).id
    masses = eng.choice_mass(s, 1, TOOLS)
    top = sorted(TOOLS, key=lambda name: -masses[name])
    nodes = eng.speculate_from_grammar(s, 1, None, TOOLS, 'x", "')
    assert list(nodes) == [*top[:3], "other"]
    while eng.drain_slack():
        pass
    tree = eng.tree(s)
    for name, number in nodes.items():
        text = TOOLS.get(name, 'x", "')
        assert tree.tokens(tree.get(number), len(PROMPT)).tolist() == list(text.encode())
        assert tree.get(number).speculated == len(text)
    result = eng.commit(s, 1, TOOLS[top[1]] + "rest")
    assert (result.winner, result.skipped_prefill) == (nodes[top[1]], len(TOOLS[top[1]]))
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_beside_other_work() -> None:
    eng = engine(capacity_pages=128)
    one, two = eng.open(PROMPT).id, eng.open(OTHER).id
    kid = eng.fork(two, 1, "k", WRAP)
    eng.speculate(two, kid)
    running = eng.start(two, 6)
    assert sum(eng.choice_mass(one, 1, TOOLS).values()) == pytest.approx(1)
    assert running.result() == cold(OTHER, 6)
    eng.check()


def test_what_is_refused() -> None:
    eng = engine({"max_context": 20})
    s = eng.open(PROMPT).id
    guess = eng.fork(s, 1, "k", WRAP)
    for texts in ({}, {"a": []}, {"a": [1], "b": [1]}, {"a": [10**6]}):
        with pytest.raises(ConfigError):
            eng.choice_mass(s, 1, texts)
    with pytest.raises(NodeError, match="speculative"):
        eng.choice_mass(s, guess, TOOLS)
    with pytest.raises(NodeError, match="no node"):
        eng.choice_mass(s, 99, TOOLS)
    with pytest.raises(SessionError, match="no open session"):
        eng.choice_mass("x", 1, TOOLS)
    with pytest.raises(ContextOverflow):
        eng.choice_mass(s, 1, {"a": [5] * 15, "b": [*[5] * 14, 6]})
    running = eng.start(s, 3)
    with pytest.raises(SessionError, match="running"):
        eng.choice_mass(s, 1, TOOLS)
    running.cancel()
    mock(eng).fail_next()
    with pytest.raises(BackendError, match="told to fail"):
        eng.choice_mass(s, 1, TOOLS)
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_a_generation_may_follow_at_once_and_threads_take_turns() -> None:
    eng: Engine = engine(background=True, capacity_pages=128)
    s = eng.open(PROMPT).id
    masses: list[dict[str, float]] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            masses.append(eng.choice_mass(s, 1, TOOLS))
        except SessionError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert len(masses) + len(failures) == 4
    assert all(m == masses[0] for m in masses)
    assert eng.generate(s, 3) == cold(PROMPT, 3)
    eng.shutdown()
