"""Sessions longer than the window: every token is the one Hugging Face would have chosen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine
from forkserve.engine.local import LocalBackend
from forkserve.store import Store
from forkserve.tree.rows import spans
from forkserve.types import SamplingParams
from forkserve.warming import read_range

from .conftest import VOCAB, Checkpoints, reference, tiny_config

TIE = 1e-3  # logits: a choice this close to the best is as good
GO_ON = SamplingParams(ignore_eos=True)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 20}),
    ("gemma3", {"sliding_window": 20, "num_hidden_layers": 7}),
    ("gemma2", {"sliding_window": 33, "attn_logit_softcapping": 2.0}),
]


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


class Witness:
    """Checks tokens against the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def chose(self, context: list[int], tokens: list[int]) -> None:
        assert tokens
        logits = reference(self._model, context + tokens)
        for i, token in enumerate(tokens, len(context) - 1):
            assert logits[i].max() - logits[i][token] < TIE, f"token {i + 1 - len(context)}"


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_fork_commit_evict_restore(
    checkpoint: Checkpoints, tmp_path: Path, kernels: str, family: str, changes: dict[str, Any]
) -> None:
    model, folder = checkpoint(family, **changes)
    witness = Witness(model)
    config = tiny_config(capacity_pages=32, prefill_chunk=32)
    store = Store(tmp_path, restore="always")
    eng = Engine(LocalBackend(config, folder, kernels=kernels), store=store)
    prompt = ids(300, 1)  # longer than a stored chunk, and than every window
    h = eng.open(prompt, session="a")
    witness.chose(prompt, list(eng.generate("a", 9, params=GO_ON)))

    # A guess that is right for four tokens of seven, and an attempt beside it.
    text = eng.tokens("a")
    trunk, seen = h.tip, ids(7, 2)
    guess = eng.fork("a", trunk, "guess", [*seen[:4], 5, 6])
    attempt = eng.fork("a", trunk, "attempt", seen[:2])
    eng.speculate("a", guess)
    eng.attempt("a", attempt)
    got = list(eng.generate("a", 6, node=attempt, params=GO_ON))
    witness.chose([*text, *seen[:2]], got)
    eng.commit("a", trunk, seen)
    text = eng.tokens("a")
    assert text[-7:] == seen
    witness.chose(text, list(eng.generate("a", 8, params=GO_ON)))

    # An earlier place of the line: its window has long been left.
    text = eng.tokens("a")
    earlier = eng.fork("a", trunk, "earlier", [7, 8], at=40)
    eng.attempt("a", earlier)
    witness.chose([*text[:40], 7, 8], list(eng.generate("a", 5, node=earlier, params=GO_ON)))

    # Another session takes the pages; the first one's rows come back by prefill.
    other = ids(400, 3)
    eng.open(other, session="b")
    witness.chose(other, list(eng.generate("b", 4, params=GO_ON)))
    text, computed = eng.tokens("a"), eng.stats().prefilled_tokens.committed
    witness.chose(text, list(eng.generate("a", 4, params=GO_ON)))
    assert eng.stats().prefilled_tokens.committed > computed  # they had gone
    eng.check()
    eng.publish("a")
    text = eng.tokens("a")
    eng.shutdown()
    store.close()

    # A new engine, with rows from the store.
    store = Store(tmp_path, restore="always")
    eng = Engine(LocalBackend(config, folder, kernels=kernels), store=store)
    kept = not eng.backend.info.extra["window"]  # else its beginning is out of every window
    assert (eng.resume("a").cached_tokens > 200) == kept
    assert eng.tokens("a") == text
    witness.chose(text, list(eng.generate("a", 8, params=GO_ON)))
    eng.check()
    eng.shutdown()
    store.close()


def long_run(backend: LocalBackend) -> tuple[Engine, list[int], int]:
    """A session of 420 positions, its last tokens, and the most pages it held meanwhile."""
    eng = Engine(backend)
    eng.open(ids(120, 4), session="a")
    running, most = eng.start("a", 300, params=GO_ON), 0
    while not running.done:
        eng._loop.tick(wake=True)
        if running.tokens:
            most = max(most, eng.stats().live_pages)
    return eng, list(running.tokens), most


def test_pages_out_of_every_window_go(checkpoint: Checkpoints, kernels: str) -> None:
    """Mistral, whose layers all have a window: a long text needs the pages of its end alone."""
    model, folder = checkpoint("mistral", sliding_window=20)
    witness = Witness(model)
    config = tiny_config(capacity_pages=32, prefill_chunk=32, prefix_index=False)
    backend = LocalBackend(config, folder, kernels=kernels)
    assert backend.info.extra["window"] == 20
    eng, tokens, most = long_run(backend)
    witness.chose(ids(120, 4), tokens)
    assert most <= 4  # of 27 that its rows would fill
    eng.check()

    # A place that fell out of the window: its rows come back from the beginning.
    text = eng.tokens("a")
    earlier = eng.fork("a", 1, "earlier", [7, 8], at=200)
    eng.attempt("a", earlier)
    witness.chose([*text[:200], 7, 8], list(eng.generate("a", 5, node=earlier, params=GO_ON)))
    witness.chose(text, list(eng.generate("a", 5, params=GO_ON)))
    eng.abort("a", earlier)
    eng.commit("a", 1, [9, 10], at=300)
    assert eng.tokens("a") == [*text[:300], 9, 10]
    witness.chose([*text[:300], 9, 10], list(eng.generate("a", 20, params=GO_ON)))
    assert eng.stats().live_pages <= 4
    eng.check()
    eng.shutdown()

    keeps = LocalBackend(config, folder, kernels=kernels)
    keeps.info.extra["window"] = 0  # the engine is not told, and keeps every row
    eng, same, most = long_run(keeps)
    assert most == 27
    if backend.info.extra["exact"]:
        assert same == tokens
    eng.shutdown()


def rows(eng: Engine, session: str, node: int) -> tuple[int, bytes]:
    """Position of the first row in pages on a path, and all of them up to its last one."""
    tree = eng.tree(session)
    parts = spans(tree, tree.get(node), tree.get(node).kv_end)
    backend = eng.backend
    assert isinstance(backend, LocalBackend)
    return parts[0].start, bytes(backend.read_rows(parts))


def test_branches_keep_the_rows_that_their_own_end_reads(
    checkpoint: Checkpoints, kernels: str
) -> None:
    """Forks, commits, aborts, eviction and forks below a floor; rows are those of a cold engine."""
    model, folder = checkpoint("mistral", sliding_window=20)
    witness = Witness(model)
    config = tiny_config(capacity_pages=32, prefill_chunk=32, prefix_index=False)
    backend = LocalBackend(config, folder, kernels=kernels)
    all_of_it = config.replace(capacity_pages=128)
    keeps = LocalBackend(all_of_it, folder, kernels=kernels)
    keeps.info.extra["window"] = 0  # the engine is not told, and keeps every row
    cold = Engine(keeps)
    eng = Engine(backend)

    def go_on(node: int, count: int) -> None:
        text = eng.tokens("a", node)
        got = list(eng.generate("a", count, node=node, params=GO_ON))
        witness.chose(text, got)
        eng.check()
        if not backend.info.extra["exact"]:
            return
        first, found = rows(eng, "a", node)
        cold.open([*text, *got[:-1]], session="cold")
        end, row_bytes = len(text) + count - 1, keeps.info.kv_bytes_per_token
        want = spans(cold.tree("cold"), cold.tree("cold").root, end)
        assert bytes(read_range(keeps, want, first, end, row_bytes)) == found
        cold.close("cold")
        assert first == 0 or first > len(text) - 60

    eng.open(ids(150, 4), session="a")
    go_on(1, 30)
    kids = [eng.fork("a", 1, f"try{i}", ids(3, 5 + i)) for i in range(3)]
    for kid in kids:
        eng.attempt("a", kid)
    for kid in kids * 2:
        go_on(kid, 50)
    assert eng.stats().live_pages <= 4 * 4  # 33 would be filled, and the pool has 32
    assert eng.stats().evicted_nodes == 0
    late = eng.fork("a", kids[0], "late", ids(3, 9), at=200)
    eng.attempt("a", late)
    for node in (late, kids[0], kids[1]):
        go_on(node, 20)
    early = eng.fork("a", 1, "early", ids(3, 10), at=60)
    eng.attempt("a", early)
    for node in (early, kids[2], 1):
        go_on(node, 20)
    eng.abort("a", kids[0])
    other = ids(300, 11)  # takes most of the pages
    eng.open(other, session="b")
    witness.chose(other, list(eng.generate("b", 3, params=GO_ON)))
    eng.promote("a", kids[1])
    go_on(kids[1], 20)
    eng.commit("a", kids[1], ids(9, 12))
    go_on(eng.tree("a").tip.id, 20)
    eng.shutdown()
    cold.shutdown()


@pytest.mark.parametrize(("family", "changes"), MODELS[1:])
def test_pages_stay_where_a_layer_sees_all(
    checkpoint: Checkpoints, kernels: str, family: str, changes: dict[str, Any]
) -> None:
    _, folder = checkpoint(family, **changes)
    backend = LocalBackend(tiny_config(capacity_pages=32), folder, kernels=kernels)
    assert backend.info.extra["window"] == 0
    backend.close()
