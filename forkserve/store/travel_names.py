"""Named states as rows of a bundle's manifest, and back into a catalog."""

from __future__ import annotations

import base64
import sqlite3
from typing import Any

from pydantic import BaseModel, Field

from forkserve.errors import StoreError
from forkserve.store.catalog import Catalog
from forkserve.store.identity import Fingerprint, parse_fingerprint, plan_chain, root_id
from forkserve.store.records import NameRecord, read_name, require_name
from forkserve.store.travel import STRICT, Hex, Small
from forkserve.store.vault import Vault

__all__ = ["NameOf", "check_name", "enter_name", "name_row"]

_COLUMNS = ("name", "session", "node", "tenant", "seed", "root", "chain", "tokens", "created_at")
_BLOBS = ("salt", "ids")


class NameOf(BaseModel):
    """A row of table `name`, as a manifest has it: base64 for bytes."""

    model_config = STRICT
    name: str
    session: str
    node: Small
    tenant: str
    seed: str = Field(pattern=r"^-?[0-9]{1,40}$")
    root: Hex
    chain: Hex | None
    tokens: Small
    created_at: float = Field(allow_inf_nan=False)
    salt: str
    ids: str
    fingerprint: str


def name_row(vault: Vault, name: str) -> dict[str, Any]:
    """A named state, ready for JSON.  Raises StoreError when there is none or it does not open."""
    read_name(vault.catalog, name, vault.sealer)  # it must open, or the export is worth nothing
    columns = ", ".join(f"n.{c}" for c in (*_COLUMNS, *_BLOBS))
    row = vault.catalog.read(
        f"SELECT {columns}, f.fields FROM name AS n JOIN fingerprint AS f ON f.id = n.fingerprint"
        " WHERE n.name = ?",
        (name,),
    )[0]
    out = dict(zip((*_COLUMNS, *_BLOBS, "fingerprint"), row, strict=True))
    for blob in _BLOBS:
        out[blob] = base64.b64encode(out[blob]).decode()
    return out


def check_name(vault: Vault, row: dict[str, Any]) -> None:
    """The text of a name must give its chain, and no name may change its meaning here.

    Raises StoreError, ValueError for text that is no base64 or no UTF-8.
    """
    require_name(row["name"])
    parse_fingerprint(row["fingerprint"])
    if vault.sealer is None:
        ids, salt = base64.b64decode(row["ids"]), base64.b64decode(row["salt"]).decode()
        tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        links = [link.id.hex() for link in plan_chain(tokens, salt)]
        fits = len(tokens) == row["tokens"] and row["root"] == root_id(salt).hex()
        if not fits or len(ids) % 4 or not ids or (row["chain"] and row["chain"] not in links):
            raise StoreError(f"the text of '{row['name']}' does not give its chain")
    name = row["name"]
    here = vault.catalog.read("SELECT session, node FROM name WHERE name = ?", (name,))
    if here and _text(vault, name) != _plain(vault, row):
        raise StoreError(
            f"the name '{name}' stands here for another state, node {here[0][1]} of session "
            f"'{here[0][0]}': rename that one (forkserve store name '{name}' --to OTHER) or remove "
            "it (--remove), and import again"
        )


def _text(vault: Vault, name: str) -> tuple[str, bytes]:
    found: NameRecord = read_name(vault.catalog, name, vault.sealer)
    return found.salt, found.tokens.tobytes()


def _plain(vault: Vault, row: dict[str, Any]) -> tuple[str, bytes]:
    salt, ids = base64.b64decode(row["salt"]), base64.b64decode(row["ids"])
    if vault.sealer is not None:
        place = row["name"].encode()
        salt = vault.sealer.unseal(salt, b"salt" + place)
        ids = vault.sealer.unseal(ids, b"name" + place)
    return salt.decode(), ids


def enter_name(catalog: Catalog, db: sqlite3.Connection, row: dict[str, Any]) -> None:
    """Write a name inside a transaction; one that is there already stays (see `check_name`)."""
    made = parse_fingerprint(row["fingerprint"])
    values = {**row, **{blob: base64.b64decode(row[blob]) for blob in _BLOBS}}
    which = catalog.fingerprint(db, Fingerprint(made.digest, made.text))
    columns = (*_COLUMNS, *_BLOBS)
    db.execute(
        f"INSERT OR IGNORE INTO name ({', '.join(columns)}, fingerprint)"
        f" VALUES ({', '.join('?' * (len(columns) + 1))})",
        (*(values[column] for column in columns), which),
    )
