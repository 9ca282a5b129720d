"""One chunk is one self-describing file.

::

    offset  size  field (little-endian)
    0       8     magic "FSKVCHNK"
    8       2     version of this layout
    10      1     byte order of the payload's elements, "l"
    11      1     flags: 1 = tokens and payload are sealed (`forkserve.store.seal`)
    12      4     header length: everything before the payload, a multiple of 64
    16      8     payload bytes in the file
    24      8     payload bytes once decoded
    32      4+4   first position, token count
    40      4x32  fingerprint, parent chain id, own chain id, blake3 of the payload as stored
    168     16    format id, zero-padded: raw, zstd, int8
    184     8     key id of a sealed chunk, else zero
    192     4+4   lengths of the two parts that follow
    200           canonical JSON of the fingerprint, with the layout; then the token ids
    ...           zeros, then blake3 of all the above: the **content id**, and the file's name

The header hash covers the payload's hash, so one name commits to every byte.  The header holds no
clock and no path: two processes that compute the same rows write the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from forkserve.errors import StoreError
from forkserve.store.identity import Link, chunk_id, digest, parse_fingerprint
from forkserve.store.pace import pieces

__all__ = [
    "FORMATS",
    "HEAD",
    "LOSSY",
    "Buffer",
    "ChunkFault",
    "Header",
    "build",
    "check_link",
    "check_payload",
    "hash_parts",
    "parse_header",
]

Buffer = bytes | bytearray | memoryview

_MAGIC = b"FSKVCHNK"
_VERSION = 1
_FIXED = struct.Struct("<8sHBBIQQII32s32s32s32s16s8sII")
_TAG = b"forkserve/store/content/v1"
_ALIGN = 64
_SEALED = 1
HEAD = 1 << 16  # bytes to read for a header: one of 256 tokens has 3 kB
_MOST_HEADER = 1 << 22  # bytes; a header is some kB

FORMATS = ("raw", "zstd", "int8")
LOSSY = frozenset({"int8"})  # never served unless asked for


class ChunkFault(StoreError):
    """A chunk cannot be used.  `kind` is a stable word.

    Damaged (to be quarantined): truncated, padded, magic, header, payload, name, chain.
    Sound but not ours (a plain miss): version, format, key, identity.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{message} [{kind}]")
        self.kind = kind

    @property
    def damaged(self) -> bool:
        return self.kind not in ("version", "format", "key", "identity")


@dataclass(frozen=True, slots=True)
class Header:
    """What a chunk file says about itself.  tokens: sealed when `sealed`."""

    fingerprint: bytes
    meta: str  # canonical JSON of the fingerprint
    parent: bytes
    chain: bytes
    start: int
    count: int
    tokens: bytes
    format: str
    stored_bytes: int
    raw_bytes: int
    payload_hash: bytes
    sealed: bool = False
    key_id: bytes = bytes(8)
    content: str = ""  # hex; known once the header was built or parsed
    length: int = 0  # bytes of the header

    @property
    def file_bytes(self) -> int:
        return self.length + self.stored_bytes

    @property
    def key(self) -> str:
        """Which key opens it, in hex; empty for a chunk that is not sealed."""
        return self.key_id.hex() if self.sealed else ""

    @property
    def layout(self) -> dict[str, Any]:
        return parse_fingerprint(self.meta).layout


def build(header: Header) -> tuple[Header, bytes]:
    """The header's bytes, and the header with `content` and `length` filled in."""
    meta = header.meta.encode()
    body = _FIXED.size + len(meta) + len(header.tokens)
    length = -(-(body + 32) // _ALIGN) * _ALIGN
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        ord("l"),
        _SEALED if header.sealed else 0,
        length,
        header.stored_bytes,
        header.raw_bytes,
        header.start,
        header.count,
        header.fingerprint,
        header.parent,
        header.chain,
        header.payload_hash,
        header.format.encode(),
        header.key_id,
        len(meta),
        len(header.tokens),
    )
    raw = b"".join((fixed, meta, header.tokens, bytes(length - 32 - body)))
    content = digest(_TAG, raw)
    return replace(header, content=content.hex(), length=length), raw + content


def parse_header(data: Buffer, size: int | None = None) -> Header:
    """Read and check a header.  size: length of the whole file, checked when given.

    Raises ChunkFault: the kinds say whether the file is damaged or merely not ours.
    """
    view = memoryview(data)
    if len(view) < _FIXED.size + 32:
        raise ChunkFault("truncated", f"{len(view)} bytes are too few for a chunk header")
    fields = _FIXED.unpack_from(view)
    magic, version, order, flags, length, stored, raw_bytes, start, count = fields[:9]
    fingerprint, parent, chain, payload_hash, form, key_id, meta_len, token_len = fields[9:]
    if magic != _MAGIC:
        raise ChunkFault("magic", "not a chunk file")
    if version > _VERSION:
        raise ChunkFault("version", f"chunk layout {version}; this version reads {_VERSION}")
    if order != ord("l"):
        raise ChunkFault("format", f"byte order {order:#x} is not supported")
    if not _FIXED.size + meta_len + token_len + 32 <= length <= _MOST_HEADER:
        raise ChunkFault("header", f"a header of {length} bytes contradicts itself")
    if len(view) < length:
        raise ChunkFault("truncated", f"{len(view)} of {length} header bytes are there")
    content = bytes(view[length - 32 : length])
    if digest(_TAG, bytes(view[: length - 32])) != content:
        raise ChunkFault("header", "the header does not match its hash")
    if size is not None and size != length + stored:
        kind = "truncated" if size < length + stored else "padded"
        raise ChunkFault(kind, f"the file has {size} bytes, its header says {length + stored}")
    name = form.rstrip(b"\0").decode("ascii", "replace")
    if name not in FORMATS:
        raise ChunkFault("format", f"format '{name}' is not known; {', '.join(FORMATS)} are")
    at = _FIXED.size
    header = Header(
        fingerprint=fingerprint,
        meta=bytes(view[at : at + meta_len]).decode(errors="replace"),
        parent=parent,
        chain=chain,
        start=start,
        count=count,
        tokens=bytes(view[at + meta_len : at + meta_len + token_len]),
        format=name,
        stored_bytes=stored,
        raw_bytes=raw_bytes,
        payload_hash=payload_hash,
        sealed=bool(flags & _SEALED),
        key_id=key_id,
        content=content.hex(),
        length=length,
    )
    if _fingerprint(header.meta) != fingerprint:
        raise ChunkFault("header", "the fingerprint does not match its fields")
    if not count or (not header.sealed and token_len != 4 * count):
        raise ChunkFault("header", f"{token_len} bytes of token ids are not {count} tokens")
    if not header.sealed and chunk_id(parent, header.tokens) != chain:
        raise ChunkFault("chain", "the token ids do not give the chain id")
    return header


def _fingerprint(meta: str) -> bytes:
    """Digest of a fingerprint whose bytes are as they were written: what is not understood here
    is of another version."""
    try:
        return parse_fingerprint(meta).digest
    except StoreError as error:
        raise ChunkFault("version", str(error)) from None


def check_payload(header: Header, payload: Buffer) -> None:
    """Raise ChunkFault unless the stored payload has the header's hash.  Reads every byte."""
    if hash_parts([payload]) != header.payload_hash:
        raise ChunkFault("payload", f"chunk {header.content[:16]} has changed bytes")


def check_link(header: Header, link: Link, fingerprint: bytes, tokens: bytes | None = None) -> None:
    """Raise ChunkFault unless the chunk is the wanted one: ids are compared, not only hashes."""
    if header.fingerprint != fingerprint:
        raise ChunkFault("identity", "the chunk has another fingerprint")
    same = (header.parent, header.chain, header.start, header.count)
    if same != (link.parent, link.id, link.start, link.count):
        raise ChunkFault("name", "the file holds another chunk than its name says")
    if (header.tokens if tokens is None else tokens) != link.tokens:
        raise ChunkFault("name", "equal chain ids over different tokens: a collision")


def hash_parts(parts: Sequence[Buffer]) -> bytes:
    """blake3 of buffers in order."""
    state = blake3()
    for part in parts:
        for piece in pieces(part):
            state.update(piece)
    return state.digest()
