"""The three identities of a stored piece of KV, never merged.

* **causal**: which prefix.  A blake3-256 chain over tagged, length-prefixed fields::

      root  = H(root tag,  salt)
      chunk = H(chunk tag, parent, token count, token ids, "")

  The ids are the whole input: a text-only model.  The last field is empty, and stands where hashes
  would go of what ids do not say (an image behind a placeholder).

* **compatibility**: whose numbers.  A digest over everything that can change a KV byte or its
  meaning: weights, configuration, layout, dtype, rotary scaling, adapter, execution variant.  What
  an engine keeps that may be given lossy rows has a fingerprint of its own: see `lossy_of`.
* **content**: which bytes.  The header hash of a chunk file (`forkserve.store.chunks`).

A field that is not known is an error.  Nothing here reads the environment or a clock, so two
processes always agree.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from forkserve.errors import StoreError

__all__ = [
    "CHUNK_TOKENS",
    "FORMAT",
    "Fingerprint",
    "Link",
    "StatCache",
    "chunk_id",
    "digest",
    "exact_of",
    "fingerprint",
    "lossy_of",
    "parse_fingerprint",
    "plan_chain",
    "root_id",
    "token_bytes",
    "weights_id",
]

FORMAT = 1  # of the identity scheme; part of every fingerprint
CHUNK_TOKENS = 256  # tokens of one chunk: part of causal identity, independent of the page size
_MOST_TOKENS = 2**32 - 1  # positions are 32-bit numbers in a chunk's header

_ROOT = b"forkserve/store/root/v1"
_CHUNK = b"forkserve/store/chunk/v1"
_FINGERPRINT = b"forkserve/store/fingerprint/v1"
_WEIGHTS = b"forkserve/store/weights/v1"

# Field of a fingerprint -> what it must be.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "weights": str,  # "blake3:<hex>" over all files, or an immutable name such as "mock/v1"
    "architecture": str,
    "config": dict,
    "layout": dict,  # shape and order of one token's rows
    "kv_dtype": str,
    "kv_quantization": str,  # "none" has to be said
    "rope": dict,  # {} for a model without rotary embedding
    "adapter": (str, dict),  # "none", or {"id": digest, "scale": float}
    "variant": dict,
}
_VARIANT = ("engine", "version", "kernels", "device", "determinism")
_ROWS = "rows"  # one more field of the variant, "lossy", or absent
_VAGUE = {"", "auto", "unknown", "any", "*"}


def digest(tag: bytes, *fields: bytes) -> bytes:
    """blake3-256 of a tag and fields, each with its length before it: no two lists collide."""
    state = blake3(len(tag).to_bytes(8, "little") + tag)
    for one in fields:
        state.update(len(one).to_bytes(8, "little"))
        state.update(one)
    return state.digest()


# -------------------------------------------------------------------- causal


@dataclass(frozen=True, slots=True)
class Link:
    """One chunk of a chain: the tokens from position `start` on, after `parent`.

    id and count follow from the rest, so that no two fields can contradict each other.
    Raises StoreError: a parent of other than 32 bytes, tokens that are not `token_bytes` of at
    least one id, positions that 32 bits do not hold.
    """

    parent: bytes
    start: int
    tokens: bytes = field(repr=False)  # little-endian int32, as `token_bytes` makes them
    id: bytes = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", chunk_id(self.parent, self.tokens))
        object.__setattr__(self, "count", len(self.tokens) // 4)
        if not self.tokens[3::4].isascii():  # a high bit in the last byte of an id is its sign
            raise StoreError("a chunk holds a negative token id")
        if type(self.start) is not int or not 0 <= self.start <= _MOST_TOKENS - self.count:
            raise StoreError(f"a chunk cannot begin at position {self.start!r}")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32.  Raises StoreError for an id that does not fit."""
    try:
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise StoreError(f"token ids must be 32-bit integers: {error}") from None
    if ids and min(ids) < 0:
        raise StoreError(f"token id {min(ids)} is negative")
    if sys.byteorder == "big":  # pragma: no cover
        ids = array("i", ids)
        ids.byteswap()
    return ids.tobytes()


def root_id(salt: str) -> bytes:
    """Start of every chain of one salt: equal tokens under two salts share no id.

    Raises StoreError for a salt that UTF-8 cannot hold.
    """
    try:
        return digest(_ROOT, salt.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"the salt {salt!r} is no text: {error}") from None


def chunk_id(parent: bytes, tokens: bytes) -> bytes:
    """Id of the chunk that holds `tokens` (see `token_bytes`) after `parent`.

    Raises StoreError for what is neither.
    """
    if not isinstance(parent, bytes) or len(parent) != 32:
        raise StoreError(f"a parent id is 32 bytes, not {parent!r}")
    if not isinstance(tokens, bytes) or not tokens or len(tokens) % 4:
        raise StoreError(f"a chunk needs the bytes of whole 32-bit token ids, not {tokens!r}")
    return digest(_CHUNK, parent, (len(tokens) // 4).to_bytes(8, "little"), tokens, b"")


def plan_chain(tokens: Sequence[int], salt: str, size: int = CHUNK_TOKENS) -> list[Link]:
    """The full chunks of `tokens`, root first; a rest shorter than `size` is in none."""
    raw = token_bytes(tokens)
    parent, links = root_id(salt), []
    for number in range(len(raw) // 4 // size):
        ids = raw[number * size * 4 : (number + 1) * size * 4]
        link = Link(parent, number * size, ids)
        links.append(link)
        parent = link.id
    return links


# -------------------------------------------------------------------- compatibility


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`digest` names the numbers, `text` is the canonical JSON that it was made from."""

    digest: bytes
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text)
        return loaded

    @property
    def layout(self) -> dict[str, Any]:
        found: dict[str, Any] = self.fields["layout"]
        return found

    @property
    def lossy(self) -> bool:
        """True if rows under this fingerprint may come from a lossy format: see `lossy_of`."""
        return _ROWS in self.fields["variant"]


def fingerprint(fields: Mapping[str, Any]) -> Fingerprint:
    """Check and hash the fields that a backend gave (`Backend.identity`).

    Exactly these: weights, architecture, config, layout, kv_dtype, kv_quantization, rope, adapter,
    and variant with engine, version, kernels, device, determinism (and rows, for `lossy_of`).
    Raises StoreError for one that is missing, unknown, vague ("auto", "", None) or of the wrong
    type.
    """
    _exactly("fingerprint", fields, _FIELDS)
    for name, kind in _FIELDS.items():
        if not isinstance(fields[name], kind):
            raise StoreError(f"fingerprint field '{name}' is a {type(fields[name]).__name__}")
    rows = fields["variant"].get(_ROWS)
    _exactly("fingerprint variant", fields["variant"], (*_VARIANT, *[_ROWS] * (rows is not None)))
    if rows not in (None, "lossy"):
        raise StoreError(f"rows '{rows}' are not known: lossy, or nothing for exact ones")
    if fields["variant"]["determinism"] not in ("exact", "numeric"):
        raise StoreError(
            f"determinism '{fields['variant']['determinism']}' is not known; exact and numeric are"
        )
    if isinstance(fields["adapter"], dict):
        _exactly("fingerprint adapter", fields["adapter"], ("id", "scale"))
    for name, value in fields.items():
        _plain(name, value)
    text = json.dumps({"format": FORMAT, **fields}, sort_keys=True, separators=(",", ":"))
    return Fingerprint(digest(_FINGERPRINT, text.encode()), text)


def parse_fingerprint(text: str) -> Fingerprint:
    """The fingerprint that canonical JSON stands for.  Raises StoreError if it is not canonical."""
    try:
        fields = json.loads(text)
        version = fields.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StoreError(f"not a fingerprint: {error}") from None
    if version != FORMAT:
        raise StoreError(f"fingerprint of format {version}; this version reads {FORMAT}")
    made = fingerprint(fields)
    if made.text != text:
        raise StoreError("a fingerprint is not in canonical form")
    return made


def lossy_of(made: Fingerprint) -> Fingerprint:
    """The fingerprint of all that an engine keeps which may be given rows of a lossy format.

    Rows that came from such a format look like any others in their pages, and what is computed over
    them differs as well.  So everything that such an engine publishes has this name: an engine that
    is to be exact never looks there.
    """
    return _with_variant(made, {**made.fields["variant"], _ROWS: "lossy"})


def exact_of(made: Fingerprint) -> Fingerprint:
    """The fingerprint of exact rows of the same model: `made` itself, unless it is lossy."""
    variant = made.fields["variant"]
    variant.pop(_ROWS, None)
    return _with_variant(made, variant)


def _with_variant(made: Fingerprint, variant: Mapping[str, Any]) -> Fingerprint:
    fields = {**made.fields, "variant": variant}
    del fields["format"]
    return fingerprint(fields)


def _exactly(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown, missing = set(given) - set(known), set(known) - set(given)
    if unknown or missing:
        parts = [f"unknown: {', '.join(sorted(unknown))}"] if unknown else []
        parts += [f"missing: {', '.join(sorted(missing))}"] if missing else []
        raise StoreError(f"{what} has wrong fields ({'; '.join(parts)})")


def _plain(name: str, value: Any) -> None:
    """Only values with one canonical JSON form, and none that means 'whatever'."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise StoreError(f"fingerprint field '{name}' has the key {key!r}")
            _plain(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _plain(f"{name}[{number}]", inner)
    elif isinstance(value, float):
        if not isfinite(value):
            raise StoreError(f"fingerprint field '{name}' is {value}")
    elif isinstance(value, str):
        if value.strip().lower() in _VAGUE:
            raise StoreError(f"fingerprint field '{name}' is {value!r}: say what it really is")
    elif not isinstance(value, (bool, int)):
        raise StoreError(f"fingerprint field '{name}' is {value!r}: say what it really is")


# -------------------------------------------------------------------- weights


class StatCache(Protocol):
    """Remembers file digests by (path, size, mtime_ns, inode)."""

    def get_digest(self, key: tuple[str, int, int, int]) -> str | None:
        """The hex digest noted for the key, if any."""
        ...

    def put_digest(self, key: tuple[str, int, int, int], hexdigest: str) -> None:
        """Note a digest; one entry per path."""
        ...


def weights_id(files: Sequence[Path], cache: StatCache | None = None, verify: bool = False) -> str:
    """Identity of weights that lie in `files`: "blake3:<hex>".

    Order and names don't count, bytes do.  A file is hashed once per (path, size, mtime, inode)
    when a cache is given; `verify` hashes again whatever the cache says.  Raises StoreError for an
    unreadable file.
    """
    if not files:
        raise StoreError("weights without a file have no identity")
    return "blake3:" + digest(_WEIGHTS, *sorted(_file(f, cache, verify) for f in files)).hex()


def _file(path: Path, cache: StatCache | None, verify: bool) -> bytes:
    try:
        real = path.resolve(strict=True)
        stat = real.stat()
        key = (str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        known = cache.get_digest(key) if cache is not None and not verify else None
        if known is not None:
            return bytes.fromhex(known)
        found = blake3(max_threads=blake3.AUTO).update_mmap(real).digest()
    except OSError as error:
        raise StoreError(f"cannot read the weights {path}: {error}") from error
    if cache is not None:
        cache.put_digest(key, found.hex())
    return found
