"""Tokens to text while they arrive: whole characters only, stop strings never shown."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["TextStream"]


class TextStream:
    """Incremental decoder of one generation.

    The pieces returned by `push` and `finish` concatenate to the decoded text up to the first stop
    string.  A piece never ends inside a character, and only a suffix that may still become a stop
    string is held back until the end.

    However it ends, a character whose bytes have not all come is no part of this text: it belongs
    to the text that goes on from here.  before: bytes that come just before; a character that
    begins in them is part of this text.  So text before and text from here on make the text of
    all, wherever a path was cut or forked.  (vLLM leaves such an end out too. The streamers of
    Hugging Face show U+FFFD there, which what goes on could not take back.)
    """

    def __init__(
        self,
        decode_bytes: Callable[[Sequence[int]], bytes],
        stop: Sequence[str] = (),
        before: bytes = b"",
    ) -> None:
        self._decode_bytes = decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(before)  # keeps the beginning of a character, nothing else
        self._stop = tuple(stop)
        self._longest = max((len(s) - 1 for s in self._stop), default=0)
        self._held = ""
        self._parts: list[str] = []
        self._joined = 0, ""  # how many parts were put together, and the text that they make
        self.length = 0  # characters of `text`
        self.stopped: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All pieces so far.  May be asked in any thread, while another one pushes."""
        count, text = self._joined
        more = self._parts[count:]  # parts are only ever added
        if more:
            text += "".join(more)
            self._joined = count + len(more), text
        return text

    def push(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens; '' after a stop string was seen."""
        if self.stopped is not None:
            return ""
        return self._emit(self._decoder.decode(self._decode_bytes(tokens)), final=False)

    def finish(self) -> str:
        """What might have become a stop string; call once at the end."""
        if self.stopped is not None:
            return ""
        return self._emit("", final=True)

    def _emit(self, fresh: str, *, final: bool) -> str:
        piece = self._certain(fresh, final) if self._stop else fresh
        if piece:
            self._parts.append(piece)
            self.length += len(piece)
        return piece

    def _certain(self, fresh: str, final: bool) -> str:
        """What of the held and the fresh text cannot be part of a stop string any more."""
        pending = self._held + fresh
        hits = [(at + len(s), at, s) for s in self._stop if (at := pending.find(s)) >= 0]
        if hits:  # the one that is complete first, so that the pieces make no difference
            _, at, self.stopped = min(hits)
            self._held = ""
            return pending[:at]
        keep = 0 if final else self._may_stop(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _may_stop(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0
