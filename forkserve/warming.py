"""Rows between the page pool and a store: captured without delay, restored slice by slice.

The engine's lock is held for one slice of rows at a time, so that a decode step beside a restore
waits for a copy of at most `_SLICE` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from forkserve.control.core import Core
from forkserve.control.loop import Loop
from forkserve.engine.protocol import Refilling
from forkserve.errors import OutOfPages, SessionError
from forkserve.tree.eviction import path_rows
from forkserve.tree.node import Node
from forkserve.tree.rows import fence, missing, reserve, rollback, settle, spans
from forkserve.tree.tree import ContextTree
from forkserve.types import RowCopy, Span

if TYPE_CHECKING:
    from forkserve.engine.protocol import Portable
    from forkserve.store.chunks import Buffer
    from forkserve.store.identity import Link

__all__ = ["Warmed", "hold", "put_rows", "read_link", "read_range", "ready"]

_SLICE = 4 << 20  # bytes written under one hold of the lock
_SMALL = 256 << 10  # the same by a thread of the background


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was done about missing rows.

    tokens: rows brought back.  verdict: resident (nothing was missing), restored, or computed
    (they come by prefill when they are needed), with the `reason`.  Times in ms; predicted ones
    are None when there was nothing to choose.
    """

    tokens: int
    verdict: Literal["resident", "restored", "computed"]
    reason: str
    restore_ms: float | None = None
    prefill_ms: float | None = None
    actual_ms: float | None = None


def ready(node: Node) -> int:
    """Rows of the path that exist without a hole from position 0."""
    parts = missing(node, node.length)
    return parts[0][1] if parts else node.length


def hold(
    core: Core, tree: ContextTree, node: Node, upto: int, begin: int = 0
) -> tuple[tuple[Span, ...], list[int]]:
    """Pin the pages of positions [begin, upto) of a path; returns spans and the pages to unpin.

    No copy may be pending: its target would be read before it is written.
    """
    assert not core.pending, "a row copy is still to run"
    parts = tuple(s for s in spans(tree, node, upto) if s.start + s.length > begin)
    pages: dict[int, None] = {}
    for span in parts:
        first = span.offset // core.pool.page_size
        last = -(-(span.offset + span.length) // core.pool.page_size)
        pages.update(dict.fromkeys(span.pages[first:last]))
    held = list(pages)
    core.pool.pin(held)
    return parts, held


def read_link(
    backend: Portable, parts: Sequence[Span], row_bytes: int, link: Link, spare: list[memoryview]
) -> Buffer:
    """The rows of one chunk out of held spans.  spare: buffers that may be filled again."""
    from forkserve.store.pace import breathe

    low, high = link.start, link.start + link.count
    return read_range(backend, parts, low, high, row_bytes, spare, breathe)


def read_range(
    backend: Portable,
    parts: Sequence[Span],
    low: int,
    high: int,
    row_bytes: int,
    spare: list[memoryview] | None = None,
    rest: Callable[[], None] | None = None,
) -> Buffer:
    """The rows of positions [low, high) out of held spans, in a spare buffer if one fits.

    rest: see `Refilling.read_rows_into`.
    """
    cut = []
    for span in parts:
        begin, end = max(low, span.start), min(high, span.start + span.length)
        if begin < end:
            offset = span.offset + begin - span.start
            cut.append(Span(span.key, span.pages, begin, end - begin, offset))
    if not isinstance(backend, Refilling):
        return backend.read_rows(cut)
    size = row_bytes * (high - low)
    fitting = (n for n, buffer in enumerate(spare or ()) if len(buffer) == size)
    number = next(fitting, None)
    if spare is None or number is None:
        out = np.empty(size, np.uint8).data  # filling it with zeros first would take as long
    else:
        out = spare.pop(number)
    backend.read_rows_into(cut, out, rest)
    return out


def put_rows(
    core: Core,
    loop: Loop,
    tree: ContextTree,
    node: Node,
    rows: Buffer,
    begin: int,
    end: int,
    *,
    press: bool = False,
) -> bool:
    """Write rows [begin, end) of the path of a node where they are missing.

    press: make room as committed work does, where free and cached pages do not suffice.  False when
    no more fit, or when what is missing begins before them.  Raises SessionError when the session
    is closed meanwhile.
    """
    from forkserve.store.pace import breathe, paced

    most = _SMALL if paced() else _SLICE
    size = core.config.page_size
    step = max(most // max(len(rows) // (end - begin), 1) // size * size, size)
    while True:
        breathe()
        with core.lock:
            loop.quiesce(tree.session)
            if core.trees.get(tree.session) is not tree or not node.live:
                raise SessionError(f"session '{tree.session}' was closed meanwhile")
            if core.pending and not press:
                return False  # nobody waits: the loop is not to be driven from here
            if core.pending:
                idle = False
            else:
                idle = True
                parts = missing(node, min(end, node.length))
                if not parts:
                    return True
                owner, first, last = parts[0]
                if first < begin:
                    return False
                count = min(step - first % size, last - first)  # up to the edge of a page
                stop = fence(owner, first)
                if stop is not None:
                    count = min(count, stop - first)
                if not _write(core, tree, owner, first, count, rows, first - begin, press):
                    free = core.pool.free_pages
                    if core.lent():
                        core.changed.wait(0.005)  # a publish is about to give pages back
                    elif core.pool.free_pages == free:
                        return False  # else captures that only waited have just given theirs
        if not idle:
            loop.run_until(lambda: not core.pending)


def _write(
    core: Core,
    tree: ContextTree,
    owner: Node,
    first: int,
    count: int,
    rows: Buffer,
    at: int,
    press: bool,
) -> bool:
    """Reserve, write and settle one slice; False when there is no room for it."""
    backend: Portable = core.backend  # type: ignore[assignment]  # checked when it was attached
    try:
        held = reserve(tree, owner, first, count)
    except OutOfPages as shortage:
        core.index.reclaim(shortage.needed - core.pool.free_pages)
        if core.pool.free_pages < shortage.needed and not (
            press and core.make_room(shortage.needed, keep=path_rows(owner))
        ):
            return False
        held = reserve(tree, owner, first, count)
    try:
        for copy in held.copies:
            _copy(backend, copy)
        backend.write_rows(held.write, rows, at)
    except BaseException:
        rollback(tree, held)  # their rows were never valid, and are never read
        raise
    settle(tree, held)
    owner.used_ms = core.clock.now_ms()
    core.publish(tree, owner)
    return True


def _copy(backend: Portable, copy: RowCopy) -> None:
    """A row copy of now; those of a batch are the loop's."""
    run = backend.read_rows([Span("copy", [copy.src_page], 0, copy.rows, copy.src_row)])
    backend.write_rows(Span("copy", [copy.dst_page], 0, copy.rows, copy.dst_row), run, 0)
