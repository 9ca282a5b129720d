"""Which tokens stand on a path, and how often each was output: what penalties read.

Built once when a generation begins, then one step a token; the arrays depend on the tokens of the
path and on where its output begins, and on nothing else.
"""

from __future__ import annotations

import numpy as np

from forkserve.types import IntArray, Tokens

__all__ = ["PathCounts"]


class PathCounts:
    """Counts over the tokens of one path.

    output_start: position of the first token that counts as output; those before it, the prompt,
    are only seen.
    """

    def __init__(self, path: Tokens, output_start: int) -> None:
        tokens = np.asarray(path, dtype=np.int64)
        ids = np.unique(tokens)
        self._size = ids.size
        self._ids: IntArray = ids
        self._counts: IntArray = np.zeros(ids.size, np.int64)
        output, times = np.unique(tokens[output_start:], return_counts=True)
        self._counts[np.searchsorted(ids, output)] = times
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def push(self, token: int) -> None:
        """One more token of output."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == self._ids.size:
                room = np.zeros(self._size + 64, np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    def arrays(self) -> tuple[IntArray, IntArray]:
        """(ids, times output) of every token that was seen; views, good until the next `push`."""
        return self._ids[: self._size], self._counts[: self._size]
