"""Plans that live longer than a batch, and their tables on a device.

While a tree doesn't change and every branch grows by a row a step, a plan stays as it is but for
one more key of each branch: `TilePlanner` then updates the tables in place, and plans anew only
when the branches have used up their spare keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forkserve.kernels.forest import alike
from forkserve.kernels.jit import next_power
from forkserve.kernels.pieces import Tiling
from forkserve.kernels.tiles import Longs, TilePlan, draft_tiles
from forkserve.types import Span, Work

__all__ = ["Capacity", "DevicePlan", "TilePlanner"]


@dataclass(slots=True)
class _Branch:
    """A decoding work as it was planned: spans above its own segment, which `key` names.

    pages: of the rows of its own segment, the fresh ones since then among them.
    """

    above: tuple[Span, ...]
    key: Hashable
    own: int  # rows of its own segment in the context
    pages: list[int]
    start: int


class TilePlanner:
    """One plan per window of a model, made anew or grown.  made, grown: how often."""

    def __init__(self, tilings: Mapping[int, Tiling], scratch: int) -> None:
        """tilings: by window, 0 for none.  scratch: see `plan_tiles`."""
        self._tilings = dict(tilings)
        self._scratch = scratch
        self._size = next(iter(self._tilings.values())).page_size
        self._plans: dict[int, TilePlan] = {}
        self._branches: list[_Branch] = []
        # Pages of the spans above branches: as these hold them, and as they were planned.
        self._held: list[Sequence[int]] = []
        self._copies: list[Sequence[int]] = []
        self._tiles: dict[int, Longs] = {}  # of each branch, by window: see `draft_tiles`
        self._ahead = 0  # rows that every branch has added
        self._room = 0  # rows that every branch may still add
        self.made = 0
        self.grown = 0

    def plan(self, works: Sequence[Work]) -> dict[int, TilePlan]:
        """The plans of `works`.  They are the planner's own: the next call may change them."""
        if self._grow(works):
            self.grown += 1
            return self._plans
        self.made += 1
        self._room = 0  # nothing to grow, should planning fail
        for window, tiling in self._tilings.items():
            self._plans[window], self._tiles[window] = draft_tiles(works, tiling, self._scratch)
        self._remember(works)
        return self._plans

    def _remember(self, works: Sequence[Work]) -> None:
        """Keep what must stay equal for the plans to be grown; nothing if they cannot be."""
        self._branches, self._ahead = [], 0
        if any(len(work.tokens) != 1 or work.write is None for work in works):
            return
        held: dict[int, Sequence[int]] = {}
        for work in works:
            assert work.write is not None
            above, key, own = work.context, work.write.key, 0
            pages: list[int] = []
            if above and above[-1].key == key:
                own, pages = above[-1].length, self._pages(above[-1])
                above = above[:-1]
            held.update((id(span.pages), span.pages) for span in above)
            pages += self._pages(work.write)[own > 0 and work.write.offset % self._size > 0 :]
            self._branches.append(_Branch(above, key, own, pages, work.start))
        self._held = list(held.values())
        self._copies = [pages[:] for pages in self._held]
        self._room = min(tiling.room for tiling in self._tilings.values())

    def _pages(self, span: Span) -> list[int]:
        """The pages of its rows."""
        pages = span.pages[
            span.offset // self._size : -(-(span.offset + span.length) // self._size)
        ]
        return pages if isinstance(pages, list) else list(pages)

    def _grow(self, works: Sequence[Work]) -> bool:
        """Whether `works` are those of the plan, a row further each; then the plans are grown.

        The spans above a branch must hold the very same lists of pages (`alike`), and the lists
        say what they said.
        """
        if self._room <= 0 or len(works) != len(self._branches) or self._held != self._copies:
            return False
        size, ahead = self._size, self._ahead + 1
        slots: list[int] = []
        turned: list[tuple[_Branch, int]] = []  # branches that begin a page
        for work, branch in zip(works, self._branches, strict=True):
            write, context = work.write, work.context
            if (
                write is None
                or len(work.tokens) != 1
                or work.start != branch.start + ahead
                or write.key != branch.key
                or not context
                or not alike(context[:-1], branch.above)
            ):
                return False
            branch.above, own = context[:-1], context[-1]  # the next may be the very same
            if (
                own.key != branch.key
                or own.length != branch.own + ahead
                or self._pages(own) != branch.pages
            ):
                return False
            number, within = divmod(write.offset, size)
            page = write.pages[number]
            if not within:
                turned.append((branch, page))
            elif page != branch.pages[-1]:
                return False
            slots.append(page * size + within)
        for branch, page in turned:
            branch.pages.append(page)
        self._ahead = ahead
        rows = np.array(slots, np.int64)
        for window, plan in self._plans.items():
            _extend(plan, self._tiles[window], rows, self._tilings[window])
        self._room -= 1
        return True


def _extend(plan: TilePlan, tiles: Longs, slots: Longs, tiling: Tiling) -> None:
    """One more row for every branch: a key more in its tile.

    tiles [branches, 2]: where each branch's rows go, and where they go from the next cell on.
    """
    plan.positions += 1
    plan.slots[:] = slots
    cut = plan.positions % tiling.split == 0
    tiles[cut, 0] = tiles[cut, 1]
    grown = tiles[:, 0]
    plan.keys[plan.tiles[grown, 0] + plan.tiles[grown, 2] - plan.tiles[grown, 1]] = slots
    plan.tiles[grown, 2] += 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much fits into a device's tables: query rows, tiles, results of a row in a tile, keys.

    tiles: small and large ones of each level.  block: keys of a step, which must be equal.
    """

    rows: int
    tiles: tuple[tuple[int, int], ...]
    results: int
    keys: int
    block: int

    @classmethod
    def of(cls, plan: TilePlan) -> Capacity:
        """Just enough."""
        tiles = tuple((small, large) for small, large in plan.counts.tolist())
        return cls(plan.positions.size, tiles, plan.rows.size, plan.keys.size, plan.block)

    @classmethod
    def rounded(cls, plan: TilePlan, rows: int) -> Capacity:
        """For graphs that are replayed with other plans: powers of two, for `rows` query rows."""
        own = cls.of(plan)
        tiles = [[next_power(n) if n else 0 for n in level] for level in own.tiles]
        tiles[0][0] = next_power(max(own.tiles[0][0], rows))
        sizes = next_power(own.results), next_power(own.keys)
        return cls(rows, tuple((small, large) for small, large in tiles), *sizes, own.block)

    def joined(self, other: Capacity) -> Capacity:
        """Room for what fits into either."""
        pairs = zip(self.tiles, other.tiles, strict=True)
        tiles = tuple((max(a[0], b[0]), max(a[1], b[1])) for a, b in pairs)
        results, keys = max(self.results, other.results), max(self.keys, other.keys)
        return Capacity(max(self.rows, other.rows), tiles, results, keys, self.block)

    def holds(self, other: Capacity) -> bool:
        """Whether what needs `other` fits."""
        pairs = zip(itertools.chain(*self.tiles), itertools.chain(*other.tiles), strict=True)
        return (
            self.block == other.block
            and self.rows >= other.rows
            and self.results >= other.results
            and self.keys >= other.keys
            and all(mine >= theirs for mine, theirs in pairs)
        )


class DevicePlan:
    """The tables of a `TilePlan` in one buffer of a device, in the types the kernels read.

    Unused tiles have no rows, unused rows have no parts and write to row `dump`.
    """

    def __init__(self, capacity: Capacity, device: torch.device | str, dump: int) -> None:
        self.capacity = capacity
        self._dump = dump
        n, tiles = capacity.rows, sum(itertools.chain(*capacity.tiles))
        sizes = {"positions": 2 * n, "slots": 2 * n, "tiles": 6 * tiles, "keys": capacity.keys}
        sizes |= dict.fromkeys(("rows", "carried", "parts"), capacity.results)
        sizes |= {"begins": n + 1, "leads": n}
        self._places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += -(-size // 4) * 4  # every table begins at a multiple of 16 bytes
        self._buffer = torch.zeros(end, dtype=torch.int32, device=device)
        pinned = self._buffer.is_cuda
        # Two, in turn: the one before may still be on its way to the device.
        self._staging = [torch.zeros(end, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self.positions = self._table("positions").view(torch.int64)
        self.slots = self._table("slots").view(torch.int64)
        self.tiles = self._table("tiles").view(-1, 6)
        self.keys, self.rows = self._table("keys"), self._table("rows")
        self.carried, self.parts = self._table("carried"), self._table("parts")
        self.begins, self.leads = self._table("begins"), self._table("leads")

    @classmethod
    def exact(cls, plan: TilePlan, device: torch.device | str) -> DevicePlan:
        """Tables of this plan alone."""
        made = cls(Capacity.of(plan), device, 0)
        made.load(plan)
        return made

    def launches(self) -> Iterator[tuple[int, bool, int, int]]:
        """Level, whether tiles are large, first tile, how many: in the order they must run in."""
        first = 0
        for level, counts in enumerate(self.capacity.tiles):
            for large, count in enumerate(counts):
                if count:
                    yield level, bool(large), first, count
                first += count

    def load(self, plan: TilePlan) -> None:
        """Send the tables of `plan`, which must fit; does not wait for the device."""
        assert self.capacity.holds(Capacity.of(plan)), "the plan does not fit into these tables"
        self._turn ^= 1
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        staging = self._staging[self._turn]
        host = {name: staging[place].numpy() for name, place in self._places.items()}
        n = plan.positions.size
        positions, slots = host["positions"].view(np.int64), host["slots"].view(np.int64)
        positions[:n], positions[n:] = plan.positions, 0
        slots[:n], slots[n:] = plan.slots, self._dump
        tiles = host["tiles"].reshape(-1, 6)
        tiles[:] = 0
        place = done = 0
        for room, count in zip(
            itertools.chain(*self.capacity.tiles), plan.counts.ravel().tolist(), strict=True
        ):
            tiles[place : place + count] = plan.tiles[done : done + count]
            place, done = place + room, done + count
        for name in ("keys", "rows", "carried", "parts", "leads"):
            values = getattr(plan, name)
            host[name][: values.size] = values
        host["begins"][: n + 1] = plan.begins
        host["begins"][n + 1 :] = plan.begins[-1]
        self._buffer.copy_(staging, non_blocking=True)
        if self._buffer.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._turn] = event

    def _table(self, name: str) -> torch.Tensor:
        return self._buffer[self._places[name]]
