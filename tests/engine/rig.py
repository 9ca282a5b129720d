"""A minimal tree over a backend's pages, for tests: shuffled pages, NaN in every unused slot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forkserve.engine.local import LocalBackend
from forkserve.types import Batch, SampleSpec, SamplingParams, Span, Work

_keys = itertools.count()


@dataclass
class Node:
    """A path: spans inherited from ancestors, then the node's own growing segment."""

    inherited: tuple[Span, ...]
    start: int
    offset: int  # slots left empty at the start of the first page
    key: int = field(default_factory=lambda: next(_keys))
    pages: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    def own(self) -> Span:
        return Span(self.key, tuple(self.pages), self.start, self.length, self.offset)

    def spans(self) -> tuple[Span, ...]:
        return (*self.inherited, self.own()) if self.length else self.inherited


class Rig:
    """Hands out pages in shuffled order and turns tokens into works."""

    def __init__(self, backend: LocalBackend, seed: int = 0) -> None:
        self.backend = backend
        self.page = backend.config.page_size
        self.free = list(range(backend.config.capacity_pages))
        self.random = random.Random(seed)
        self.random.shuffle(self.free)
        rows = backend._kv.rows
        (rows if rows.is_floating_point() else backend._kv.scales).fill_(float("nan"))

    def root(self) -> Node:
        return Node((), 0, self.random.randrange(self.page))

    def fork(self, node: Node, at: int | None = None) -> Node:
        """A child that sees the node's first `at` positions (default all)."""
        at = node.end if at is None else at
        spans = []
        for span in node.spans():
            keep = min(span.length, at - span.start)
            if keep > 0:
                spans.append(Span(span.key, span.pages, span.start, keep, span.offset))
        return Node(tuple(spans), at, self.random.randrange(self.page))

    def work(self, node: Node, tokens: Sequence[int], **wanted: Any) -> Work:
        """A work that appends `tokens` to the node.  The node is grown at once."""
        context, start = node.spans(), node.end
        offset = node.offset + node.length
        while len(node.pages) * self.page < offset + len(tokens):
            node.pages.append(self.free.pop())
        write = Span(
            node.key,
            tuple(node.pages[offset // self.page :]),
            start,
            len(tokens),
            offset % self.page,
        )
        node.length += len(tokens)
        return Work("s", node.key, list(tokens), start, context, write, **wanted)

    def replay(self, node: Node, token: int, **wanted: Any) -> Work:
        """The node's last token again, without writing."""
        context = self.fork(node, node.end - 1).inherited
        return Work("s", node.key, [token], node.end - 1, context, None, **wanted)

    def run(self, *works: Work) -> list[Any]:
        return self.backend.execute(Batch(list(works))).results

    def logits(self, *works: Work) -> list[np.ndarray]:
        """Run the works and give each one's rows for all its tokens."""
        for work in works:
            work.all_logits = True
        return [result.logits for result in self.run(*works)]


def greedy(position: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), 0, position, 0, 0)


def kv_rows(backend: LocalBackend, first: int = 0, count: int | None = None) -> np.ndarray:
    """KV rows [layers, 2*Hk, count, D] from slot `first` of the pool on, in whatever layout."""
    page, info = backend.config.page_size, backend.info
    capacity = backend.config.capacity_pages * page
    count = capacity - first if count is None else count
    span = Span("", range(first // page, backend.config.capacity_pages), 0, count, first % page)
    shape = (info.extra["layers"], 2 * info.extra["kv_heads"], count, info.extra["head_dim"])
    word = np.dtype(f"u{backend._kv.dtype.itemsize}")
    rows = np.frombuffer(backend.read_rows([span]), word).reshape(shape)
    return rows.view(np.float32) if word.itemsize == 4 else rows


def kv_bytes(backend: LocalBackend) -> bytes:
    """The pool's content, scratch rows apart."""
    return kv_rows(backend).tobytes()
