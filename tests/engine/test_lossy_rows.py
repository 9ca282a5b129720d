"""Rows of a lossy format stay with those who asked: other engines compute, or get exact ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.errors import StoreError
from forkserve.kernels.native import library
from forkserve.store import Store
from forkserve.store.rebuild import rebuild, verify
from forkserve.types import SamplingParams

from .conftest import Checkpoints
from .resident import resident_rows

FREE = SamplingParams(ignore_eos=True)
pytestmark = pytest.mark.skipif(library.available() is not None, reason=str(library.available()))


class Rig:
    """One model, one directory, and what an engine without a store says and holds."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._cold = self.engine(None)
        self._known: dict[tuple[int, ...], bytes] = {}

    def engine(self, store: Store | None, **config: Any) -> Engine:
        settings = {"page_size": 16, "capacity_pages": 400, **config}
        backend = LocalBackend(ForkServeConfig(**settings), self._model, kernels="native")
        return Engine(backend, store=store)

    def run(self, verbs: Callable[[Engine, Store], Any], **options: Any) -> Any:
        """What `verbs` return, in an engine of its own over the directory."""
        with Store(self.folder, **{"restore": "always", **options}) as store:
            eng = self.engine(store)
            try:
                return verbs(eng, store)
            finally:
                eng.shutdown()

    def exact(self, eng: Engine, session: str) -> bool | None:
        """Whether the rows of a session are bit for bit a cold engine's; None: it has none."""
        upto, held = resident_rows(eng, session)
        if not upto:
            return None
        text = tuple(eng.tokens(session)[:upto])
        if text not in self._known:
            h = self._cold.open(text)
            self._known[text] = resident_rows(self._cold, h.id)[1]
            self._cold.close(h.id)
        return held == self._known[text]

    def cold(self, text: Sequence[int], count: int) -> list[int]:
        h = self._cold.open(text)
        out = self._cold.generate(h.id, count, params=FREE)
        self._cold.close(h.id)
        return out

    def close(self) -> None:
        self._cold.shutdown()


@pytest.fixture
def rig(checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(checkpoint("llama", max_position_embeddings=2048)[1], tmp_path / "store")
    yield made
    made.close()


TEXT = [(7 * i * i + i) % 200 for i in range(256 * 3 + 60)]
WHOLE = 256 * 3
INT8 = {"format": "int8", "lossy": True}
LOSSY = {"format": "raw", "lossy": True}


def opened(rig: Rig, upto: int = len(TEXT), **options: Any) -> tuple[int, bool | None]:
    """Tokens that an engine finds of a text that it opens and publishes; are its rows exact?"""

    def verbs(eng: Engine, store: Store) -> tuple[int, bool | None]:
        h = eng.open(TEXT[:upto])
        eng.publish(h.id)
        return h.cached_tokens, rig.exact(eng, h.id)

    found: tuple[int, bool | None] = rig.run(verbs, **options)
    return found


def test_rows_over_lossy_ones_are_published_to_their_like_alone(rig: Rig) -> None:
    assert opened(rig, 300, **INT8) == (0, True)
    assert opened(rig, **LOSSY) == (256, False), "it asked for them, and stores what came of it"
    assert opened(rig) == (0, True)
    assert opened(rig) == (WHOLE, True)
    assert opened(rig, **LOSSY) == (WHOLE, True), "of both it takes the exact ones"


def test_a_lossy_engine_goes_on_where_the_exact_rows_end(rig: Rig) -> None:
    assert opened(rig, 300) == (0, True)
    assert opened(rig, **INT8) == (256, True)
    assert opened(rig, **LOSSY) == (WHOLE, False)
    assert opened(rig) == (256, True)


def test_a_session_and_a_name_of_a_lossy_engine_are_text_to_an_exact_one(rig: Rig) -> None:
    assert opened(rig, 600, **INT8) == (0, True)

    def begin(eng: Engine, store: Store) -> tuple[list[int], list[int]]:
        h = eng.open(TEXT[:600], session="a")
        eng.generate(h.id, 20, params=FREE)
        eng.commit(h.id, h.tip, TEXT[600:])
        eng.publish(h.id, name="kept")
        said = eng.generate(h.id, 4, params=FREE)
        assert rig.exact(eng, h.id) is False
        return eng.tokens(h.id), said

    def go_on(eng: Engine, store: Store) -> None:
        h = eng.resume("a")
        assert h.cached_tokens == 0
        assert eng.tokens(h.id) == text
        assert eng.generate(h.id, 4, params=FREE) == rig.cold(text, 4)
        assert rig.exact(eng, h.id)
        other = eng.restore("kept")
        named = eng.tokens(other.id)
        assert named == text[: len(named)]
        assert eng.generate(other.id, 4, params=FREE) == rig.cold(named, 4)
        branch = eng.fork(other.id, other.tip, "b", [1, 2, 3], at=500)
        eng.promote(other.id, branch)
        eng.commit(other.id, branch, TEXT[:300])
        eng.publish(other.id)
        assert rig.exact(eng, other.id)

    text, _ = rig.run(begin, **LOSSY)
    rig.run(go_on)


def test_what_leaves_the_memory_of_a_lossy_engine_stays_lossy(rig: Rig) -> None:
    assert opened(rig, **INT8) == (0, True)

    def verbs(eng: Engine, store: Store) -> float:
        row = eng.backend.info.kv_bytes_per_token
        assert store.memory is not None
        store.memory.limit = 900 * row  # one text, and a little
        for text in (TEXT, TEXT[::-1], [5, *TEXT]):
            h = eng.open(text)
            eng.mark_idle(h.id, h.tip, 60.0)
            assert eng.settle_tiers()
        assert store.publisher.drain()
        return sum(
            s["value"] for s in store.metrics()["process"] if s["name"] == "published_chunks"
        )

    assert rig.run(verbs, memory_bytes=1 << 30, **LOSSY) >= 3
    assert opened(rig) == (0, True)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_stores_lends_lossy_rows_to_an_exact_engine(rig: Rig, seed: int) -> None:
    """Any formats, tiers and verbs, one after the other over one directory."""
    rng = random.Random(seed)
    bases = [[rng.randrange(200) for _ in range(n)] for n in (300, 600)]
    seen: set[tuple[bool, bool | None]] = set()  # (lossy asked for, rows exact)
    names: list[str] = []

    def verbs(eng: Engine, store: Store) -> None:
        for _ in range(rng.randint(2, 4)):
            kind = rng.randrange(4)
            ended = [one for one in eng.stored_sessions() if one not in eng.sessions()]
            if kind == 0 and names:
                h = eng.restore(rng.choice(names))
            elif kind == 1 and ended:
                h = eng.resume(rng.choice(ended))
            else:
                h = eng.open(rng.choice(bases), session=f"s{rng.getrandbits(60)}")
            if len(eng.tokens(h.id)) > 1200:
                continue
            text = eng.tokens(h.id)
            if not lossy:
                assert eng.generate(h.id, 3, params=FREE) == rig.cold(text, 3)
            else:
                eng.generate(h.id, 3, params=FREE)
            said = rng.choice(bases)[:270]
            guess = eng.fork(h.id, h.tip, "guess", said[: rng.choice([30, 200])])
            eng.speculate(h.id, guess)
            eng.drain_slack()
            eng.commit(h.id, h.tip, said)
            if rng.random() < 0.6:
                name = f"n{len(names)}" if rng.random() < 0.5 else None
                eng.publish(h.id, name=name)
                names.extend([name] if name else [])
            if rng.random() < 0.5:
                eng.mark_idle(h.id, h.tip, 60.0)
                eng.settle_tiers()
                eng.promote(h.id, h.tip)
            eng.warm(h.id)
            seen.add((lossy, rig.exact(eng, h.id)))
            eng.check()

    forms = ["raw", "zstd", "int8"]
    rig.run(lambda eng, store: [eng.publish(eng.open(base).id) for base in bases], **INT8)
    for turn in range(6):
        lossy = turn < 2 or rng.random() < 0.4
        options: dict[str, Any] = {"lossy": lossy, "format": rng.choice(forms[: 2 + lossy])}
        if rng.random() < 0.5:
            options |= {"memory_bytes": rng.choice([100_000, 1 << 24]), "device_bytes": 300_000}
        rig.run(verbs, **options)
        if rng.random() < 0.3:
            for path in rig.folder.glob("catalog.db*"):
                path.unlink()
            names.clear()
            with Store(rig.folder) as store:
                rebuild(store.vault)
                assert verify(store.vault).clean
    assert (False, False) not in seen
    assert {(False, True), (True, False)} <= seen


def test_memory_is_of_one_model_and_variant(rig: Rig, checkpoint: Checkpoints) -> None:
    """Pieces say which text they stand for, not whose numbers."""
    with Store(rig.folder, restore="always", memory_bytes=1 << 24) as store:
        first = rig.engine(store)
        h = first.open(TEXT)
        first.mark_idle(h.id, h.tip, 60.0)
        assert first.settle_tiers()
        assert store.memory is not None
        assert len(store.memory) == 4
        model = checkpoint("llama", max_position_embeddings=2048)[1]
        config = ForkServeConfig(page_size=16, capacity_pages=400)
        other = LocalBackend(config, model, kernels="torch")
        with pytest.raises(StoreError, match="another model or variant"):
            Engine(other, store=store)
        first.shutdown()
        again = rig.engine(store)
        assert again.open(TEXT).cached_tokens == len(TEXT), "the same engine finds its own"
        again.shutdown()
        second = Engine(other, store=store)
        assert second.open(TEXT).cached_tokens == 0
        second.shutdown()
