"""The tier in host memory: rows that left the device's pages, by what text they stand for.

A piece is a run of rows after a prefix.  It is found by the causal id of that prefix and by the
token ids themselves, never by a session's name: what a piece holds stays true whatever becomes of
the node it was copied from, and any session of the same salt may use it.  Runs are cut at multiples
of a chunk, so that a whole one can be stored as it is.

A budget in bytes is kept before every entry: the end of the least valuable run goes first, and an
entry that is worth less than what it would displace is not taken.
"""

from __future__ import annotations

import heapq
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forkserve.errors import StoreError
from forkserve.store.chunks import Buffer
from forkserve.store.decisions import admit
from forkserve.store.identity import CHUNK_TOKENS, Link, chunk_id, root_id, token_bytes
from forkserve.store.policies import Held, Policy

__all__ = ["HostMemory", "Piece", "Prefixes", "Weighed", "begins"]


class Prefixes:
    """Causal ids of the prefixes of one text, made as they are asked for."""

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self.raw = token_bytes(tokens)
        self._ids = [root_id(salt)]

    @property
    def count(self) -> int:
        """Tokens of the text."""
        return len(self.raw) // 4

    def at(self, length: int) -> bytes:
        """Id of the first `length` tokens."""
        whole, rest = divmod(length, CHUNK_TOKENS)
        while len(self._ids) <= whole:
            begin = (len(self._ids) - 1) * CHUNK_TOKENS
            self._ids.append(chunk_id(self._ids[-1], self.tokens(begin, begin + CHUNK_TOKENS)))
        if not rest:
            return self._ids[whole]
        return chunk_id(self._ids[whole], self.tokens(whole * CHUNK_TOKENS, length))

    def tokens(self, begin: int, end: int) -> bytes:
        """Token ids [begin, end), little-endian int32."""
        return self.raw[4 * begin : 4 * end]


@dataclass(slots=True, eq=False)
class Piece:
    """Rows [start, start + count) after the prefix `above`; `below` is the id with them."""

    above: bytes
    below: bytes
    start: int
    tokens: bytes
    rows: Buffer = field(repr=False)
    saved_ms: float
    used_s: float = 0.0
    uses: int = 0
    leases: int = 0

    @property
    def count(self) -> int:
        return len(self.tokens) // 4

    @property
    def link(self) -> Link | None:
        """The chunk that this piece is, if it is a whole one."""
        if self.count != CHUNK_TOKENS or self.start % CHUNK_TOKENS:
            return None
        return Link(self.above, self.start, self.tokens)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Whether a piece was taken in, and why.

    worth: of the piece.  against: the most that something was worth that went for it, or that kept
    it out; None when nothing had to go, or nothing could (it is larger than all that may).
    """

    taken: bool
    worth: float = 0.0
    against: float | None = None


class HostMemory:
    """At most `limit` bytes of rows.  Safe to use from several threads.

    policy: says what a piece is worth.  on_evicted: told, outside the lock, of pieces that went.
    """

    def __init__(
        self,
        limit: int,
        policy: Policy,
        *,
        on_evicted: Callable[[list[Piece]], None] = lambda gone: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit < 1:
            raise StoreError(f"a memory budget of {limit} bytes makes no sense")
        self.limit = limit
        self.used = 0
        self.refused = 0  # pieces that were worth less than what is there
        self.evicted = 0
        self.on_evicted = on_evicted
        self._policy = policy
        self._now = now_s
        self._pieces: dict[bytes, list[Piece]] = {}  # by `above`
        self._made = b""
        self._busy: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    def serve(self, made: bytes, busy: Callable[[], bool]) -> None:
        """An engine of fingerprint `made` uses it from now on, until `busy` says False.

        Pieces say which text they stand for, not whose numbers: those of another fingerprint are
        forgotten.  Raises StoreError while an engine of another one uses it.
        """
        with self._lock:
            if made != self._made and self._busy():
                raise StoreError(
                    "the memory tier of this store serves an engine of another model or variant; "
                    "shut that one down first, or open a Store of its own"
                )
            if made != self._made:
                self._pieces.clear()
                self.used = 0
            self._made, self._busy = made, busy

    def __len__(self) -> int:
        with self._lock:
            return sum(len(pieces) for pieces in self._pieces.values())

    def has(self, above: bytes, tokens: bytes) -> bool:
        """True if a piece begins there with these very tokens (or more)."""
        with self._lock:
            return any(p.tokens.startswith(tokens) for p in self._pieces.get(above, ()))

    def put(self, piece: Piece) -> bool:
        """Take a piece in; False when it does not fit, or is worth less than what is there."""
        return self.offer(piece).taken

    def offer(self, piece: Piece) -> Weighed:
        """The same, with the numbers that decided."""
        size = len(piece.rows)
        piece.used_s = self._now()
        with self._lock:
            beside = self._pieces.get(piece.above, [])
            if any(p.tokens.startswith(piece.tokens) for p in beside):
                return Weighed(True, self._value(piece))
            shorter = [p for p in beside if piece.tokens.startswith(p.tokens) and not p.leases]
            over = self.used + size - sum(len(p.rows) for p in shorter) - self.limit
            weighed, gone = Weighed(True, self._value(piece)), list[Piece]()
            if over > 0:
                weighed, gone = self._choose(over, piece, shorter)
            if not weighed.taken:
                self.refused += 1
                return weighed
            for old in (*shorter, *gone):
                self._remove(old)
            self._pieces.setdefault(piece.above, []).append(piece)
            self.used += size
            self.evicted += len(gone)
        if gone:
            self.on_evicted(gone)
        return weighed

    @contextmanager
    def find(self, above: bytes, wanted: bytes) -> Iterator[tuple[Piece, int] | None]:
        """The piece that shares most of `wanted` after a prefix, and how many tokens of it.

        It is not evicted while the block runs.
        """
        best, count = None, 0
        with self._lock:
            for piece in self._pieces.get(above, ()):
                same = _shared(piece.tokens, wanted)
                if same > count:
                    best, count = piece, same
            if best is not None:
                best.leases += 1
                best.uses += 1
                best.used_s = self._now()
        try:
            yield (best, count) if best is not None else None
        finally:
            if best is not None:
                with self._lock:
                    best.leases -= 1

    def reach(self, prefixes: Prefixes, at: int) -> int:
        """Where the rows of a text end that are here without a hole from position `at` on."""
        with self._lock:
            while at < prefixes.count:
                best = at
                for low in begins(at):
                    wanted = prefixes.tokens(low, prefixes.count)
                    for piece in self._pieces.get(prefixes.at(low), ()):
                        best = max(best, low + _shared(piece.tokens, wanted))
                if best == at:
                    break
                at = best
        return at

    def line(self, piece: Piece) -> list[Piece]:
        """The pieces above one that are here, root side first, itself included."""
        with self._lock:
            by_end = {p.below: p for pieces in self._pieces.values() for p in pieces}
        out = [piece]
        while (upper := by_end.get(out[-1].above)) is not None and upper.start < out[-1].start:
            out.append(upper)
        return out[::-1]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pieces.clear()
            self.used = 0

    def _choose(self, over: int, piece: Piece, spare: list[Piece]) -> tuple[Weighed, list[Piece]]:
        """Pieces worth no more than the new one that free `over` bytes, if there are enough."""
        worth, most = self._value(piece), None
        if len(piece.rows) > self.limit:
            return Weighed(False, worth), []
        everything = [p for pieces in self._pieces.values() for p in pieces if p not in spare]
        here = {p.below for p in everything}
        above = {p.above for p in everything} | {piece.above}
        heap = [
            (self._value(p), -p.start, n, p)
            for n, p in enumerate(everything)
            if p.below not in above and not p.leases
        ]
        heapq.heapify(heap)
        left: dict[bytes, int] = {}
        for p in everything:
            left[p.above] = left.get(p.above, 0) + 1
        gone: list[Piece] = []
        while over > 0 and heap:
            value, _, _, victim = heapq.heappop(heap)
            most = value if most is None else max(most, value)
            if not admit(worth, value):
                return Weighed(False, worth, most), []
            gone.append(victim)
            over -= len(victim.rows)
            left[victim.above] -= 1
            if not left[victim.above] and victim.above in here and victim.above != piece.above:
                for upper in everything:
                    if upper.below == victim.above and not upper.leases:
                        key = (self._value(upper), -upper.start, len(everything) + len(gone))
                        heapq.heappush(heap, (*key, upper))
        if over > 0:
            return Weighed(False, worth), []
        return Weighed(True, worth, most), gone

    def _value(self, piece: Piece) -> float:
        idle = max(self._now() - piece.used_s, 0.0)
        held = Held(
            piece.below.hex(),
            piece.start,
            piece.count,
            len(piece.rows),
            piece.saved_ms,
            piece.uses,
            idle,
            False,
        )
        return self._policy.value(held)

    def _remove(self, piece: Piece) -> None:
        beside = self._pieces.get(piece.above, [])
        if piece in beside:
            beside.remove(piece)
            self.used -= len(piece.rows)
            if not beside:
                del self._pieces[piece.above]


def begins(at: int) -> list[int]:
    """Where a piece that holds position `at` may begin: there, or where the chunk does."""
    return list(dict.fromkeys((at, at // CHUNK_TOKENS * CHUNK_TOKENS)))


def _shared(one: bytes, other: bytes) -> int:
    """Tokens that two runs of ids have in common at the beginning."""
    if one == other[: len(one)]:
        return len(one) // 4
    a, b = array("i", one), array("i", other)
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
