"""Payload formats: raw, zstd (lossless), int8 (lossy, opt-in).

A format is an id in the chunk header, never a guess from the bytes.  `encode` and `decode` are
inverse for the lossless ones; int8 keeps every value within half a step of its own vector, a step
being the vector's largest magnitude / 127.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.errors import MissingExtra, StoreError
from forkserve.store.chunks import FORMATS, Buffer, ChunkFault
from forkserve.store.pace import PIECE, breathe

__all__ = ["decode", "encode", "require"]

_SCALES = struct.Struct("<Q")  # number of vectors


def require(form: str) -> None:
    """Raise StoreError for an unknown format, MissingExtra when its library is not installed."""
    if form not in FORMATS:
        raise StoreError(f"chunk format '{form}' is not known; {', '.join(FORMATS)} are")
    if form == "zstd":
        _zstd()


def encode(form: str, raw: Buffer, layout: Mapping[str, Any]) -> Buffer:
    """The stored form of a payload.  StoreError if the layout forbids the format."""
    if form == "raw":
        return raw
    if form == "zstd":
        packer = _zstd().ZstdCompressor(level=3).compressobj(size=len(raw))
        return b"".join([*map(packer.compress, _cut(raw, PIECE)), packer.flush()])
    if form == "int8":
        return _quantise(raw, layout)
    raise StoreError(f"chunk format '{form}' is not known")


def decode(form: str, stored: Buffer, raw_bytes: int, layout: Mapping[str, Any]) -> Buffer:
    """The payload again.  Raises ChunkFault (kind "payload") when it has not `raw_bytes` bytes."""
    if form == "raw":
        out: Buffer = stored
    elif form == "zstd":
        try:
            out = _zstd().ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
        except Exception as error:
            raise ChunkFault("payload", f"zstd: {error}") from None
    elif form == "int8":
        out = _dequantise(stored, layout)
    else:
        raise ChunkFault("format", f"format '{form}' is not known")
    if len(out) != raw_bytes:
        raise ChunkFault("payload", f"{len(out)} bytes decoded, {raw_bytes} expected")
    return out


def _zstd() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise MissingExtra("The zstd chunk format", "store", "zstandard") from error
    return zstandard


def _vectors(layout: Mapping[str, Any]) -> tuple[str, int]:
    """Element type and length of one quantised vector."""
    kind, width = layout.get("dtype"), layout.get("vector")
    if kind not in ("float32", "bfloat16", "float16") or not isinstance(width, int) or width < 1:
        raise StoreError(f"int8 needs a floating-point layout with a vector length, not {layout}")
    return kind, width


def _quantise(raw: Buffer, layout: Mapping[str, Any]) -> bytes:
    kind, width = _vectors(layout)
    scales: list[bytes] = []
    smalls: list[bytes] = []
    vector = width * (4 if kind == "float32" else 2)
    for piece in _cut(raw, max(PIECE // vector, 1) * vector):
        values = _floats(piece, kind).reshape(-1, width)
        if not np.isfinite(values).all():
            raise StoreError("int8 cannot hold values that are not finite")
        scale = (np.abs(values).max(1) / 127).astype(np.float32)
        safe = np.where(scale > 0, scale, 1).astype(np.float32)
        scales.append(scale.tobytes())
        smalls.append(np.rint(values / safe[:, None]).astype(np.int8).tobytes())
    return b"".join([_SCALES.pack(len(raw) // vector), *scales, *smalls])


def _cut(raw: Buffer, step: int) -> Iterator[memoryview]:
    """Always the same pieces, so that equal rows give equal bytes; between two a thread of the
    background rests."""
    view = memoryview(raw).cast("B")
    for at in range(0, len(view), step):
        yield view[at : at + step]
        breathe()


def _dequantise(stored: Buffer, layout: Mapping[str, Any]) -> bytes:
    kind, width = _vectors(layout)
    view = memoryview(stored)
    if len(view) < _SCALES.size:
        raise ChunkFault("payload", "an int8 payload without scales")
    (count,) = _SCALES.unpack_from(view)
    if len(view) != _SCALES.size + count * (4 + width):
        raise ChunkFault("payload", "an int8 payload of the wrong length")
    scale = np.frombuffer(view, np.float32, count, _SCALES.size)
    small = np.frombuffer(view, np.int8, count * width, _SCALES.size + 4 * count)
    values = small.reshape(-1, width).astype(np.float32) * scale[:, None]
    if kind == "float32":
        return values.tobytes()
    if kind == "float16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)  # bfloat16: round to nearest, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _floats(raw: Buffer, kind: str) -> npt.NDArray[np.float32]:
    if kind == "float32":
        return np.frombuffer(raw, np.float32)
    if kind == "float16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
