"""Planted faults: each patches one thing that must never be wrong.

`FAULTS` maps a name to a context manager; inside it the engine is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import forkserve.control.boarding as boarding_module
import forkserve.control.commit as commit_module
import forkserve.control.core as core_module
import forkserve.opening as opening_module
import forkserve.tree.eviction as eviction_module
import forkserve.tree.index as index_module
import forkserve.tree.rows as rows_module
import forkserve.tree.spine as spine_module
from forkserve.control.core import Core
from forkserve.control.scheduler import Scheduler
from forkserve.engine import MockBackend
from forkserve.tree.index import PrefixIndex
from forkserve.tree.node import Node
from forkserve.tree.pool import PagePool
from forkserve.tree.tree import ContextTree
from forkserve.types import Batch, BatchResult

from .strict import StrictMock

Fault = Callable[[], AbstractContextManager[Any]]


def _batches(change: Callable[[MockBackend, Batch], None], *, after: bool = False) -> Fault:
    """A fault of the pass itself: `change` meddles with a batch before or after it ran."""
    original = MockBackend.execute

    def execute(self: MockBackend, batch: Batch) -> BatchResult:
        if not after:
            change(self, batch)
        result = original(self, batch)
        if after:
            change(self, batch)
        return result

    @contextmanager
    def planted() -> Iterator[None]:
        # Beneath the strict mock's own checks, which would otherwise notice first.
        with (
            patch.object(StrictMock, "execute", execute),
            patch.object(MockBackend, "execute", execute),
        ):
            yield

    return planted


def _corrupt_a_row(mock: MockBackend, batch: Batch) -> None:
    for work in batch.works:
        if work.write is not None and work.start > 0:
            row = work.write.offset
            mock.corrupt(work.write.pages[row // mock.config.page_size], row % 4)


def _restart_positions(mock: MockBackend, batch: Batch) -> None:
    for work in batch.works:
        work.start = max(work.start - 1, 0)


def _write_to_a_sibling(mock: MockBackend, batch: Batch) -> None:
    writes = [w for w in batch.works if w.write is not None]
    for left, right in pairwise(writes):
        assert left.write is not None
        assert right.write is not None
        first, second = left.write, right.write
        if first.length == second.length and first.offset == second.offset:
            left.write = replace(first, pages=second.pages)


def _forget_a_row_of_packs(mock: MockBackend, batch: Batch) -> None:
    batch.copies[:] = [replace(c, rows=max(c.rows - 1, 0)) for c in batch.copies]


def _replay_another_token(mock: MockBackend, batch: Batch) -> None:
    for work in batch.works:
        if work.write is None:
            work.tokens = [token ^ 1 for token in work.tokens]


def _drop_a_span(mock: MockBackend, batch: Batch) -> None:
    for work in batch.works:
        if len(work.context) > 1:
            work.context = (work.context[1], *work.context[1:])


def _patched(target: Any, name: str, value: Any) -> Fault:
    return lambda: patch.object(target, name, value)


def _no_reference_on_hit() -> Fault:
    original = spine_module.take_prefix

    def take_prefix(tree: ContextTree, index: PrefixIndex) -> int:
        rows = original(tree, index)
        if rows:
            tree.pool.decref(tree.root.segments[0].pages)
        return rows

    return _patched(opening_module, "take_prefix", take_prefix)


def _alias_off_by_one() -> Fault:
    original = ContextTree.fork

    def fork(self: ContextTree, *args: Any, **options: Any) -> Node:
        node = original(self, *args, **options)
        node.alias_len -= 1
        return node

    return _patched(ContextTree, "fork", fork)


@contextmanager
def _stale_work_kept() -> Iterator[None]:
    with (
        patch.object(Scheduler, "invalidate", lambda *a: []),
        patch.object(Core, "forget", lambda *a: None),
    ):
        yield


def _generation_not_bumped() -> Fault:
    original = commit_module.apply_commit

    def apply_commit(tree: ContextTree, node: Node, *args: Any) -> Any:
        outcome = original(tree, node, *args)
        node.generation -= 1
        outcome.result = replace(outcome.result, generation=node.generation)
        return outcome

    return _patched(_merging(), "apply_commit", apply_commit)


def _merging() -> Any:
    import forkserve.control.merging as merging_module

    return merging_module


def _cut(by: int) -> Fault:
    original = rows_module.cut

    def cut(tree: ContextTree, node: Node, position: int) -> int:
        return original(tree, node, position + by)

    return _patched(commit_module, "cut", cut)


def _loser_kept() -> Fault:
    original = rows_module.release

    def release(tree: ContextTree, node: Node) -> int:
        if node.parent is None:
            return original(tree, node)
        node.segments = []
        return 0

    return _patched(core_module, "release", release)


class _Anything:
    """Equal to every token list: the comparison on a hit is gone."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def forged(parent: bytes, tokens: object) -> bytes:
    """A digest that only depends on the depth: every page of one depth collides."""
    return index_module.blake3(b"forged" + parent).digest()


@contextmanager
def forged_digests() -> Iterator[None]:
    """Not a fault by itself: token comparison has to cope with collisions."""
    with patch.object(index_module, "page_digest", forged):
        yield


@contextmanager
def _no_token_comparison() -> Iterator[None]:
    entry = index_module._Entry
    with (
        forged_digests(),
        patch.object(index_module, "_Entry", lambda page, raw: entry(page, _Anything())),  # type: ignore[arg-type]
    ):
        yield


def _not_read_only() -> Fault:
    original = PagePool.index

    def index(self: PagePool, page: int) -> None:
        original(self, page)
        self.read_only[page] = 0

    return _patched(PagePool, "index", index)


def _entry_outlives_page() -> Fault:
    def reclaim(self: PrefixIndex, wanted: int) -> int:
        freed = 0
        for entry in list(self._entries.values()):
            if freed < wanted and self._pool.refs[entry.page] == 1:
                freed += self._pool.unindex(entry.page)
        return freed

    return _patched(PrefixIndex, "reclaim", reclaim)


def _eviction_keeps_the_table() -> Fault:
    original = core_module.shed

    def shed(tree: ContextTree, node: Node, *args: Any) -> int:
        kept = [replace(segment) for segment in node.segments]
        rows = original(tree, node, *args)
        node.segments = kept
        return rows

    return _patched(core_module, "shed", shed)


def _too_much_goes() -> Fault:
    """A page more than may go: rows of a branch stand on it."""
    original = eviction_module._last

    def last(tree: ContextTree, node: Node, keep: int) -> Any:
        return original(tree, node, max(keep - tree.pool.page_size, 0))

    return _patched(eviction_module, "_last", last)


def _short_context() -> Fault:
    original = boarding_module.missing

    def missing(node: Node, upto: int) -> Any:
        parts = original(node, upto)
        return parts[1:] if len(parts) > 1 else parts

    return _patched(boarding_module, "missing", missing)


FAULTS: dict[str, Fault] = {
    "a KV row is corrupted": _batches(_corrupt_a_row, after=True),
    "a reference is not taken on a prefix hit": _no_reference_on_hit(),
    "alias_len is off by one": _alias_off_by_one(),
    "a position is repeated": _batches(_restart_positions),
    "stale speculation is kept": _stale_work_kept,
    "a commit does not bump the generation": _generation_not_bumped(),
    "a sibling's page is written": _batches(_write_to_a_sibling),
    "pack copies one row too few": _batches(_forget_a_row_of_packs),
    "commit cuts one row too many": _cut(-1),
    "commit cuts one row too few": _cut(+1),
    "a loser is not released": _loser_kept(),
    "an index hit is not compared": _no_token_comparison,
    "a published page stays writable": _not_read_only(),
    "a span is read in place of another": _batches(_drop_a_span),
    "the sealed flag is ignored": _patched(rows_module, "_watched", lambda node, segment: False),
    "the last token is not replayed": _batches(_replay_another_token),
    "an index entry outlives its page": _entry_outlives_page(),
    "the salt is ignored": _patched(index_module, "root_digest", lambda salt: b"root"),
    "a pinned page is written": _patched(PagePool, "writable", lambda self, page: True),
    "duplicates are not folded": _patched(spine_module, "_replace", lambda *a: None),
    "an evicted table is still read": _eviction_keeps_the_table(),
    "a page that a branch stands on goes": _too_much_goes(),
    "a hole in the path is skipped": _short_context(),
    "copies are not made": _batches(lambda mock, batch: batch.copies.clear()),
}
