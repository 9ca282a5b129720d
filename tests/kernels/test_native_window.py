"""A decoder whose layers alternate between a sliding window and all positions, on pages."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from forkserve.kernels.native.attention import AttentionPlan, Pool, gather
from forkserve.kernels.native.forward import PHASES, Forward, LayerWeights, Shape
from forkserve.kernels.native.library import available, load
from forkserve.kernels.native.linear import PackedLinear, pack
from forkserve.types import Span, Work

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

PAGE, PAGES, SCRATCH = 16, 200, 4
WINDOWS = (20, 0, 20)  # of each layer; 0: all positions
SHAPE = Shape(
    hidden=48,
    ffn=80,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=60,
    eps=1e-5,
    attn_scale=32**-0.5,
    act="gelu_tanh",
    embed_scale=48**0.5,
    attn_softcap=5.0,
    final_softcap=9.0,
)
LENGTH = 90
TOKENS = random.Random(0).choices(range(SHAPE.vocab), k=LENGTH)


@dataclass
class Line:
    """A path of tokens that is run in chunks, in spans of its own or grown."""

    tokens: list[int]
    spans: list[Span] = field(default_factory=list)

    @property
    def done(self) -> int:
        return sum(span.length for span in self.spans)

    def fork(self, at: int) -> Line:
        """Another line that reads the first `at` rows of this one."""
        child = Line(self.tokens)
        for span in self.spans:
            if (keep := min(span.length, at - span.start)) > 0:
                child.spans.append(Span(span.key, span.pages, span.start, keep, span.offset))
        return child


class Model:
    """Random weights, and NaN in every KV row that was not written."""

    def __init__(
        self, windows: tuple[int, ...] = WINDOWS, *, threads: int = 2, bf16: bool = False
    ) -> None:
        self.windows = windows
        self.rng = np.random.default_rng(0)
        self.draw = random.Random(1)
        self.library = load()
        self.weights: list[dict[str, Floats]] = []
        s = SHAPE
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        angle = np.outer(np.arange(LENGTH), 10000.0 ** -(np.arange(16) / 16))
        self.cos, self.sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
        layers = []
        for _ in windows:
            w = {
                "qkv": self.normal(q + 2 * kv, s.hidden),
                "out": self.normal(s.hidden, q),
                "gate": self.normal(s.ffn, s.hidden),
                "up": self.normal(s.ffn, s.hidden),
                "down": self.normal(s.hidden, s.ffn),
            }
            for name in ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm"):
                w[name] = self.rng.uniform(0.5, 1.5, s.hidden).astype(np.float32)
            self.weights.append(w)
            packed = {name: self.pack(x) if x.ndim > 1 else x for name, x in w.items()}
            layers.append(LayerWeights(**packed, cos=self.cos, sin=self.sin))  # type: ignore[arg-type]
        self.embed = self.normal(s.vocab, s.hidden)
        self.norm = np.ones(s.hidden, np.float32)
        self.forward = Forward(
            self.library,
            s,
            layers,
            final_norm=self.norm,
            head=self.pack(self.embed),
            embed=None,
            threads=threads,
        )
        rows = (PAGES + SCRATCH) * PAGE
        shape = (len(windows), 2 * s.kv_heads, rows * s.head_dim)
        self.memory = np.full(shape, 0x7FC0, np.uint16) if bf16 else np.full(shape, np.nan, "f")
        at = self.memory.ctypes.data
        self.pool = Pool(at, len(windows), s.kv_heads, s.head_dim, PAGE, rows, int(bf16))
        self.plans = {
            window: AttentionPlan(
                self.library,
                kv_heads=s.kv_heads,
                group=s.heads // s.kv_heads,
                head_dim=s.head_dim,
                page_size=PAGE,
                pages=PAGES + SCRATCH,
                scratch_page=PAGES,
                threads=threads,
                window=window,
            )
            for window in set(windows)
        }
        self.free = self.draw.sample(range(PAGES), PAGES)

    def normal(self, n: int, k: int) -> Floats:
        return self.rng.normal(0, 2 * k**-0.5, (n, k)).astype(np.float32)

    def pack(self, weight: Floats) -> PackedLinear:
        return pack(self.library, weight, None, "float32", 1)

    def work(self, line: Line, count: int, *, write: bool = True) -> Work:
        """The next `count` tokens of a line.  Its span is grown, or a new one begins."""
        start = line.done
        tokens, context = line.tokens[start : start + count], tuple(line.spans)
        if not write:
            return Work("s", 0, tokens, start, context, None)
        if not line.spans or self.draw.random() < 0.3:
            line.spans.append(Span(object(), [], start, 0, self.draw.randrange(PAGE)))
        last = line.spans[-1]
        at, pages = (
            last.offset + last.length,
            list(last.pages[: -(-(last.offset + last.length) // PAGE)]),
        )
        while len(pages) * PAGE < at + count:
            pages.append(self.free.pop())
        line.spans[-1] = Span(last.key, pages, last.start, last.length + count, last.offset)
        target = Span(object(), pages[at // PAGE :], start, count, at % PAGE)
        return Work("s", 0, tokens, start, context, target)

    def run(self, works: list[Work]) -> list[Floats]:
        """Logits of all rows, for each work."""
        tables = gather(works, PAGE)
        for plan in self.plans.values():
            plan.build(tables)
        ids = np.array([t for work in works for t in work.tokens], np.int32)
        logits = np.empty((len(ids), SHAPE.vocab), np.float32)
        plans = [self.plans[window] for window in self.windows]
        self.forward.run(ids, plans, self.pool, np.arange(len(ids), dtype=np.int32), logits)
        return np.split(logits, np.cumsum([len(work.tokens) for work in works])[:-1])

    def line(self, *chunks: int, tokens: list[int] = TOKENS) -> tuple[Line, Floats]:
        """A line run in chunks, and its logits."""
        line = Line(tokens)
        rows = [self.run([self.work(line, count)])[0] for count in chunks]
        return line, np.concatenate(rows)

    def expected(self) -> Wide:
        """The logits in float64."""
        s, n = SHAPE, LENGTH

        def norm(x: Wide, weight: Floats) -> Wide:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + s.eps) * weight

        def rotated(x: Wide) -> Wide:
            a, b = x[..., :16], x[..., 16:]
            cos, sin = self.cos[:, None].astype(float), self.sin[:, None].astype(float)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        def gelu(x: Wide) -> Wide:
            return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

        x = self.embed[TOKENS].astype(float) * s.embed_scale
        behind = np.arange(n)[:, None] - np.arange(n)
        for window, w in zip(self.windows, self.weights, strict=True):
            y = (norm(x, w["attn_norm"]) @ w["qkv"].T).reshape(n, -1, s.head_dim)
            q, k, v = rotated(y[:, :4]), rotated(y[:, 4:6]), y[:, 6:]
            k, v = k.repeat(2, 1), v.repeat(2, 1)
            scores = np.einsum("ihd,jhd->hij", q, k) * s.attn_scale
            scores = s.attn_softcap * np.tanh(scores / s.attn_softcap)
            scores[:, (behind < 0) | (behind >= (window or n))] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            o = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
            x = x + norm(o @ w["out"].T, w["post_attn_norm"])
            h = norm(x, w["ffn_norm"])
            h = gelu(h @ w["gate"].T) * (h @ w["up"].T)
            x = x + norm(h @ w["down"].T, w["post_ffn_norm"])
        logits = norm(x, self.norm) @ self.embed.T
        return s.final_softcap * np.tanh(logits / s.final_softcap)


@pytest.fixture(scope="module")
def whole() -> Floats:
    """Logits of the line in one pass."""
    return Model().line(LENGTH)[1]


def test_against_float64(whole: Floats) -> None:
    want = Model().expected()
    assert np.linalg.norm(whole - want) / np.linalg.norm(want) < 1e-5


def test_rows_reach_as_far_as_the_windows(whole: Floats) -> None:
    """Through three windows of 20 a row reaches back 57 positions; through a full layer all."""
    other = [(TOKENS[0] + 1) % SHAPE.vocab, *TOKENS[1:]]
    changed = Model().line(LENGTH, tokens=other)[1]
    assert (changed[-1] != whole[-1]).any()
    narrow = (20, 20, 20)
    rows = [Model(narrow).line(LENGTH, tokens=tokens)[1] for tokens in (TOKENS, other)]
    assert (rows[0][57] != rows[1][57]).any()
    assert rows[0][58:].tobytes() == rows[1][58:].tobytes()


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (40, 1, 1, 1, 30, 17), (19, 20, 21, 30)])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_chunks(whole: Floats, chunks: tuple[int, ...], threads: int) -> None:
    assert Model(threads=threads).line(*chunks)[1].tobytes() == whole.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pass_says_what_its_threads_spent_their_time_on(whole: Floats, threads: int) -> None:
    model = Model(threads=threads)
    spent = model.forward.seconds = np.zeros((threads, len(PHASES)))
    begin = time.perf_counter()
    _, logits = model.line(29, LENGTH - 29)
    wall = time.perf_counter() - begin
    assert (logits == whole).all()
    assert (spent >= 0).all()
    assert (spent.sum(1) <= wall).all(), "counted twice"
    work = spent.sum(0)[: PHASES.index("wait")]
    assert (work > 0).all(), dict(zip(PHASES, work, strict=False))
    before = spent.copy()
    model.forward.seconds = None
    model.line(3)
    assert (spent == before).all(), "nobody asked any more"


def test_beside_mates_after_forks_and_replayed(whole: Floats) -> None:
    """Lines that fork inside, at and behind the window of their next rows, in one batch."""
    model = Model()
    trunk, _ = model.line(50, 10)
    lines = [trunk.fork(at) for at in (1, 15, 33, 47, 60)]
    for counts in ((1, 5, 1, 12, 1), (20, 1, 3, 1, 1), (2, 2, 2, 2, 2)):
        starts = [line.done for line in lines]
        works = [model.work(line, n) for line, n in zip(lines, counts, strict=True)]
        replay = trunk.fork(59)
        works.append(model.work(replay, 1, write=False))
        for start, rows in zip([*starts, 59], model.run(works), strict=True):
            assert rows.tobytes() == whole[start : start + len(rows)].tobytes()


def test_bfloat16_rows_in_any_chunks() -> None:
    want = Model(bf16=True).line(LENGTH)[1]
    assert Model(bf16=True, threads=1).line(1, 2, 30, 1, 56)[1].tobytes() == want.tobytes()
