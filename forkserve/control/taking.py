"""A token joins its path: sampled ones after a pass, forced ones without a pass of their own.

Where a constraint leaves one id, every draw gives that id; so it is appended at once, and the next
pass computes the rows of all of them together [jump-forward].  What comes out is what one pass a
token would give: the random number of a draw depends on its position, not on how many were drawn.
"""

from __future__ import annotations

from forkserve.control.core import Core
from forkserve.control.task import Task
from forkserve.types import WorkResult

__all__ = ["jump", "take"]

_JUMP = 256  # tokens appended at one stretch, at most: the lock is held


def take(core: Core, task: Task, out: WorkResult, now_ms: float) -> None:
    """Append what a pass sampled, and what it leaves no choice about; maybe the generation ends."""
    handle = task.generation_handle
    if out.token is None or handle is None or handle.done or not task.target.live:
        return  # nothing was asked, or cancelled while it ran: the cancel wins
    core.count.decode_steps += 1
    _append(core, task, out, now_ms)
    jump(core, task, now_ms)


def jump(core: Core, task: Task, now_ms: float) -> None:
    """Append tokens while the constraint leaves one id; finish the task if that ends it.

    With logprobs there is no jump: they need the logits of every position.
    """
    handle, forced = task.generation_handle, 0
    assert handle is not None
    while not handle.done and handle.forced is not None and forced < _JUMP:
        _append(core, task, WorkResult(handle.forced), now_ms)
        forced += 1
    core.count.forced_tokens += forced
    if handle.done:
        core.release(task)
        core.journal.changed(task.session)
    elif forced:
        core.requeue(task)  # several rows to complete now, not one


def _append(core: Core, task: Task, out: WorkResult, now_ms: float) -> None:
    handle, token, info = task.generation_handle, out.token, core.backend.info
    assert handle is not None
    assert token is not None
    task.tree.extend(task.target, (token,))
    length = task.target.known = task.target.length
    if handle.first_token_ms is None:
        handle.first_token_ms = now_ms
    try:
        handle.push(token, out.logprob if handle.params.logprobs else None, info.eos_ids, out.top)
    except BaseException as error:  # of the user's constraint or the tokenizer: theirs alone
        handle.end("error", error)
    if not handle.done and length >= info.max_context:
        handle.end("context")
