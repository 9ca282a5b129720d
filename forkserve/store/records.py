"""Sessions and names as plain values, read from the catalog."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.catalog import Catalog
from forkserve.store.chunks import ChunkFault
from forkserve.store.identity import (
    Fingerprint,
    parse_fingerprint,
    plan_chain,
    root_id,
    token_bytes,
)
from forkserve.store.seal import Sealer

__all__ = [
    "TAKEN",
    "NameRecord",
    "NodeRecord",
    "SessionRecord",
    "assemble",
    "close_sessions",
    "opened",
    "opened_text",
    "read_name",
    "read_session",
    "remove_name",
    "rename",
    "require_model",
    "require_name",
    "token_ids",
    "write_name",
]

TAKEN = "replace=True moves it to this state; or remove it first, or choose another"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One committed node."""

    id: int
    parent: int | None
    branch: str
    start: int
    tokens: array[int]
    mode: str
    line: int
    generation: int
    known: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it was last written, nodes parents first.

    bindings: (role, branch) of its commits, oldest first.  tool_times: (tool, ms), and
    tool_outputs: (tool, beginning of what it returned), oldest first.
    """

    id: str
    tenant: str
    salt: str
    seed: int
    fingerprint: str
    next_node: int
    next_line: int
    nodes: tuple[NodeRecord, ...]
    tips: dict[int, int]
    bindings: tuple[tuple[str, str], ...]
    next_binding: int
    tool_times: tuple[tuple[str, float], ...]
    tool_outputs: tuple[tuple[str, array[int]], ...]
    meters: dict[str, float]


@dataclass(frozen=True, slots=True)
class NameRecord:
    """A named state: the whole text from the root, and how its draws were seeded.

    chain: the end of its stored KV, a whole chunk of this text, or None.  Raises StoreError for
    fields that contradict each other.
    """

    name: str
    session: str
    node: int
    tenant: str
    salt: str
    seed: int
    tokens: array[int]
    chain: str | None
    fingerprint: str = ""  # of the model that made it; given when it was read

    def __post_init__(self) -> None:
        require_name(self.name)
        what = f"the state '{self.name}'"
        if type(self.node) is not int or self.node < 0 or type(self.seed) is not int:
            raise StoreError(f"{what} has node {self.node!r} and seed {self.seed!r}")
        if not isinstance(self.tokens, array) or self.tokens.typecode != "i" or not self.tokens:
            raise StoreError(
                f"{what} needs the token ids of a text, as an array of 32-bit integers"
            )
        links = plan_chain(self.tokens, self.salt)
        if self.chain is not None and self.chain not in {link.id.hex() for link in links}:
            raise StoreError(f"{what} names a chunk {self.chain!r} that its text does not give")


def require_name(name: object) -> None:
    """Raise StoreError for what cannot be the name of a state."""
    if not isinstance(name, str) or not name or len(name) > 512 or not name.isprintable():
        raise StoreError(f"{name!r:.80} is no name: 1 to 512 printable characters")


def require_model(catalog: Catalog, made: Fingerprint, digest: str, what: str) -> None:
    """Raise StoreError unless a state was made by the model of `made`.

    Token ids of another model say another text.  Page size, dtype of KV, kernels and version may
    differ: then the rows are computed again.
    """
    if digest == made.digest.hex():
        return
    rows = catalog.read("SELECT fields FROM fingerprint WHERE digest = ?", (digest,))
    then = parse_fingerprint(rows[0][0]).fields if rows else {}
    for field in ("architecture", "weights", "adapter"):
        if then.get(field) != made.fields[field]:
            raise StoreError(
                f"{what} was made by another model: {field} was {then.get(field)}, and is "
                f"{made.fields[field]} here; open it with that model"
            )


def read_session(catalog: Catalog, session: str, sealer: Sealer | None) -> SessionRecord | None:
    """A session of the catalog, or None.  Raises StoreError if its rows do not fit together."""
    with catalog.moment():
        return _session(catalog, session, sealer)


def _session(catalog: Catalog, session: str, sealer: Sealer | None) -> SessionRecord | None:
    rows = catalog.read(
        "SELECT s.tenant, s.salt, s.seed, f.digest, s.next_node, s.next_line"
        " FROM session AS s JOIN fingerprint AS f ON f.id = s.fingerprint WHERE s.id = ?",
        (session,),
    )
    if not rows:
        return None
    tenant, salt, seed, digest, next_node, next_line = rows[0]
    runs = catalog.read(
        "SELECT node, start, ids FROM run WHERE session = ? ORDER BY node, start", (session,)
    )
    rows = catalog.read(
        "SELECT id, parent, branch, start, tokens, mode, line, generation, known FROM node"
        " WHERE session = ? ORDER BY id",
        (session,),
    )
    nodes = assemble(session, runs, rows, sealer)
    tips = dict(catalog.read("SELECT line, node FROM tip WHERE session = ?", (session,)))
    if not nodes or tips.get(0) not in {node.id for node in nodes}:
        raise StoreError(f"session '{session}' has no main line in the catalog")
    bindings = catalog.read(
        "SELECT role, branch FROM binding WHERE session = ? ORDER BY seq", (session,)
    )
    (following,) = catalog.read(
        "SELECT coalesce(max(seq) + 1, 0) FROM binding WHERE session = ?", (session,)
    )[0]
    times = catalog.read("SELECT tool, ms FROM tool_time WHERE session = ? ORDER BY id", (session,))
    return SessionRecord(
        id=session,
        tenant=tenant,
        salt=opened_text(salt, b"salt" + session.encode(), sealer),
        seed=int(seed),
        fingerprint=digest,
        next_node=next_node,
        next_line=next_line,
        nodes=nodes,
        tips=tips,
        bindings=tuple((role, branch) for role, branch in bindings),
        next_binding=following,
        tool_times=tuple((tool, ms) for tool, ms in times),
        tool_outputs=tuple(
            (tool, token_ids(opened(blob, f"tool{session}/{tool}".encode(), sealer)))
            for tool, blob in catalog.read(
                "SELECT tool, ids FROM tool_output WHERE session = ? ORDER BY id", (session,)
            )
        ),
        meters=dict(catalog.read("SELECT name, value FROM meter WHERE tenant = ?", (tenant,))),
    )


def assemble(
    session: str,
    runs: Sequence[tuple[Any, ...]],
    nodes: Sequence[tuple[Any, ...]],
    sealer: Sealer | None,
) -> tuple[NodeRecord, ...]:
    """Nodes from rows of `run` and `node`, both in the order of their ids; each with its text.

    runs: (node, start, ids).  nodes: the columns of `NodeRecord`, with a count for the tokens.
    Raises StoreError when text is missing, is damaged, or does not open.
    """
    texts: dict[int, array[int]] = {}
    for node, start, blob in runs:
        ids = texts.setdefault(node, array("i"))
        if start != len(ids):
            raise StoreError(f"node {node} of session '{session}' lacks tokens from {len(ids)} on")
        ids.extend(token_ids(opened(blob, f"run{session}/{node}/{start}".encode(), sealer)))
    out = []
    for node, parent, branch, start, count, mode, line, generation, known in nodes:
        ids = texts.get(node, array("i"))
        if len(ids) != count:
            raise StoreError(
                f"node {node} of session '{session}' has {len(ids)} of its {count} tokens"
            )
        out.append(NodeRecord(node, parent, branch, start, ids, mode, line, generation, known))
    return tuple(out)


def write_name(
    catalog: Catalog,
    made: Fingerprint,
    of: NameRecord,
    sealer: Sealer | None,
    *,
    replace: bool = False,
) -> None:
    """Give a state a name.  One that is taken is a StoreError, or with replace moved to this state.

    One transaction: whoever looks, and whatever dies, the name stands for the one or the other.
    """
    place = of.name.encode()
    raw = token_bytes(of.tokens)
    salt = of.salt.encode()
    if sealer is not None:
        salt, raw = sealer.seal(salt, b"salt" + place), sealer.seal(raw, b"name" + place)
    with catalog.write() as db:
        taken = db.execute("SELECT session, node FROM name WHERE name = ?", (of.name,)).fetchone()
        if taken is not None and not replace:
            raise StoreError(
                f"the name '{of.name}' stands for node {taken[1]} of session '{taken[0]}'; {TAKEN}"
            )
        db.execute(
            "INSERT OR REPLACE INTO name VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                of.name,
                of.session,
                of.node,
                of.tenant,
                salt,
                str(of.seed),
                catalog.fingerprint(db, made),
                root_id(of.salt).hex(),
                of.chain,
                len(of.tokens),
                raw,
                catalog.now(),
            ),
        )
        faults.reach("name.written")


def read_name(catalog: Catalog, name: str, sealer: Sealer | None) -> NameRecord:
    """A named state.  Raises StoreError when there is none, or it does not open."""
    rows = catalog.read(
        "SELECT n.session, n.node, n.tenant, n.salt, n.seed, n.chain, n.ids, f.digest"
        " FROM name AS n JOIN fingerprint AS f ON f.id = n.fingerprint WHERE n.name = ?",
        (name,),
    )
    if not rows:
        raise StoreError(f"the store has no state named '{name}'")
    session, node, tenant, salt, seed, chain, ids, digest = rows[0]
    place = name.encode()
    return NameRecord(
        name=name,
        session=session,
        node=node,
        tenant=tenant,
        salt=opened_text(salt, b"salt" + place, sealer),
        seed=int(seed),
        tokens=token_ids(opened(ids, b"name" + place, sealer)),
        chain=chain,
        fingerprint=digest,
    )


def remove_name(catalog: Catalog, name: str) -> None:
    """Forget a name.  Raises StoreError when there is none."""
    with catalog.write() as db:
        if not db.execute("DELETE FROM name WHERE name = ?", (name,)).rowcount:
            raise StoreError(f"the store has no state named '{name}'")


def rename(catalog: Catalog, name: str, to: str, sealer: Sealer | None) -> None:
    """Give a state another name.  Raises StoreError: unknown, taken, no name, or another key."""
    require_name(to)
    found = read_name(catalog, name, sealer)  # what is sealed is bound to its name
    salt, raw = found.salt.encode(), token_bytes(found.tokens)
    if sealer is not None:
        salt, raw = (
            sealer.seal(salt, b"salt" + to.encode()),
            sealer.seal(raw, b"name" + to.encode()),
        )
    with catalog.write() as db:
        if db.execute("SELECT 1 FROM name WHERE name = ?", (to,)).fetchone():
            raise StoreError(f"the name '{to}' is taken")
        db.execute(
            "UPDATE name SET name = ?, salt = ?, ids = ? WHERE name = ?", (to, salt, raw, name)
        )


def close_sessions(catalog: Catalog, prefix: str, live: Callable[[], Collection[str]]) -> int:
    """Close the sessions whose ids begin with `prefix`, except those `live`; returns how many.

    For those that a process has left open and nobody will resume.  live: asked once they are known,
    since one may be opened meanwhile.  Raises StoreError; the owner of the store alone may.
    """
    found = "SELECT id FROM session WHERE closed_at IS NULL AND substr(id, 1, ?) = ?"
    rows = catalog.read(found, (len(prefix), prefix))
    kept = frozenset(live() if rows else ())
    gone = [name for (name,) in rows if name not in kept]
    if gone:
        now = catalog.now()
        with catalog.write(owned=True) as db:
            db.executemany(
                "UPDATE session SET closed_at = ? WHERE id = ?", [(now, name) for name in gone]
            )
    return len(gone)


def opened(blob: bytes, place: bytes, sealer: Sealer | None) -> bytes:
    """What a blob says, unsealed if the store is encrypted.  Raises StoreError."""
    if sealer is None:
        return bytes(blob)
    try:
        return sealer.unseal(blob, place)
    except ChunkFault:
        raise StoreError("the stored text does not open with this key") from None


def opened_text(blob: bytes, place: bytes, sealer: Sealer | None) -> str:
    """The same of a blob that is text.  Raises StoreError."""
    try:
        return opened(blob, place, sealer).decode()
    except UnicodeDecodeError:
        raise StoreError("a stored salt is damaged, or sealed with a key") from None


def token_ids(raw: bytes) -> array[int]:
    """Ids from the bytes of a column.  Raises StoreError for what are none."""
    ids = array("i")
    try:
        ids.frombytes(raw)
    except ValueError:
        raise StoreError("stored token ids are cut off, or sealed with a key") from None
    if len(ids) and min(ids) < 0:
        raise StoreError("stored token ids are damaged, or sealed with a key")
    return ids
