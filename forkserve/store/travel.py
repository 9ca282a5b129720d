"""A session as rows of a bundle's manifest, and back into a catalog.

What travels: the committed tree with its text, tips and seed, its commits, what was learned of
tools, and the latest records of decisions; beside it what its tenant was charged (`bills`).  Blobs
are base64.  Sealed ones stay sealed, bound to the session's id; under another one they are sealed
anew.
"""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forkserve.errors import ForkServeError, NodeError, StoreError
from forkserve.store.catalog import Catalog
from forkserve.store.identity import parse_fingerprint
from forkserve.store.records import NodeRecord, assemble, opened, read_session, token_ids
from forkserve.store.seal import Sealer
from forkserve.store.shadow import Kept, keep
from forkserve.tree.pool import PagePool
from forkserve.tree.revive import revive
from forkserve.tree.tree import ContextTree

__all__ = [
    "STRICT",
    "Hex",
    "SessionOf",
    "Small",
    "check_session",
    "enter_session",
    "renamed",
    "session_rows",
]

STRICT = ConfigDict(strict=True, extra="forbid")
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Small = Annotated[int, Field(ge=0, lt=2**53)]  # a column of integers has room to count on from it
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Node(BaseModel):
    model_config = STRICT
    id: Small
    parent: Small | None
    branch: str
    start: Small
    tokens: Small
    mode: Literal["commit", "idle"]
    line: Small
    generation: Small
    known: Small
    chain: Hex | None


class _Run(BaseModel):
    model_config = STRICT
    node: Small
    start: Small
    ids: str


class _Tip(BaseModel):
    model_config = STRICT
    line: Small
    node: Small


class _Binding(BaseModel):
    model_config = STRICT
    seq: Small
    node: Small
    winner: Small
    role: str
    branch: str
    hit: str
    lcp: Small
    tail: Small
    skipped: Small
    aborted: Small
    generation: Small
    at: _Finite


class _ToolTime(BaseModel):
    model_config = STRICT
    tool: str
    ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    at: _Finite


class _ToolOutput(BaseModel):
    model_config = STRICT
    tool: str
    ids: str
    at: _Finite


class _Decision(BaseModel):
    """Times and worths may be infinite: a policy may keep something at any price."""

    model_config = STRICT
    node: Small | None
    what: str
    verdict: str
    reason: str
    tokens: Small
    gain_ms: float | None
    cost_ms: float | None
    actual_ms: float | None
    worth: float | None
    against: float | None
    at: _Finite


class SessionOf(BaseModel):
    """A session in a manifest: its row, and the rows below it by table."""

    model_config = STRICT
    id: str = Field(min_length=1)
    tenant: str
    salt: str
    seed: str = Field(pattern=r"^-?[0-9]{1,40}$")
    next_node: Small
    next_line: Small
    created_at: _Finite
    fingerprint: str
    node: list[_Node]
    run: list[_Run]
    tip: list[_Tip]
    binding: list[_Binding]
    tool_time: list[_ToolTime]
    tool_output: list[_ToolOutput]
    decision: list[_Decision] = []  # a bundle of format 2 has none


# Table -> (model of a row, what its rows are ordered by).
_TABLES: dict[str, tuple[type[BaseModel], str]] = {
    "node": (_Node, "id"),
    "run": (_Run, "node, start"),
    "tip": (_Tip, "line"),
    "binding": (_Binding, "seq"),
    "tool_time": (_ToolTime, "id"),
    "tool_output": (_ToolOutput, "id"),
    "decision": (_Decision, "id"),
}
_DECISIONS = 10_000  # of one session, the latest
_HEAD = ("id", "tenant", "salt", "seed", "next_node", "next_line", "created_at")
_BLOBS = ("salt", "ids")


# -------------------------------------------------------------------- out


def session_rows(catalog: Catalog, session: str, sealer: Sealer | None) -> dict[str, Any]:
    """A session as it is at this moment, ready for JSON.

    Raises StoreError when there is none, when it is damaged, or when it does not open.
    """
    with catalog.moment():
        if read_session(catalog, session, sealer) is None:
            raise StoreError(f"the store has no session '{session}'")
        columns = ", ".join(f"s.{name}" for name in _HEAD)
        head = catalog.read(
            f"SELECT {columns}, f.fields FROM session AS s"
            " JOIN fingerprint AS f ON f.id = s.fingerprint WHERE s.id = ?",
            (session,),
        )[0]
        out = _plain(dict(zip((*_HEAD, "fingerprint"), head, strict=True)))
        for table, (model, order) in _TABLES.items():
            names = list(model.model_fields)
            which = f"{table} WHERE session = ?"
            if table == "decision":
                which = f"(SELECT * FROM {which} ORDER BY id DESC LIMIT {_DECISIONS})"
            rows = catalog.read(
                f"SELECT {', '.join(names)} FROM {which} ORDER BY {order}", (session,)
            )
            out[table] = [_plain(dict(zip(names, row, strict=True))) for row in rows]
    return out


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    for blob in _BLOBS:
        if blob in row:
            row[blob] = base64.b64encode(row[blob]).decode()
    return row


# -------------------------------------------------------------------- in


def renamed(one: dict[str, Any], to: str, sealer: Sealer | None) -> dict[str, Any]:
    """The same session under another id.  Raises StoreError when it does not open."""
    name, out = one["id"], {**one, "id": to}
    if sealer is None:
        return out

    def again(row: dict[str, Any], key: str, kind: str, rest: str = "") -> dict[str, Any]:
        plain = opened(_blob(row, key), f"{kind}{name}{rest}".encode(), sealer)
        sealed = sealer.seal(plain, f"{kind}{to}{rest}".encode())
        return {**row, key: base64.b64encode(sealed).decode()}

    out = again(out, "salt", "salt")
    out["run"] = [again(r, "ids", "run", f"/{r['node']}/{r['start']}") for r in one["run"]]
    out["tool_output"] = [again(r, "ids", "tool", f"/{r['tool']}") for r in one["tool_output"]]
    return out


def check_session(catalog: Catalog, one: dict[str, Any], sealer: Sealer | None) -> bool:
    """False when the very same session is here already.

    Raises StoreError: its rows form no tree, its text does not give its chains, it does not open,
    or another session has its id here.  The shape was checked by `SessionOf`.
    """
    name = one["id"]
    try:
        nodes, tips, salt = _tree(one, sealer)
        _unique(f"session '{name}'", one)
        for row in one["tool_output"]:
            token_ids(opened(_blob(row, "ids"), f"tool{name}/{row['tool']}".encode(), sealer))
        _require_chains(one, nodes, tips, salt)
        parse_fingerprint(one["fingerprint"])
    except NodeError as error:
        raise StoreError(f"session '{name}' makes no sense: {error}") from None
    here = read_session(catalog, name, sealer)
    if here is None:
        return True
    same = (here.nodes, here.tips, here.salt, str(here.seed)) == (nodes, tips, salt, one["seed"])
    if not same or here.tenant != one["tenant"]:
        raise StoreError(
            f"the store holds another session '{name}': take this one in under another id "
            "(import --as NEWID, as_session=), or close that one and collect it (gc)"
        )
    return False


def _tree(
    one: dict[str, Any], sealer: Sealer | None
) -> tuple[tuple[NodeRecord, ...], dict[int, int], str]:
    name = one["id"]
    runs = [(row["node"], row["start"], _blob(row, "ids")) for row in one["run"]]
    rows = [tuple(row[key] for key in _Node.model_fields if key != "chain") for row in one["node"]]
    nodes = assemble(name, sorted(runs, key=lambda run: run[:2]), sorted(rows), sealer)
    tips = {row["line"]: row["node"] for row in one["tip"]}
    if tips.get(0) not in {node.id for node in nodes}:
        raise StoreError(f"session '{name}' has no main line")
    salt = opened(_blob(one, "salt"), b"salt" + name.encode(), sealer).decode()
    return nodes, tips, salt


def _blob(row: dict[str, Any], key: str) -> bytes:
    return base64.b64decode(row[key], validate=True)


def _unique(what: str, one: dict[str, Any]) -> None:
    for table, key in (("node", "id"), ("tip", "line"), ("binding", "seq")):
        numbers = sorted(row[key] for row in one[table])
        if any(a == b for a, b in pairwise(numbers)):
            raise StoreError(f"{what} has two rows of one {key} in {table}")
    if not {row["node"] for row in one["run"]} <= {row["id"] for row in one["node"]}:
        raise StoreError(f"{what} has text of a node that is not there")


def _require_chains(
    one: dict[str, Any], nodes: Sequence[NodeRecord], tips: dict[int, int], salt: str
) -> None:
    """The chain of each node must be what the text of its path gives: KV is found by it."""
    tree = ContextTree(one["id"], PagePool(1, 16), tenant=one["tenant"], salt=salt)
    revive(tree, nodes, tips, one["next_node"], one["next_line"], 0.0)
    _require_lines(one, tree)
    chains = {row["id"]: row["chain"] for row in one["node"]}
    known: dict[int, Kept] = {}
    for node in tree:
        kept = known[node.id] = keep(tree, node, known)
        if chains[node.id] != (kept.links[-1].hex() if kept.links else None):
            raise StoreError(f"the text of node {node.id} of '{one['id']}' does not give its chain")


def _require_lines(one: dict[str, Any], tree: ContextTree) -> None:
    """Each line is one path to its tip, and no line begins later under a number that is in use."""
    name, most = one["id"], one["next_line"]
    for line, tip in tree.tips.items():
        if tip.line != line:
            raise StoreError(f"node {tip.id} of '{name}', of line {tip.line}, ends line {line}")
        if any(child.line == line for child in tip.children.values()):
            raise StoreError(f"line {line} of '{name}' goes on after its tip {tip.id}")
    for node in tree:
        lines = [child.line for child in node.children.values()]
        if len(set(lines)) < len(lines):
            raise StoreError(f"node {node.id} of '{name}' has two children of one line")
        if node.line >= most:
            raise StoreError(f"node {node.id} of '{name}' is of line {node.line} of {most}")


def enter_session(catalog: Catalog, db: sqlite3.Connection, one: dict[str, Any]) -> None:
    """Write a session's rows inside a transaction; `check_session` has said that it is new."""
    made = parse_fingerprint(one["fingerprint"])
    head = {**{key: one[key] for key in _HEAD}, "salt": _blob(one, "salt")}
    head |= {"fingerprint": catalog.fingerprint(db, made), "updated_at": catalog.now()}
    try:
        _insert(db, "session", [head])
        for table in _TABLES:
            rows = [{"session": one["id"], **row} for row in one[table]]
            for row in rows:
                if "ids" in row:
                    row["ids"] = _blob(row, "ids")
            _insert(db, table, rows)
    except (sqlite3.IntegrityError, ForkServeError) as error:
        raise StoreError(f"session '{one['id']}' cannot be taken in: {error}") from error


def _insert(db: sqlite3.Connection, table: str, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        names = list(rows[0])
        marks = ", ".join("?" * len(names))
        values = [tuple(row[name] for name in names) for row in rows]
        db.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", values)
