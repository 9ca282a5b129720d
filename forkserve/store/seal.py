"""Authenticated encryption of what a prompt could be read from: token ids and KV payloads.

AES-256-GCM from the library `cryptography`.  Each sealed piece has a key and a nonce of its own,
made from a keyed hash of its place and its plain bytes (a synthetic initialisation vector, the idea
of RFC 5297): a nonce comes twice under one key only where the very same bytes are sealed for the
same place, and then the result is the same as well.  So two writers of equal rows write the same
chunk, and chunks that differ are rows that differ.  What shows is that a place holds the same bytes
as before; of a chunk its chain id says that anyway.  A piece is bound to its place by associated
data: moved elsewhere, it does not open.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from forkserve.errors import ConfigError, MissingExtra
from forkserve.store.chunks import Buffer, ChunkFault
from forkserve.store.pace import PIECE, paced, pieces

__all__ = ["Sealer", "load_key"]

_SALT, _NONCE, _TAG = 16, 12, 16
_CONTEXT = "forkserve/store 2026-11 seal key"


class Sealer:
    """Seals and opens pieces with one key of 32 bytes.  Raises MissingExtra without the library."""

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ConfigError(f"an encryption key has 32 bytes, not {len(key)}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise MissingExtra("Store encryption", "store", "cryptography") from error
        self._cipher: Any = AESGCM
        self._stream: Callable[[bytes, bytes], Any] = lambda key, nonce: Cipher(
            algorithms.AES(key), modes.GCM(nonce)
        ).encryptor()
        self._opening: Callable[[bytes, bytes, bytes], Any] = lambda key, nonce, tag: Cipher(
            algorithms.AES(key), modes.GCM(nonce, tag)
        ).decryptor()
        self._invalid: type[Exception] = InvalidTag
        self._key = blake3(key, derive_key_context=_CONTEXT).digest()
        self._iv_key = blake3(self._key, derive_key_context=_CONTEXT + " iv").digest()
        self.key_id = blake3(self._key, derive_key_context=_CONTEXT + " id").digest()[:8]

    def seal(self, plain: Buffer, place: bytes) -> bytes:
        """salt | nonce | ciphertext and tag; equal for equal arguments.

        `place` must be given again to open it.
        """
        salt, nonce = self._synthetic(plain, place)
        stream = self._stream(self._derive(salt), nonce)
        stream.authenticate_additional_data(place)
        body = [stream.update(piece) for piece in pieces(plain)]
        return b"".join([salt, nonce, *body, stream.finalize(), stream.tag])

    def unseal(self, sealed: Buffer, place: bytes) -> bytes:
        """The plain bytes.  Raises ChunkFault ("key") if key, place or bytes are not the same."""
        view = memoryview(sealed)
        head = bytes(view[: _SALT + _NONCE])
        key, nonce, body = self._derive(head[:_SALT]), head[_SALT:], view[_SALT + _NONCE :]
        try:
            if paced() and len(body) > PIECE:
                return self._in_pieces(key, nonce, body, place)
            plain: bytes = self._cipher(key).decrypt(nonce, bytes(body), place)
        except (self._invalid, ValueError):
            raise ChunkFault("key", "a sealed piece does not open with this key") from None
        return plain

    def _in_pieces(self, key: bytes, nonce: bytes, body: memoryview, place: bytes) -> bytes:
        """Decrypt and rest between; nothing is given out before the tag has been checked."""
        stream = self._opening(key, nonce, bytes(body[-_TAG:]))
        stream.authenticate_additional_data(place)
        plain = [stream.update(piece) for piece in pieces(body[:-_TAG])]
        return b"".join([*plain, stream.finalize()])

    def sign(self, data: bytes) -> str:
        """A keyed hash of `data`, in hex."""
        return blake3(
            data, key=blake3(self._key, derive_key_context=_CONTEXT + " mac").digest()
        ).hexdigest()

    def _synthetic(self, plain: Buffer, place: bytes) -> tuple[bytes, bytes]:
        """Salt and nonce from the place, with its length before it, and the plain bytes."""
        state = blake3(len(place).to_bytes(8, "little") + place, key=self._iv_key)
        for piece in pieces(plain):
            state.update(piece)
        made = state.digest(_SALT + _NONCE)
        return made[:_SALT], made[_SALT:]

    def _derive(self, salt: bytes) -> bytes:
        return blake3(salt, key=self._key).digest()


def load_key(source: str) -> bytes:
    """A key of 64 hex digits from "env:NAME" or from a file.  Raises ConfigError."""
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ConfigError(f"encrypt={source!r} must name a key file, or be 'env:NAME'")
    source = os.fspath(source)
    if source.startswith("env:"):
        text = os.environ.get(source[4:], "")
        if not text:
            raise ConfigError(f"the environment has no key in {source[4:]}")
    else:
        try:
            text = Path(source).expanduser().read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {source}: {error}") from error
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"the key in {source} is not 64 hex digits")
    return key
