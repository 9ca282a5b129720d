"""Tokens to text while they arrive: whole characters only, stop strings never shown."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["TextStream"]


class TextStream:
    """Incremental decoder of one generation.

    The pieces returned by `push` and `finish` concatenate to the decoded text up to the first stop
    string.  A piece never ends inside a character, and only a suffix that may still become a stop
    string is held back.
    """

    def __init__(
        self, decode_bytes: Callable[[Sequence[int]], bytes], stop: Sequence[str] = ()
    ) -> None:
        self._decode_bytes = decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens; '' after a stop string was seen."""
        if self.stopped is not None:
            return ""
        return self._emit(self._decoder.decode(self._decode_bytes(tokens)), final=False)

    def finish(self) -> str:
        """What was held back; call once at the end."""
        if self.stopped is not None:
            return ""
        return self._emit(self._decoder.decode(b"", final=True), final=True)

    def _emit(self, fresh: str, *, final: bool) -> str:
        pending = self._held + fresh
        hits = [(at + len(s), at, s) for s in self._stop if (at := pending.find(s)) >= 0]
        if hits:  # the one that is complete first, so that the pieces make no difference
            _, at, self.stopped = min(hits)
            piece, self._held = pending[:at], ""
        else:
            keep = 0 if final else self._may_stop(pending)
            piece, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += piece
        return piece

    def _may_stop(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0
