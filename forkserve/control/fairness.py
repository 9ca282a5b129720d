"""Who is served next: virtual token counters per tenant (VTC), with a price for speculation.

A committed prefill token costs 1, a decoded token 2, a speculative token kappa when it runs and
the rest when it is committed.  So committed work never gets cheaper by having been speculated, and
what was aborted stays paid:  charge = cost of committed work + kappa * wasted tokens + misses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forkserve.config import ForkServeConfig
from forkserve.errors import ConfigError
from forkserve.types import JobClass

__all__ = ["FairMeter"]

_DECODE_PRICE = 2.0
_MISS_RISE = 2.0  # factor on a tenant's lambda per miss
_MISS_MOST = 16.0  # and its ceiling
_MISS_HALF_LIFE_MS = 10_000.0  # the excess over 1 halves in this time
_DEBTS = 1024  # closed tenants whose debt is remembered


@dataclass(slots=True)
class _Account:
    """counter: virtual time, charge / weight, lifted.  charged: what was really billed."""

    counter: float
    charged: float = 0.0
    backlog: int = 0  # committed jobs queued
    closed: bool = False  # no session left: drop it as soon as that forgets no debt
    factor: float = 1.0
    factor_ms: float = 0.0  # when `factor` was last set


class FairMeter:
    """Counters, the lift rule, and the price of disturbing others.

    The least counter is served first.  A tenant that was idle and becomes backlogged with
    committed work is lifted to the least counter among the others that are so backlogged (if there
    is none: to that of the last one that was), so idling saves up no credit.  A tenant that only
    speculates never counts in this, or it could hold the minimum down.
    """

    def __init__(self, config: ForkServeConfig) -> None:
        self._kappa = config.kappa
        self._accounts: dict[str, _Account] = {}
        self._busy: set[str] = set()  # tenants with committed work in this tick
        self._weights: dict[str, float] = {}  # set by the operator: outlives the accounts
        self._floor = 0.0  # counter of the last tenant whose committed backlog ran out

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._accounts)

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 may have twice the service of one of weight 1."""
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight {weight} of tenant {tenant!r} must be positive and finite")
        self._weights[tenant] = weight

    def open(self, tenant: str) -> None:
        """The tenant has a session.  A new one starts level with those that are being served."""
        account = self._accounts.setdefault(tenant, _Account(self._level()))
        account.closed = False

    def bill(self, tenant: str) -> dict[str, float]:
        """What a store keeps of the tenant: its counter, and what it was charged."""
        return {"counter": self.counter(tenant), "charged": self.charged(tenant)}

    def restore(self, tenant: str, bill: Mapping[str, float]) -> None:
        """`open` for a tenant with a past, as `bill` gave it; one that is here already goes on."""
        if tenant not in self._accounts:
            counter = max(bill.get("counter", 0.0), self._level())
            self._accounts[tenant] = _Account(counter, charged=bill.get("charged", 0.0))
        self.open(tenant)

    def counter(self, tenant: str) -> float:
        """Virtual service so far; the tenant with the least goes first."""
        account = self._accounts.get(tenant)
        return account.counter if account else 0.0

    def charged(self, tenant: str) -> float:
        """Everything billed to the tenant, in committed prefill tokens."""
        account = self._accounts.get(tenant)
        return account.charged if account else 0.0

    def arrive(self, tenant: str) -> None:
        """A committed job of the tenant was queued."""
        self.open(tenant)
        account = self._accounts[tenant]
        if tenant not in self._busy:
            account.counter = max(account.counter, self._level())
            self._busy.add(tenant)
        account.backlog += 1

    def leave(self, tenant: str) -> None:
        """A committed job of the tenant left the queue."""
        account = self._accounts[tenant]
        assert account.backlog > 0, f"tenant {tenant!r} has no committed job to leave"
        account.backlog -= 1

    def tick(self) -> None:
        """A tick begins: tenants without committed work are idle now.

        Not before, so that a tenant whose next job follows its last one between two ticks (a
        generation after its prefill) was never idle and isn't lifted.
        """
        idle = [tenant for tenant in self._busy if not self._accounts[tenant].backlog]
        self._busy.difference_update(idle)
        if idle and not self._busy:
            last = max(self._accounts[tenant].counter for tenant in idle)
            self._floor = max(self._floor, last)

    def serve(self, tenant: str, kind: JobClass, tokens: int) -> None:
        """Bill tokens that ran."""
        price = 1.0
        if kind is JobClass.DECODE:
            price = _DECODE_PRICE
        elif kind is JobClass.SPEC:
            price = self._kappa
        self._bill(tenant, price, tokens)

    def commit_speculative(self, tenant: str, tokens: int) -> None:
        """Speculative tokens that had run were committed: bill the rest of their price."""
        self._bill(tenant, 1.0 - self._kappa, tokens)

    def miss(self, tenant: str, tokens: int, now_ms: float) -> None:
        """The tenant's speculation made others miss their token time.

        Bills the `tokens` that came late at 1 and doubles the tenant's lambda, up to 16 times.
        """
        self._bill(tenant, 1.0, tokens)
        account = self._accounts[tenant]
        account.factor = min(_MISS_MOST, _MISS_RISE * self.tbt_factor(tenant, now_ms))
        account.factor_ms = now_ms

    def tbt_factor(self, tenant: str, now_ms: float) -> float:
        """What lambda is multiplied by for this tenant: 1, more after a miss, halving back."""
        account = self._accounts.get(tenant)
        if account is None or account.factor == 1.0:
            return 1.0
        age = max(0.0, now_ms - account.factor_ms)
        return 1.0 + (account.factor - 1.0) * float(0.5 ** (age / _MISS_HALF_LIFE_MS))

    def close(self, tenant: str) -> None:
        """The tenant has no session left.  Its debt stays as long as it is one.

        A counter at or below the level that a newcomer is lifted to says nothing and is dropped;
        one above it is a debt, and is kept until the level has passed it.  Memory stays bounded:
        of more than 1024 closed debts the smallest goes.
        """
        account = self._accounts.get(tenant)
        if account is None:
            return
        account.closed = True
        self.tick()
        level = self._level()
        idle = sorted(
            (a.counter, name) for name, a in self._accounts.items() if a.closed and not a.backlog
        )
        spare = len(idle) - _DEBTS
        for place, (counter, name) in enumerate(idle):
            if counter <= level or place < spare:
                del self._accounts[name]

    def _level(self) -> float:
        """Counter that a tenant starts from when it becomes backlogged."""
        return min((self._accounts[t].counter for t in self._busy), default=self._floor)

    def _bill(self, tenant: str, price: float, tokens: int) -> None:
        if tokens < 0:
            raise ConfigError(f"tenant {tenant!r} cannot be billed {tokens} tokens")
        account = self._accounts.get(tenant)
        if account is None:
            # A late bill must not reopen a closed tenant: work in flight may outlive its session.
            account = self._accounts[tenant] = _Account(self._level(), closed=True)
        account.charged += price * tokens
        account.counter += price * tokens / self._weights.get(tenant, 1.0)
