"""A place's budget in bytes: kept before every write, by evicting what is worth least.

Only the last chunk of a chain goes, then the one before it: a hole would make all after it useless.
What a name, a live pin or a reader's lease reaches never goes, nor does a chunk that write-behind
has still to bring elsewhere.  With a further place a chunk moves there before it goes here.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.chunks import ChunkFault
from forkserve.store.collect import delete_unnamed
from forkserve.store.depots.local import Waste
from forkserve.store.depots.shared import local_part
from forkserve.store.lease import tidy
from forkserve.store.pace import restful
from forkserve.store.policies import Held, Policy
from forkserve.store.vault import Vault

__all__ = ["Budget", "Evicted"]

_log = logging.getLogger(__name__)

_KEPT = """
WITH RECURSIVE kept (chain) AS (
  SELECT chain FROM name WHERE chain IS NOT NULL
  UNION SELECT chain FROM pin WHERE until IS NULL OR until > ?1
  UNION SELECT chain FROM lease WHERE at + ttl > ?1
  UNION SELECT c.parent FROM kept JOIN chunk AS c ON c.chain = kept.chain
)
"""
_ROWS = f"""{_KEPT}, live (chain) AS (
  SELECT n.chain FROM node AS n JOIN session AS s ON s.id = n.session
    WHERE s.closed_at IS NULL AND n.chain IS NOT NULL
  UNION SELECT c.parent FROM live JOIN chunk AS c ON c.chain = live.chain
)
SELECT c.fingerprint, c.chain, c.parent, c.start, c.tokens, c.uses, c.used_at, p.content, r.used,
       c.chain IN (SELECT chain FROM kept)
         OR p.content IN (SELECT content FROM outbox WHERE place != ?2),
       c.chain IN (SELECT chain FROM live),
       (SELECT group_concat(place) FROM replica AS o
          WHERE o.content = p.content AND o.place != ?2)
FROM replica AS r JOIN part AS p USING (content) JOIN chunk AS c ON c.id = p.chunk
WHERE r.place = ?2
"""
_NEEDED = """
SELECT 1 FROM outbox WHERE content = ?1 AND place != ?2
UNION ALL SELECT 1 FROM chunk AS c JOIN part AS p ON p.chunk = c.id
  JOIN replica AS r USING (content) WHERE c.fingerprint = ?3 AND c.parent = ?4 AND r.place = ?2
"""


@dataclass(frozen=True, slots=True)
class Evicted:
    """chunks that left the place, bytes that they gave back, and how many moved to another."""

    chunks: int
    bytes: int
    moved: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that may go.  chunk: fingerprint's row and chain.  others: further places that hold
    them, with commas."""

    chunk: tuple[int, str]
    content: str
    used: int
    others: str


class Budget:
    """At most `limit` bytes in one place: files that no row names, unfinished and damaged ones
    included.

    low: share of the limit that an eviction goes down to, so that it is not needed for every write.
    recompute_ms(tokens, start): what computing a chunk again would take.
    """

    def __init__(
        self,
        vault: Vault,
        place: str,
        limit: int,
        policy: Policy,
        *,
        low: float = 0.9,
        recompute_ms: Callable[[int, int], float] = lambda tokens, start: float(tokens),
    ) -> None:
        if limit < 1 or not 0 < low <= 1:
            raise StoreError(f"a budget of {limit} bytes with low={low} makes no sense")
        self.place = place
        self.limit = limit
        self.recompute_ms = recompute_ms
        self._vault = vault
        self._policy = policy
        self._low = low
        self._unlisted: int | None = None  # bytes of files that no row names, found at first use

    def make_room(self, size: int, follows: Collection[str] = ()) -> Evicted:
        """Let `size` more bytes fit.

        follows: chains (hex) that the new bytes go on from: they don't leave the last place, or
        there would be a hole.
        Raises StoreError when names, pins and this write need more than the limit; OSError,
        CatalogFault.
        """
        over = self.used() + size - self.limit
        if over > 0 and (local := local_part(self._vault.depots[self.place])) is not None:
            # What is damaged is kept to be looked at, not at the price of what is sound.
            over -= local.drop_aside(max(local.waste().aside_bytes - over, 0))
        if over <= 0:
            return Evicted(0, 0, 0)
        if size > self.limit:
            raise StoreError(f"{size} bytes do not fit into a budget of {self.limit} bytes")
        wanted = over + int((1 - self._low) * self.limit)
        with self._vault.catalog.write() as db:
            tidy(db, self._vault.catalog.now())
        done = self._evict(self._choose(wanted, () if self._further() else follows))
        if done.bytes < over:
            raise StoreError(
                f"the budget of {self.limit} bytes in '{self.place}' is full of named and pinned "
                "states, of chunks that have no copy elsewhere yet, and of those that the new ones "
                f"follow: {over} bytes more are needed, {done.bytes} could go; remove names, or "
                "raise it"
            )
        return done

    def used(self) -> int:
        """Bytes in the place, files that no row names, unfinished and damaged ones included."""
        depot = self._vault.depots[self.place]
        listed = self._vault.catalog.usage().get(self.place, (0, 0))[0]
        if self._unlisted is None:
            there = sum(stat.used for stat in depot.entries() if stat.own)
            self._unlisted = max(there - listed, 0)
        local = local_part(depot)
        waste = local.waste() if local is not None else Waste()
        return listed + self._unlisted + waste.leftover_bytes + waste.aside_bytes

    def _further(self) -> Sequence[str]:
        """Places that what leaves this one may move to."""
        places = list(self._vault.depots)
        return places[places.index(self.place) + 1 :]

    def recount(self) -> None:
        """Forget what was counted on the disk; the next write counts again (gc has run)."""
        self._unlisted = None

    def _choose(self, wanted: int, follows: Collection[str]) -> list[_Part]:
        """The least valuable chain ends, up to `wanted` bytes."""
        now = self._vault.catalog.now()
        rows = self._vault.catalog.read(_ROWS, (now, self.place))
        children: dict[tuple[int, str], int] = {}
        parts: dict[tuple[int, str], list[_Part]] = {}
        fast: set[tuple[int, str]] = set()
        for which, chain, _, _, _, _, _, content, used, kept, _, others in restful(rows):
            key = which, chain
            parts.setdefault(key, []).append(_Part(key, content, used, others or ""))
            if kept or chain in follows:
                fast.add(key)
        items: dict[tuple[int, str], tuple[Held, tuple[int, str]]] = {}
        seen: set[tuple[int, str]] = set()
        for which, chain, parent, start, tokens, uses, at, _, _, _, live, _ in restful(rows):
            key = (which, chain)
            if key in seen:
                continue
            seen.add(key)
            if key not in fast:
                size = sum(part.used for part in parts[key])
                saved = self.recompute_ms(tokens, start)
                idle = max(now - at, 0.0)
                held = Held(chain, start, tokens, size, saved, uses, idle, bool(live))
                items[key] = (held, (which, parent))
            children[which, parent] = children.get((which, parent), 0) + 1
        heap = [
            (self._policy.value(held), -held.start, key)
            for key, (held, _) in items.items()
            if not children.get(key)
        ]
        heapq.heapify(heap)
        out: list[_Part] = []
        freed = 0
        while heap and freed < wanted:
            _, _, key = heapq.heappop(heap)
            held, above = items[key]
            out += parts[key]
            freed += held.bytes
            children[above] = children.get(above, 0) - 1
            if above in items and not children[above]:
                outer = items[above][0]
                heapq.heappush(heap, (self._policy.value(outer), -outer.start, above))
        return out

    def _evict(self, chosen: list[_Part]) -> Evicted:
        """Let parts go from here; one that has no copy elsewhere and cannot be given one stays."""
        vault, moved, gone, lost = self._vault, 0, list[_Part](), set[str]()
        further = self._further()
        for part in chosen:
            if further and not set(part.others.split(",")) & set(further):
                try:
                    vault.copy_one(part.content, self.place, further[0])
                    moved += 1
                except FileNotFoundError:
                    lost.add(part.content)  # it is gone already: the row goes as well
                except ChunkFault:
                    continue  # damaged, and set aside
                except (OSError, StoreError) as error:
                    with suppress(StoreError):
                        vault.catalog.forgo(part.content, further[0])
                    _log.warning("a chunk could not be moved to %s: %s", further[0], error)
                    break  # what is above it stays, too: no hole, and the place is away
            gone.append(part)
        faults.reach("evict.copied")
        gone = self._unlist(gone, lost)
        contents, freed = [part.content for part in gone], sum(part.used for part in gone)
        faults.reach("evict.unlisted")
        for _ in delete_unnamed(vault, self.place, contents):
            pass
        faults.reach("evict.deleted")
        if gone:
            detail = {"chunks": len(gone), "bytes": freed, "moved": moved}
            vault.catalog.count(f"evicted_bytes/{self.place}/budget", freed)
            vault.catalog.event("evicted", place=self.place, reason="budget", **detail)
        return Evicted(len(gone), freed, moved)

    def _unlist(self, chosen: list[_Part], lost: set[str]) -> list[_Part]:
        """Strike the rows of parts that may still go, and of those that are `lost`.

        Since they were chosen somebody may have named, pinned or begun to read a chunk, or stored
        one that follows it.
        """
        now, out = self._vault.catalog.now(), []
        with self._vault.catalog.write() as db:
            kept = {row[0] for row in db.execute(_KEPT + "SELECT chain FROM kept", (now,))}
            for part in chosen:  # the ends of chains first
                content, chain = part.content, part.chunk[1]
                needed = (
                    chain in kept
                    or db.execute(_NEEDED, (content, self.place, *part.chunk)).fetchone()
                )
                if needed and content not in lost:
                    continue
                db.execute(
                    "DELETE FROM replica WHERE place = ? AND content = ?", (self.place, content)
                )
                out.append(part)
        return out
