"""torch in the child of a fork.

The threads of OpenMP stay behind in the parent, and libgomp's next parallel region in the child
waits for them for ever.  With one thread there is no such region.  (The native kernels start
threads of their own in every process.)
"""

from __future__ import annotations

import logging
import os

import torch

__all__ = ["torch_threads"]

_log = logging.getLogger(__name__)


class _Torch:
    """Whose torch this is.  home: the process in which it may have started threads."""

    home: int | None = None
    wanted = 1  # threads that it had there


def torch_threads(wanted: int | None = None) -> int:
    """Give torch `wanted` threads (None: leave it), or one in the child of a fork.

    To be called before torch computes anything.  Returns the number without regard to a fork, which
    is what the native kernels may have.
    """
    pid = os.getpid()
    if _Torch.home is None:
        _Torch.home = pid
    if _Torch.home == pid:
        if wanted is not None:
            torch.set_num_threads(wanted)
        _Torch.wanted = torch.get_num_threads()
        return _Torch.wanted
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
        _log.warning(
            "process %d was forked after torch had been used in %d: torch has one thread here; "
            "start processes with 'spawn' to let it have more",
            *(pid, _Torch.home),
        )
    return wanted or _Torch.wanted
