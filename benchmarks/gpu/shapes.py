"""Trees for attention benchmarks: nodes per level / rows per node at each level.

FASTTREE: from the public benchmark of FastTree (MLSys 2025).  AGENTS: ours, agent-like.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from forkserve.types import Span, Work

__all__ = ["AGENTS", "FASTTREE", "HEADS", "Tree", "batch", "flat", "works_of"]

HEADS = ((16, 1), (32, 8), (32, 32))  # query heads, KV heads


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree, or several in a batch.  Nodes of a level are spread evenly over the one above."""

    levels: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def name(self) -> str:
        """Nodes per level / rows per node."""
        parts = []
        for nodes, rows in self.levels:
            shown = ",".join(map(str, rows))
            if len(rows) > 1 and len(set(rows)) == 1:
                shown = f"{rows[0]} each"
            parts.append(f"{','.join(map(str, nodes))}/{shown}")
        return " + ".join(parts)


def _tree(nodes: str, rows: str) -> Tree:
    counts, lengths = (tuple(map(int, text.split(","))) for text in (nodes, rows))
    if len(lengths) == 1:
        lengths *= len(counts)
    return Tree(((counts, lengths),))


FASTTREE = (
    _tree("1,2,64", "8,256,32"),
    _tree("1,4,256", "8,256,32"),
    _tree("1,4,8,256", "8,256,256,32"),
    _tree("1,256", "256,32"),
    _tree("1,1024", "2048,32"),
    _tree("1,16,64", "1024,256,32"),
    _tree("1,4,16,512", "1024,256,128,32"),
    _tree("1,4,16,64,256,1024", "256,8,256,64,32,256"),
    _tree("1,10", "4000,400"),
    _tree("1,2,4,8,16,32,64,128,1024", "16"),
    _tree("1,2,4,8,16,32,64,128,1024", "256,128,64,16,16,16,16,16,16"),
    _tree("1,8,16,32,64,128,1024", "256,128,64,16,16,16,16"),
    _tree("1,8,16,32,64,256,1024", "256,128,64,16,16,16,16"),
    _tree("1,16,32,64,128,1024", "256,128,64,16,16,16"),
    _tree("1,16,32,64,256,1024", "256,128,64,16,16,16"),
)
AGENTS = (
    _tree("1,5", "20000,200"),
    _tree("1,4", "16384,256"),
    _tree("1,8", "4099,256"),  # a trunk that ends inside a page
    Tree((((1, 8), (8192, 256)), ((1, 4), (4096, 128)))),  # two trees in one batch
    Tree((((1, 32), (2048, 64)), ((1,), (32768,)))),  # a long sequence beside a wide tree
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Works that decode one row each, the pages they use, and rows counted in two ways.

    shared: KV rows if every node is read once; copied: if every work reads all of its path.
    """

    works: list[Work]
    pages: int
    shared: int
    copied: int


def works_of(tree: Tree, page: int, seed: int = 0) -> Batch:
    """A decode at every leaf of `tree`, over shuffled pages."""
    draw = random.Random(seed)
    keys = itertools.count()
    spans: list[tuple[int, int, int, int]] = []  # parent's place, key, start, rows
    leaves: list[int] = []
    for nodes, lengths in tree.levels:
        above: list[int] = []
        for count, rows in zip(nodes, lengths, strict=True):
            level = []
            for i in range(count):
                parent = above[i * len(above) // count] if above else -1
                start = spans[parent][2] + spans[parent][3] if parent >= 0 else 0
                level.append(len(spans))
                spans.append((parent, next(keys), start, rows))
            above = level
        leaves += above
    total = sum(-(-rows // page) for _, _, _, rows in spans) + len(leaves)
    free = list(range(total))
    draw.shuffle(free)
    made = [
        Span(key, [free.pop() for _ in range(-(-rows // page))], start, rows)
        for _, key, start, rows in spans
    ]
    works, copied = [], 0
    for leaf in leaves:
        path, at = [], leaf
        while at >= 0:
            path.append(made[at])
            at = spans[at][0]
        end = path[0].start + path[0].length
        write = Span(("fresh", leaf), [free.pop()], end, 1)
        works.append(Work("bench", leaf, [0], end, tuple(path[::-1]), write))
        copied += end + 1
    shared = sum(rows for _, _, _, rows in spans) + len(leaves)
    return Batch(works, total, shared, copied)


def flat(batch: Batch) -> list[Work]:
    """The same works as a paged kernel without sharing sees them: every path a key of its own."""
    return [
        Work(
            work.session,
            work.node,
            work.tokens,
            work.start,
            tuple(replace(span, key=(work.node, span.key)) for span in work.context),
            work.write,
        )
        for work in batch.works
    ]


def batch(sequences: int, context: int, page: int) -> Batch:
    """Sequences that share nothing."""
    return works_of(Tree((((1,), (context,)),) * sequences), page)
