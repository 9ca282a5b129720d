"""Sessions longer than the window: every token is the one Hugging Face would have chosen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine
from forkserve.engine.local import LocalBackend
from forkserve.store import Store
from forkserve.types import SamplingParams

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
    checkpoint: Checkpoints, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model, folder = checkpoint(family, **changes)
    witness = Witness(model)
    config = tiny_config(capacity_pages=60, prefill_chunk=32)
    store = Store(tmp_path, restore="always")
    eng = Engine(LocalBackend(config, folder), store=store)
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
    other = ids(150, 3)
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
    eng = Engine(LocalBackend(config, folder), store=store)
    assert eng.resume("a").cached_tokens > 200
    assert eng.tokens("a") == text
    witness.chose(text, list(eng.generate("a", 8, params=GO_ON)))
    eng.check()
    eng.shutdown()
    store.close()
