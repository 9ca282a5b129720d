"""What tenants are charged: added up over the processes that use a store, and over stores.

A bill is of a tenant, not of a session, and two bundles may tell of the same charges.  So each
store counts its own (table `meter`), and keeps of every other the largest total that a bundle from
there has said (table `bill`): a charge never shrinks.  The sum of both is right in whatever order,
and however often, bundles come.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from forkserve.store.catalog import Catalog

__all__ = ["CHARGE", "BillOf", "Charges", "bill_rows", "enter_bills"]

_MANY = 4096  # tenants that are remembered before those that have ended are forgotten
CHARGE = (
    "INSERT INTO meter VALUES (?, 'charged', ?)"
    " ON CONFLICT (tenant, name) DO UPDATE SET value = value + excluded.value"
)


class Charges:
    """What tenants were charged and the catalog has not got yet.  Not locked: the journal's part.

    charged: a total of this process.  It begins at 0, and again when a tenant ends its last
    session and opens another, so only what was added since the last look counts.
    """

    def __init__(self, charged: Callable[[str], float]) -> None:
        self._now = charged
        self._seen: dict[str, float] = {}
        self._owed: dict[str, float] = {}

    def goes_on(self, tenant: str) -> None:
        """The total of a tenant has just been set to what the catalog has."""
        self._seen[tenant] = self._now(tenant)

    def look(self, tenant: str) -> None:
        """Note what was added; before a total ends, and when one begins, at the latest."""
        now, last = self._now(tenant), self._seen.get(tenant, 0.0)
        self._seen[tenant] = now
        self.owe({tenant: now - last if now >= last else now})
        if len(self._seen) > _MANY:
            self._seen = {t: seen for t, seen in self._seen.items() if self._now(t)}

    def owe(self, charges: Mapping[str, float]) -> None:
        """Note charges that are still to be written."""
        for tenant, charge in charges.items():
            if charge:
                self._owed[tenant] = self._owed.get(tenant, 0.0) + charge

    def take(self) -> dict[str, float]:
        """What is to be written, by tenant; `owe` it again if that fails."""
        taken, self._owed = self._owed, {}
        return taken


# -------------------------------------------------------------------- in a bundle


class BillOf(BaseModel):
    """What a tenant was charged in one store, by the id of that store."""

    model_config = ConfigDict(strict=True, extra="forbid")
    tenant: str
    store: str = Field(pattern=r"^[0-9a-f]{32}$")
    charged: float = Field(ge=0, allow_inf_nan=False)


def bill_rows(catalog: Catalog, tenants: Sequence[str]) -> list[dict[str, Any]]:
    """What tenants were charged, here and elsewhere, as far as this store knows."""
    rows = catalog.read(
        "SELECT tenant, (SELECT value FROM meta WHERE key = 'store') AS store, value AS charged"
        " FROM meter WHERE name = 'charged' AND tenant IN (SELECT value FROM json_each(?1))"
        " UNION ALL SELECT tenant, store, charged FROM bill"
        " WHERE tenant IN (SELECT value FROM json_each(?1)) ORDER BY 1, 2",
        (json.dumps(list(tenants)),),
    )
    return [dict(zip(BillOf.model_fields, row, strict=True)) for row in rows]


def enter_bills(catalog: Catalog, db: sqlite3.Connection, bills: Sequence[dict[str, Any]]) -> None:
    """Note charges of other stores, inside a transaction; of its own this store knows better."""
    own = catalog.setting("store")
    db.executemany(
        "INSERT INTO bill (tenant, store, charged) VALUES (:tenant, :store, :charged)"
        " ON CONFLICT (tenant, store) DO UPDATE SET charged = max(charged, excluded.charged)",
        [bill for bill in bills if bill["store"] != own],
    )
