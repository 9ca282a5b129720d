"""Chains of short nodes: one pass for all of them, and each keeps its own rows."""

from __future__ import annotations

import random

import pytest

from forkserve import Engine
from forkserve.engine import MockBackend
from forkserve.errors import OutOfPages
from forkserve.tree.rows import reserve

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    mock,
    node,
    tick,
)
from .scenarios import PROMPT

P = 4


def chain(eng: Engine, lengths: list[int]) -> tuple[str, list[int]]:
    """A session whose main line is a chain of nodes of these lengths, without rows."""
    s = eng.open(PROMPT).id
    nodes, token = [1], 20
    for length in lengths:
        ids = [token + i for i in range(length)]
        token += length
        nodes.append(eng.commit(s, nodes[-1], ids).winner)
    drop(eng, s)
    return s, nodes


def drop(eng: Engine, s: str) -> None:
    """Take all rows of a session, as a full pool or a resume would."""
    with core(eng).lock:
        tree = eng.tree(s)
        for one in sorted(tree, key=lambda n: -n.id):
            if (s, one.id) in core(eng).tasks:
                core(eng).finish(core(eng).tasks[s, one.id])
            core(eng).drop_rows(tree, one)
    eng.check()


@pytest.mark.parametrize("tail", ["auto", "pack", "freeze"])
@pytest.mark.parametrize("lengths", [[1] * 12, [3, 1, 5], [4, 4, 4], [1, 9, 1, 2], [2] * 30])
def test_a_chain_takes_one_pass(tail: str, lengths: list[int]) -> None:
    eng = engine(tail=tail, prefix_index=False, capacity_pages=128)
    s, nodes = chain(eng, lengths)
    history = eng.tokens(s)
    before = eng.stats().forward_passes
    assert eng.generate(s, 3) == cold(history, 3)
    assert eng.stats().forward_passes - before == 3
    eng.check()
    pages = -(-node(eng, s, nodes[-1]).kv_end // P)
    assert eng.stats().live_pages <= pages + 1, "pages are shared along the chain, not one a node"
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_in_chunks_of_any_length(chunk: int) -> None:
    eng = engine(prefill_chunk=chunk, prefix_index=False, capacity_pages=128)
    s, _ = chain(eng, [1, 3, 1, 1, 6, 2])
    before = eng.stats().prefilled_tokens.committed
    history = eng.tokens(s)
    assert_same_as_cold(eng, s)
    assert eng.stats().prefilled_tokens.committed - before <= len(history)
    assert_nothing_left(eng)


def test_each_node_keeps_its_rows_for_its_branches() -> None:
    """With branches along the chain, what a branch shares is there already."""
    eng = engine(prefix_index=False, capacity_pages=256)
    s, nodes = chain(eng, [2, 3, 1, 4])
    kids = [eng.attempt(s, eng.fork(s, n, "k", [90 + n])) for n in nodes[:-1]]
    before = eng.stats().forward_passes
    eng.generate(s, 1)
    assert eng.stats().forward_passes - before == 1
    for kid in kids:
        history = eng.tokens(s, kid)
        before = eng.stats().forward_passes
        assert eng.generate(s, 2, node=kid) == cold(history, 2)
        assert eng.stats().forward_passes - before == 2, "its one own token, then one more"
    eng.check()
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("act", ["fork", "abort", "fail", "cancel", "close"])
def test_what_happens_while_the_chain_is_computed(act: str) -> None:
    eng = engine(prefix_index=False, capacity_pages=128)
    s, nodes = chain(eng, [1, 2, 3, 1])
    kid = eng.attempt(s, eng.fork(s, nodes[-1], "k", [7]))
    below = eng.attempt(s, eng.fork(s, kid, "k", [8, 9]))
    running = eng.start(s, 3, node=below)
    backend = mock(eng)
    forked: list[int] = []

    def during(batch: object) -> None:
        backend._on_batch = None
        if act == "fork":
            forked.append(eng.fork(s, nodes[2], "new", [5], at=len(PROMPT) + 2))
        elif act == "abort":
            eng.abort(s, kid)
        elif act == "fail":
            raise ValueError("this pass fails")
        elif act == "cancel":
            running.cancel()
        else:
            eng.close(s)

    backend._on_batch = during
    tick(eng)
    eng.check()
    if act == "close":
        return assert_nothing_left(eng)
    assert running.done is (act != "fork")
    for branch in forked:
        eng.attempt(s, branch)
        assert eng.generate(s, 2, node=branch) == cold(eng.tokens(s, branch)[:-2], 2)
    assert_same_as_cold(eng, s)
    eng.check()
    assert_nothing_left(eng)


@pytest.mark.parametrize("seed", range(30))
def test_random_trees_come_back_in_any_pool(seed: int) -> None:
    draw = random.Random(seed)
    eng = engine(
        {"force_preempt_every": draw.choice([0, 0, 2, 3])},
        capacity_pages=draw.choice([24, 40, 200]),
        tail=draw.choice(["auto", "pack", "freeze"]),
        prefill_chunk=draw.choice([1, 3, 8, 64]),
        prefix_index=draw.random() < 0.5,
    )
    s, nodes = chain(eng, [draw.randint(1, 4) for _ in range(draw.randint(2, 6))])
    tips = [nodes[-1]]
    for _ in range(6):
        parent = draw.choice([*nodes, *tips])
        length = len(eng.tokens(s, parent))
        at = draw.choice([None, draw.randint(1, length)])
        kid = eng.fork(
            s, parent, "k", [draw.randint(0, 9) for _ in range(draw.randint(0, 3))], at=at
        )
        if draw.random() < 0.7 and eng.tree(s).get(kid).parent.line is not None:
            tips.append(eng.attempt(s, kid))
    for _ in range(8):
        tip = draw.choice(tips)
        if eng.tree(s).is_dead(tip) or eng.tree(s).tips.get(node(eng, s, tip).line) is not node(
            eng, s, tip
        ):
            continue
        history = eng.tokens(s, tip)
        count = draw.randint(1, 5)
        assert eng.generate(s, count, node=tip) == cold(history, count)
        eng.check()
        if draw.random() < 0.4:
            drop(eng, s)
        elif draw.random() < 0.2 and tip != eng.tip(s) and len(tips) > 2:
            eng.abort(s, tip)
            eng.check()
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_is_taken_back_into_a_page_of_several_nodes(cut: int) -> None:
    eng = engine(prefix_index=False, capacity_pages=128)
    s, nodes = chain(eng, [1, 2, 5, 4])
    for n in nodes[:-1]:  # siblings, so that every node keeps its own rows
        eng.attempt(s, eng.fork(s, n, "k", [95]))
    assert_same_as_cold(eng, s)
    eng.commit(s, eng.tip(s), [99], at=len(PROMPT) + cut)
    eng.check()
    assert_same_as_cold(eng, s)
    assert_nothing_left(eng)


def test_pages_run_out_behind_a_shared_page() -> None:
    """A row that cannot be reserved leaves the seal as it was."""
    eng = engine(prefix_index=False, capacity_pages=5)
    s, nodes = chain(eng, [1, 1, 1])
    eng.attempt(s, eng.fork(s, nodes[1], "k", [95]))
    eng.generate(s, 1)
    with core(eng).lock:
        pages = core(eng).pool.alloc(core(eng).pool.free_pages)
        try:
            reserve(eng.tree(s), node(eng, s, nodes[-1]), node(eng, s, nodes[-1]).kv_end, 1)
        except OutOfPages:
            pass
        finally:
            core(eng).pool.decref(pages)
    eng.check()
    assert_same_as_cold(eng, s, 1)
    assert_nothing_left(eng)


def test_a_resumed_chain_on_the_default_mock() -> None:
    eng = Engine(MockBackend())
    s, _ = chain(eng, [1] * 100)
    before = eng.stats().forward_passes
    eng.generate(s, 1)
    assert eng.stats().forward_passes - before == 1
