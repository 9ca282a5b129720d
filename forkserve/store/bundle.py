"""Named states and whole sessions as one file: a tar, a manifest first, then the chunks it lists.

Everything is checked before anything is stored: the manifest against its hash, each chunk against
its content id, each name and each node of a session against the chain that its tokens give.  With
an encrypted store the hash of the manifest is keyed, so that only a holder of the key can make a
bundle that is accepted.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.chunks import ChunkFault, Header, check_payload, parse_header
from forkserve.store.identity import Fingerprint, parse_fingerprint, plan_chain, root_id
from forkserve.store.records import NameRecord, read_name, require_name
from forkserve.store.seal import Sealer
from forkserve.store.travel import Hex, SessionOf, Small, check_session, enter_session, session_rows
from forkserve.store.vault import Vault

__all__ = ["Bundle", "export_bundle", "has_sessions", "import_bundle"]

_FORMATS = (1, 2)  # 2: with sessions, which a reader of 1 would leave out without a word
_MANIFEST = "forkserve-bundle.json"
_MOST = 256 << 20  # bytes of a manifest
_STAGED = 64 << 20
Progress = Callable[[int, int], None]

_COLUMNS = ("name", "session", "node", "tenant", "seed", "root", "chain", "tokens", "created_at")
_BLOBS = ("salt", "ids")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was exported or imported.  bytes: of chunks."""

    names: tuple[str, ...]
    sessions: tuple[str, ...]
    chunks: int
    bytes: int


def export_bundle(
    vault: Vault,
    target: Path,
    names: Sequence[str] = (),
    sessions: Sequence[str] = (),
    progress: Progress | None = None,
) -> Bundle:
    """Write named states and sessions (default: all named states) with their chunks to a file.

    A session goes with its tree and commits, and with those rows that were published.  The file
    appears whole or not at all.  Raises StoreError (unknown name or session, a chunk that is
    damaged or not readable), OSError.
    """
    chosen, whole = list(dict.fromkeys(names)), list(dict.fromkeys(sessions))
    if not chosen and not whole:
        chosen = [str(r[0]) for r in vault.catalog.read("SELECT name FROM name")]
    if not chosen and not whole:
        raise StoreError("the store has no named state to export")
    rows = [_name_row(vault, name) for name in chosen]
    trees = [session_rows(vault.catalog, session, vault.sealer) for session in whole]
    ends = [row["chain"] for row in rows] + [n["chain"] for tree in trees for n in tree["node"]]
    chunks = _chunks(vault, [chain for chain in dict.fromkeys(ends) if chain])
    manifest: dict[str, Any] = {"format": _FORMATS[bool(trees)], "names": rows, "chunks": chunks}
    if trees:
        manifest["sessions"] = trees
    raw = _signed(manifest, vault.sealer)
    temp = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    total = 0
    try:
        with temp.open("xb") as file:
            os.chmod(temp, 0o600)
            with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, _MANIFEST, raw)
                for number, chunk in enumerate(chunks):
                    data = _sound(vault, chunk)
                    _add(tar, f"{chunk['content']}.kv", data)
                    total += len(data)
                    if progress is not None:
                        progress(number + 1, len(chunks))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    return Bundle(tuple(chosen), tuple(whole), len(chunks), total)


def _name_row(vault: Vault, name: str) -> dict[str, Any]:
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


def _chunks(vault: Vault, tails: Sequence[str]) -> list[dict[str, Any]]:
    """Lossless chunks of the chains that end in `tails`, root first."""
    rows = vault.catalog.read(
        "WITH RECURSIVE kept (chain) AS (SELECT value FROM json_each(?) UNION"
        " SELECT c.parent FROM kept JOIN chunk AS c ON c.chain = kept.chain)"
        " SELECT p.content, p.bytes, group_concat(r.place) FROM kept JOIN chunk AS c USING (chain)"
        " JOIN part AS p ON p.chunk = c.id JOIN replica AS r USING (content)"
        " WHERE p.format != 'int8' GROUP BY p.content ORDER BY c.start, p.content",
        (json.dumps(list(tails)),),
    )
    return [{"content": c, "bytes": b, "places": p.split(",")} for c, b, p in rows]


def _sound(vault: Vault, chunk: dict[str, Any]) -> bytes:
    for place in chunk["places"]:
        if place not in vault.depots:
            continue
        fault = vault.verify(place, chunk["content"])
        if fault is None:
            blob = vault.depots[place].open(chunk["content"])
            try:
                return bytes(blob.data)
            finally:
                blob.close()
    raise StoreError(f"chunk {chunk['content'][:16]} has no sound copy: publish the state again")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def _signed(manifest: dict[str, Any], sealer: Sealer | None) -> bytes:
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return json.dumps({"manifest": body, "hash": _hash(body, sealer)}).encode()


def _hash(body: str, sealer: Sealer | None) -> str:
    if sealer is None:
        return "plain:" + blake3(b"forkserve/store/bundle/v1" + body.encode()).hexdigest()
    return "keyed:" + sealer.sign(b"forkserve/store/bundle/v1" + body.encode())


# -------------------------------------------------------------------- import

_STRICT = ConfigDict(strict=True, extra="forbid")


class _NameOf(BaseModel):
    """A row of table `name`, as a manifest has it: base64 for bytes."""

    model_config = _STRICT
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


class _ChunkOf(BaseModel):
    model_config = _STRICT
    content: Hex
    bytes: Small
    places: list[str]


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    names: list[_NameOf]
    sessions: list[SessionOf] = []
    chunks: list[_ChunkOf]


def import_bundle(vault: Vault, source: Path, progress: Progress | None = None) -> Bundle:
    """Check a whole bundle, then take its chunks, names and sessions in.

    A session is taken in by the owner of the store alone.  Raises StoreError for a file that is no
    bundle, was changed, was cut off, or holds a name or a session that is taken here for another
    text; nothing of it is visible then.
    """
    manifest = _check(vault, source, progress)
    faults.reach("import.checked")
    pending: list[tuple[Header, bytes]] = []
    size = total = 0
    for header, data in _members(source, manifest):
        pending.append((header, data))
        size, total = size + len(data), total + len(data)
        if size >= _STAGED:
            _store(vault, pending)
            size = 0
    _store(vault, pending)
    faults.reach("import.stored")
    _enter(vault, manifest)
    faults.reach("import.catalogued")
    names = tuple(row["name"] for row in manifest["names"])
    sessions = tuple(one["id"] for one in manifest["sessions"])
    return Bundle(names, sessions, len(manifest["chunks"]), total)


def has_sessions(source: Path) -> bool:
    """Whether a bundle holds sessions, as its manifest says; unchecked.  Raises StoreError."""
    return bool(_read(source)[2].get("sessions"))


def _read(source: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The manifest's envelope, its text, and what that says."""
    try:
        with tarfile.open(source, "r|") as tar:
            first = tar.next()
            if first is None or first.name != _MANIFEST or first.size > _MOST:
                raise StoreError(f"{source} is not a bundle of ForkServe")
            file = tar.extractfile(first)
            outer: dict[str, Any] = json.loads(file.read()) if file is not None else {}
            body: str = outer["manifest"]
            manifest: dict[str, Any] = json.loads(body)
            manifest.get("format")
    except OSError as error:
        raise StoreError(f"cannot read {source}: {error}") from error
    except (tarfile.TarError, ValueError, LookupError, TypeError, AttributeError, EOFError) as e:
        raise StoreError(f"{source} is not a bundle of ForkServe, or is cut off: {e}") from None
    return outer, body, manifest


def _check(vault: Vault, source: Path, progress: Progress | None) -> dict[str, Any]:
    outer, body, manifest = _read(source)
    if outer.get("hash") != _hash(body, vault.sealer):
        raise StoreError(f"{source}: the manifest was changed, or made with another key")
    if manifest.get("format") not in _FORMATS:
        raise StoreError(f"{source} has format {manifest.get('format')}; 1 and 2 are known")
    manifest.setdefault("sessions", [])
    if manifest["sessions"] and vault.catalog.role != "owner":
        raise StoreError(
            f"{source} holds sessions, which only the owner of a store takes in: end the engine "
            "that uses it, and open it with role='owner'"
        )
    try:
        json.dumps(manifest, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
        _Manifest.model_validate(manifest)
        for row in manifest["names"]:
            _check_name(vault, row)
        for one in manifest["sessions"]:
            check_session(vault.catalog, one, vault.sealer)
        if len({one["id"] for one in manifest["sessions"]}) < len(manifest["sessions"]):
            raise StoreError(f"{source} holds a session twice")
    except ValueError as error:  # of pydantic, and of text that is no base64 or no UTF-8
        why = str(error).replace("\n", " ")
        raise StoreError(f"{source}: the manifest makes no sense: {why[:300]}") from None
    count = len(manifest["chunks"])
    for number, _ in enumerate(_members(source, manifest)):
        if progress is not None:
            progress(number + 1, count)
    return manifest


def _members(source: Path, manifest: dict[str, Any]) -> Iterator[tuple[Header, bytes]]:
    """The chunks, each verified, in the manifest's order; anything else in the file is an error."""
    wanted = iter(manifest["chunks"])
    try:
        with tarfile.open(source, "r|") as tar:
            for info in tar:
                if info.name == _MANIFEST:
                    continue
                chunk = next(wanted, None)
                file = tar.extractfile(info) if info.isreg() else None
                if chunk is None or info.name != f"{chunk['content']}.kv" or file is None:
                    raise StoreError(f"{source} holds '{info.name}', which its manifest does not")
                data = file.read()
                header = parse_header(data, len(data))
                check_payload(header, memoryview(data)[header.length :])
                if header.content != chunk["content"]:
                    raise ChunkFault("name", f"{info.name} holds another chunk")
                yield header, data
    except ChunkFault as fault:
        raise StoreError(f"{source} was changed: {fault}") from None
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"{source} is cut off or was changed: {error}") from None
    if next(wanted, None) is not None:
        raise StoreError(f"{source} is cut off: it lacks chunks of its manifest")


def _check_name(vault: Vault, row: dict[str, Any]) -> None:
    """The text of a name must give its chain, and no name may change its meaning here."""
    require_name(row["name"])
    parse_fingerprint(row["fingerprint"])
    if vault.sealer is None:
        ids, salt = base64.b64decode(row["ids"]), base64.b64decode(row["salt"]).decode()
        tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        links = [link.id.hex() for link in plan_chain(tokens, salt)]
        fits = len(tokens) == row["tokens"] and row["root"] == root_id(salt).hex()
        if not fits or (row["chain"] and row["chain"] not in links):
            raise StoreError(f"the text of '{row['name']}' does not give its chain")
    here = vault.catalog.read("SELECT root, tokens FROM name WHERE name = ?", (row["name"],))
    if here and _text(vault, row["name"]) != _plain(vault, row):
        raise StoreError(f"the name '{row['name']}' is taken here by another state")


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


def _store(vault: Vault, pending: list[tuple[Header, bytes]]) -> None:
    vault.adopt([(header, (data,)) for header, data in pending])
    pending.clear()


def _enter(vault: Vault, manifest: dict[str, Any]) -> None:
    """All names and sessions in one transaction; one that is there already stays."""
    catalog = vault.catalog
    with catalog.write(owned=bool(manifest["sessions"])) as db:
        for one in manifest["sessions"]:
            if check_session(catalog, one, vault.sealer):
                enter_session(catalog, db, one)
        for row in manifest["names"]:
            made = parse_fingerprint(row["fingerprint"])
            values = {**row, **{blob: base64.b64decode(row[blob]) for blob in _BLOBS}}
            which = catalog.fingerprint(db, Fingerprint(made.digest, made.text))
            columns = (*_COLUMNS, *_BLOBS)
            db.execute(
                f"INSERT OR IGNORE INTO name ({', '.join(columns)}, fingerprint)"
                f" VALUES ({', '.join('?' * (len(columns) + 1))})",
                (*(values[c] for c in columns), which),
            )
        faults.reach("import.entered")
