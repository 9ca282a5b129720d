"""Named states and whole sessions as one file: a tar, a manifest first, then the chunks it lists.

Everything is checked before anything is stored: the manifest against its hash, each chunk against
its content id, each name and each node of a session against the chain that its tokens give.  With
an encrypted store the hash of the manifest is keyed, so that only a holder of the key can make a
bundle that is accepted.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict

from forkserve.errors import StoreError
from forkserve.store import faults
from forkserve.store.bills import BillOf, bill_rows, enter_bills
from forkserve.store.chunks import ChunkFault, Header, check_payload, parse_header
from forkserve.store.seal import Sealer
from forkserve.store.travel import (
    STRICT,
    Hex,
    SessionOf,
    Small,
    check_session,
    enter_session,
    renamed,
    session_rows,
)
from forkserve.store.travel_names import NameOf, check_name, enter_name, name_row
from forkserve.store.vault import Vault
from forkserve.values import identifier

__all__ = ["Bundle", "export_bundle", "has_sessions", "import_bundle"]

# 2: with sessions, which a reader of 1 would leave out without a word.  3: their decisions, bills.
_FORMATS = (1, 2, 3)
_MANIFEST = "forkserve-bundle.json"
_MOST = 256 << 20  # bytes of a manifest
_STAGED = 64 << 20
# What a file that is no manifest gives; RecursionError: lists in lists in lists.
_NONSENSE = (
    tarfile.TarError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    RecursionError,
)
Progress = Callable[[int, int], None]


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
    *,
    overwrite: bool = False,
) -> Bundle:
    """Write named states and sessions (default: all named states) with their chunks to a file.

    A session goes with its tree and commits, and with those rows that were published.  The file
    appears whole or not at all; overwrite: in place of one that is there.  Raises StoreError
    (unknown name or session, a file that is there, a chunk that is damaged or not readable, more
    text than a bundle holds), OSError.
    """
    if not target.parent.is_dir():
        raise StoreError(f"there is no directory {target.parent} to write {target.name} to")
    _check_target(target, overwrite)
    chosen, whole = list(dict.fromkeys(names)), list(dict.fromkeys(sessions))
    if not chosen and not whole:
        chosen = [str(r[0]) for r in vault.catalog.read("SELECT name FROM name")]
    if not chosen and not whole:
        raise StoreError("the store has no named state to export")
    rows = [name_row(vault, name) for name in chosen]
    trees = [session_rows(vault.catalog, session, vault.sealer) for session in whole]
    ends = [row["chain"] for row in rows] + [n["chain"] for tree in trees for n in tree["node"]]
    chunks = _chunks(vault, [chain for chain in dict.fromkeys(ends) if chain])
    manifest: dict[str, Any] = {"format": 3 if trees else 1, "names": rows, "chunks": chunks}
    if trees:
        manifest["sessions"] = trees
        tenants = list(dict.fromkeys(tree["tenant"] for tree in trees))
        manifest["bills"] = bill_rows(vault.catalog, tenants)
    raw = _signed(manifest, vault.sealer)
    if len(raw) > _MOST:
        raise StoreError(
            f"the text of these {len(chosen)} states and {len(whole)} sessions takes {len(raw)} "
            f"bytes, more than the {_MOST} that a bundle holds: export fewer at a time"
        )
    temp = target.with_name(f".{target.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
    total = 0
    try:
        with vault.pace.beside(), temp.open("xb") as file:
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
        _check_target(target, overwrite)  # it may have come meanwhile
        os.replace(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    return Bundle(tuple(chosen), tuple(whole), len(chunks), total)


def _check_target(target: Path, overwrite: bool) -> None:
    if os.path.lexists(target) and not overwrite:
        raise StoreError(
            f"{target} exists and was left as it is: give another file, or overwrite=True"
        )


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
            try:
                blob = vault.depots[place].open(chunk["content"])
            except FileNotFoundError:
                continue  # another process has collected it
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


class _ChunkOf(BaseModel):
    model_config = STRICT
    content: Hex
    bytes: Small
    places: list[str]


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    names: list[NameOf]
    sessions: list[SessionOf] = []
    bills: list[BillOf] = []
    chunks: list[_ChunkOf]


def import_bundle(
    vault: Vault,
    source: Path,
    progress: Progress | None = None,
    *,
    as_session: str | None = None,
) -> Bundle:
    """Check a whole bundle, then take its chunks, names and sessions in.

    A session is taken in by the owner of the store alone.  as_session: the id that it gets here, if
    the bundle holds exactly one; its names then stand for nodes of that.  Raises StoreError for a
    file that is no bundle, was changed, was cut off, or holds a name or a session that is taken
    here for another text, OSError when the disk fails (nothing of it is visible then), ConfigError
    for what is no id.
    """
    if as_session is not None:
        identifier("as_session", as_session)
    manifest = _check(vault, source, progress, as_session)
    faults.reach("import.checked")
    pending: list[tuple[Header, bytes]] = []
    size = total = 0
    with vault.pace.beside():
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
    except _NONSENSE as e:
        raise StoreError(f"{source} is not a bundle of ForkServe, or is cut off: {e}") from None
    return outer, body, manifest


def _check(
    vault: Vault, source: Path, progress: Progress | None, as_session: str | None
) -> dict[str, Any]:
    outer, body, manifest = _read(source)
    if outer.get("hash") != _hash(body, vault.sealer):
        raise StoreError(f"{source}: the manifest was changed, or made with another key")
    if manifest.get("format") not in _FORMATS:
        raise StoreError(
            f"{source} has format {manifest.get('format')!r}, this version of ForkServe knows 1 to "
            f"{_FORMATS[-1]}; use the one that made it"
        )
    manifest.setdefault("sessions", [])
    manifest.setdefault("bills", [])
    if manifest["sessions"] and vault.catalog.role != "owner":
        raise StoreError(
            f"{source} holds sessions, which only the owner of a store takes in: end the engine "
            "that uses it, and open it with role='owner'"
        )
    try:
        json.dumps(manifest, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
        _Manifest.model_validate(manifest)
        for one in manifest["sessions"]:
            one.setdefault("decision", [])
        if as_session is not None:
            _rename(manifest, source, as_session, vault.sealer)
        for row in manifest["names"]:
            check_name(vault, row)
        for one in manifest["sessions"]:
            check_session(vault.catalog, one, vault.sealer)
        if len({one["id"] for one in manifest["sessions"]}) < len(manifest["sessions"]):
            raise StoreError(f"{source} holds a session twice")
        bills = {(bill["tenant"], bill["store"]) for bill in manifest["bills"]}
        strange = {bill[0] for bill in bills} - {one["tenant"] for one in manifest["sessions"]}
        if strange or len(bills) < len(manifest["bills"]):
            raise StoreError(f"{source} has bills of tenants without a session, or two of one")
    except (ValueError, RecursionError) as error:  # pydantic, base64, UTF-8, lists in lists
        why = str(error).replace("\n", " ")
        raise StoreError(f"{source}: the manifest makes no sense: {why[:300]}") from None
    count = len(manifest["chunks"])
    with vault.pace.beside():
        for number, _ in enumerate(_members(source, manifest)):
            if progress is not None:
                progress(number + 1, count)
    return manifest


def _rename(manifest: dict[str, Any], source: Path, to: str, sealer: Sealer | None) -> None:
    """Give the one session of a manifest another id, and its names as well."""
    if len(manifest["sessions"]) != 1:
        raise StoreError(
            f"{source} holds {len(manifest['sessions'])} sessions, and another id is for exactly "
            "one: export that one alone"
        )
    (one,) = manifest["sessions"]
    for row in manifest["names"]:
        if row["session"] == one["id"]:
            row["session"] = to
    manifest["sessions"] = [renamed(one, to, sealer)]


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
                # A sparse member may claim any length: nothing is read that the file cannot hold.
                if info.issparse() or info.size != chunk["bytes"]:
                    raise StoreError(
                        f"{info.name} in {source} has {info.size} bytes, not the {chunk['bytes']} "
                        "of its manifest"
                    )
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
        enter_bills(catalog, db, manifest["bills"])
        for row in manifest["names"]:
            check_name(vault, row)  # another process may have given it meanwhile
            enter_name(catalog, db, row)
        faults.reach("import.entered")
