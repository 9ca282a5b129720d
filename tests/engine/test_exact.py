"""Native kernels: logits have the bits of a cold pass, by whatever route a prefix came.

Random forests of works: prefills in chunks, forks over frozen and packed tails, batch mates, rows
lost and computed again, rows stored and brought back to other pages.  At the end every path is
prefilled alone, in one pass, in a fresh engine, and every row of logits must be bit-equal.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from forkserve.config import ForkServeConfig
from forkserve.engine.local import LocalBackend
from forkserve.kernels.native import library
from forkserve.types import Batch, RowCopy, Span, Work

from .conftest import VOCAB, Checkpoints, tiny_config
from .rig import Node, Rig, kv_rows

_absent = library.available()
pytestmark = pytest.mark.skipif(_absent is not None, reason=str(_absent))
VARIANTS = ("float32", "bfloat16", "int8", "w8a16")
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("qwen2", {}),
    ("gemma3", {"num_hidden_layers": 7, "sliding_window": 20}),
    ("mistral", {"sliding_window": 600}),
    ("gemma2", {"sliding_window": 100, "tie_word_embeddings": True}),
]


@dataclass
class Path:
    """A node of the rig with all tokens before its end."""

    node: Node
    tokens: list[int] = field(default_factory=list)


class Forest:
    """Random routes over one backend; `seen` holds (tokens, first position, logits)."""

    def __init__(self, backend: LocalBackend, seed: int, chunk: int) -> None:
        self.backend = backend
        self.rig = Rig(backend, seed)
        self.random = random.Random(seed)
        self.chunk = chunk
        self.paths: list[Path] = []
        self.seen: list[tuple[list[int], int, np.ndarray]] = []

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(self.backend.info.vocab_size) for _ in range(count)]

    def run(self, works: list[tuple[Path, list[int]]]) -> None:
        """Append tokens to each path, in one batch."""
        begins = [len(path.tokens) for path, _ in works]
        items = [self.rig.work(path.node, tokens) for path, tokens in works]
        rows = self.rig.logits(*items)
        for (path, tokens), begin, logits in zip(works, begins, rows, strict=True):
            path.tokens += tokens
            self.seen.append((list(path.tokens), begin, logits))

    def root(self, length: int) -> None:
        path = Path(self.rig.root())
        while length:
            count = min(length, self.random.randint(1, self.chunk))
            self.run([(path, self.words(count))])
            length -= count
        self.paths.append(path)

    def grow(self) -> None:
        """Some paths decode or take a chunk, beside each other."""
        some = self.random.sample(self.paths, self.random.randint(1, len(self.paths)))
        sizes = [self.random.choice([1, 1, 1, 2, 7, 40]) for _ in some]
        self.run([(path, self.words(n)) for path, n in zip(some, sizes, strict=True)])

    def frozen(self) -> None:
        """A child at any position that shares the last page and starts its own."""
        path = self.random.choice(self.paths)
        at = self.random.randint(1, len(path.tokens))
        self.paths.append(Path(self.rig.fork(path.node, at), path.tokens[:at]))

    def packed(self) -> None:
        """A child whose first page begins with a copy of the last rows of its parent."""
        path = self.random.choice(self.paths)
        span = path.node.own()
        if not span.length:
            return
        page = self.rig.page
        last = span.offset + span.length
        rows = min(last - (last - 1) // page * page, span.length)
        parent = span.pages[(last - 1) // page]
        child = self.rig.fork(path.node, path.node.end - rows)
        child.pages, child.length, child.offset = [self.rig.free.pop()], rows, 0
        copy = RowCopy(parent, (last - rows) % page, child.pages[0], 0, rows)
        self.backend.execute(Batch([], [copy]))
        self.paths.append(Path(child, list(path.tokens)))

    def lost(self) -> None:
        """The last rows of a path are wiped and computed again in other chunks."""
        path = self.random.choice(self.paths)
        span = path.node.own()
        if span.length < 2:
            return
        keep = self.random.randrange(span.length)
        gone = Span(span.key, span.pages, span.start, span.length - keep, span.offset + keep)
        nothing = np.full(gone.length * self.backend.info.kv_bytes_per_token, 0xFF, np.uint8)
        self.backend.write_rows(gone, nothing.tobytes(), 0)
        begin = path.node.end - gone.length
        again = path.tokens[begin:]
        path.node.length, path.tokens = keep, path.tokens[:begin]
        while again:
            count = self.random.randint(1, self.chunk)
            self.run([(path, again[:count])])
            again = again[count:]

    def stored(self) -> None:
        """All rows of a path travel to other pages, at another alignment."""
        path = self.random.choice(self.paths)
        rows = self.backend.read_rows(path.node.spans())
        node = self.rig.root()
        while len(node.pages) * self.rig.page < node.offset + len(path.tokens):
            node.pages.append(self.rig.free.pop())
        node.length = len(path.tokens)
        self.backend.write_rows(node.own(), rows, 0)
        self.paths.append(Path(node, list(path.tokens)))

    def step(self) -> None:
        verbs = [self.grow, self.grow, self.grow, self.frozen, self.packed, self.lost, self.stored]
        self.random.choice(verbs)()

    def check(self, cold: LocalBackend) -> int:
        """Compare all that was seen with passes over each path alone; the rows compared."""
        compared = 0
        whole: list[tuple[list[int], np.ndarray]] = []
        for tokens, begin, logits in sorted(self.seen, key=lambda one: -len(one[0])):
            want = next((w for t, w in whole if t[: len(tokens)] == tokens), None)
            if want is None:
                work = Work("s", 0, tokens, 0, (), None, all_logits=True)
                want = cold.execute(Batch([work])).results[0].logits
                whole.append((tokens, want))
            assert np.array_equal(logits, want[begin : len(tokens)])
            compared += len(logits)
        return compared


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_tiny(checkpoint: Checkpoints, variant: str, seed: int) -> None:
    wander(checkpoint, variant, seed)


@pytest.mark.parametrize("isa", library.supported()[1:])
@pytest.mark.parametrize(("variant", "seed"), [("bfloat16", 1), ("bfloat16", 3), ("w8a16", 1)])
def test_tiny_on_other_instruction_sets(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, isa: str, variant: str, seed: int
) -> None:
    """Products are kernels of their own where there are matrix units, and where not."""
    monkeypatch.setenv("FORKSERVE_ISA", isa)
    wander(checkpoint, variant, seed)


def wander(checkpoint: Checkpoints, variant: str, seed: int) -> None:
    family, changes = MODELS[seed]
    folder = checkpoint(family, max_position_embeddings=2048, **changes)[1]
    config = tiny_config(page_size=[16, 32, 48][seed % 3], capacity_pages=2048)
    backend = LocalBackend(config, folder, dtype=variant, kernels="native", threads=1 + seed % 3)
    forest = Forest(backend, seed, chunk=[30, 300, 700][seed % 3])
    forest.root([80, 600, 1300][seed % 3])  # beyond 512 positions attention is cut in splits
    forest.root(20)
    for _ in range(25):
        forest.step()
    cold = LocalBackend(config, folder, dtype=variant, kernels="native", threads=1)
    assert forest.check(cold) > 300
    backend.close()
    cold.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_instruction_sets_agree(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = checkpoint(family, max_position_embeddings=2048)[1]
    tokens = [random.Random(1).randrange(VOCAB) for _ in range(700)]
    for variant in VARIANTS:
        found = []
        for isa in library.supported():
            monkeypatch.setenv("FORKSERVE_ISA", isa)
            backend = LocalBackend(tiny_config(), folder, dtype=variant, kernels="native")
            assert backend.info.extra["instruction_set"] == isa
            write = Span("a", range(64), 0, len(tokens))
            work = Work("s", 0, tokens, 0, (), write, all_logits=True)
            logits = backend.execute(Batch([work])).results[0].logits
            found.append((logits, kv_rows(backend, 0, len(tokens)).tobytes()))
            backend.close()
        for logits, rows in found[1:]:
            assert np.array_equal(logits, found[0][0])
            assert rows == found[0][1]


def test_a_forked_process_has_threads_of_its_own(checkpoint: Checkpoints) -> None:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels="native", threads=3)
    work = Work("s", 0, list(range(200)), 0, (), None, all_logits=True)
    want = backend.execute(Batch([work])).results[0].logits
    child = os.fork()
    if child == 0:
        got = backend.execute(Batch([work])).results[0].logits
        os._exit(0 if np.array_equal(got, want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(backend.execute(Batch([work])).results[0].logits, want)
    backend.close()


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_forest() -> None:
    config = ForkServeConfig(capacity_pages=512)
    backend = LocalBackend(config, kernels="native", threads=2)
    forest = Forest(backend, seed=5, chunk=300)
    forest.root(530)
    for _ in range(12):
        forest.step()
    assert forest.check(backend) > 500
    backend.close()
