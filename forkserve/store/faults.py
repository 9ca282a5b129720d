"""Named steps of everything that must survive a crash.

A test sets `hook` and is called at each step; it may raise, sleep, or kill its own process.  In use
`hook` is None and a step costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["POINTS", "reach"]

POINTS = (
    "chunk.begin",
    "chunk.written",
    "chunk.synced",
    "chunk.renamed",
    "chunk.durable",
    "publish.captured",
    "publish.stored",
    "publish.catalogued",
    "name.written",
    "journal.begin",
    "journal.written",
    "journal.committed",
    "migrate.begin",
    "migrate.step",
    "migrate.done",
    "gc.marked",
    "gc.unlisted",
    "gc.deleted",
    "far.doomed",
    "evict.copied",
    "evict.unlisted",
    "evict.deleted",
    "behind.taken",
    "copy.stored",
    "copy.noted",
    "scrub.hashed",
    "scrub.noted",
    "import.checked",
    "import.stored",
    "import.entered",
    "import.catalogued",
)

hook: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that a step was reached."""
    if hook is not None:
        hook(point)
