"""Pages promised to speculation."""

from __future__ import annotations

from forkserve.errors import ConfigError

__all__ = ["Ledger"]


class Ledger:
    """Pages promised to admitted speculation and not allocated yet, by (session, node)."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, int]] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Pages promised in all."""
        return self._total

    def held(self, session: str, node: int) -> int:
        """Pages promised to a node."""
        return self._held.get(session, {}).get(node, 0)

    def reserve(self, session: str, node: int, pages: int) -> None:
        """Promise more pages to a node."""
        self._check(pages)
        if pages:
            nodes = self._held.setdefault(session, {})
            nodes[node] = nodes.get(node, 0) + pages
            self._total += pages

    def settle(self, session: str, node: int, pages_used: int) -> int:
        """Pages of a promise were allocated: they leave the ledger.  Returns what is still held."""
        self._check(pages_used)
        held = self.held(session, node)
        # An estimate may be low: pages beyond the promise are in the pool's count, not in ours.
        used = min(held, pages_used)
        self._total -= used
        if held > used:
            self._held[session][node] = held - used
        elif held:
            nodes = self._held[session]
            del nodes[node]
            if not nodes:
                del self._held[session]
        return held - used

    def release(self, session: str, node: int) -> int:
        """Give up what a node still holds; returns it."""
        held = self.held(session, node)
        self.settle(session, node, held)
        return held

    def release_session(self, session: str) -> int:
        """Give up what a session still holds; returns it."""
        held = sum(self._held.pop(session, {}).values())
        self._total -= held
        return held

    def _check(self, pages: int) -> None:
        if pages < 0:
            raise ConfigError(f"the ledger cannot take {pages} pages")
