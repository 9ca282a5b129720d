"""Equal prompts that are asked for at the same time are computed once.

Before a tick every root takes what the prefix index has by now; what it would compute next is named
by the chain hash of that page, and of the jobs with one name only one runs [`Job.page`].  Nobody
owns a prefix: when the one that computes it fails, is cancelled or pre-empted, another goes on in
the next tick, from the last page that was finished.
"""

from __future__ import annotations

from forkserve.control.core import Core
from forkserve.control.task import Task
from forkserve.tree.index import page_digest, root_digest
from forkserve.tree.spine import take_prefix
from forkserve.types import JobClass

__all__ = ["share_prompts"]


def share_prompts(core: Core) -> None:
    """Let roots take published pages, and name the page that each task would compute next."""
    if not core.config.prefix_index:
        return
    size = core.config.page_size
    for task in list(core.tasks.values()):
        task.page = None
        if task.kind is JobClass.DECODE:
            continue  # one row is missing at most
        root = task.tree.root
        if task.held or root.floor or (root.length - 1) // size <= root.kv_end // size:
            continue  # not a whole page is left that could be shared
        _take(core, task)
        left = (root.length - 1) // size - root.kv_end // size
        begin = root.kv_end // size * size
        if not left or task.kind is JobClass.SPEC or root.published * size != begin:
            continue
        above = root.digest if root.published else root_digest(task.tree.salt)
        task.page = page_digest(above, root.tokens[begin : begin + size])


def _take(core: Core, task: Task) -> None:
    """Published pages for the task's root."""
    tree, size = task.tree, core.config.page_size
    before = tree.root.published * size
    if not take_prefix(tree, core.index):
        return
    had = max(before, -(-tree.reached // size) * size)
    fresh = max(tree.root.kv_end - had, 0)
    tree.cached += fresh
    core.count.cached_tokens += fresh  # what comes back after an eviction is no hit
    task.refresh()
    if not task.remaining:
        core.finish(task)
