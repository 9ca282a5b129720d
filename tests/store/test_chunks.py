"""The chunk file: every byte counts, and every kind of damage has its name."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forkserve.errors import ConfigError, MissingExtra, StoreError
from forkserve.store.chunks import (
    ChunkFault,
    Header,
    build,
    check_link,
    check_payload,
    hash_parts,
    parse_header,
)
from forkserve.store.codecs import decode, encode, require
from forkserve.store.identity import Link, fingerprint, plan_chain
from forkserve.store.seal import Sealer, load_key

from .test_identity import FIELDS

PRINT = fingerprint(FIELDS)
PAYLOAD = bytes(range(256)) * 5


def link(tokens: range = range(8), salt: str = "") -> Link:
    return plan_chain(tokens, salt, len(tokens))[0]


def chunk(payload: bytes = PAYLOAD, of: Link | None = None, **changes: Any) -> tuple[Header, bytes]:
    of = of or link()
    fields: dict[str, Any] = {
        "fingerprint": PRINT.digest,
        "meta": PRINT.text,
        "parent": of.parent,
        "chain": of.id,
        "start": of.start,
        "count": of.count,
        "tokens": of.tokens,
        "format": "raw",
        "stored_bytes": len(payload),
        "raw_bytes": len(payload),
        "payload_hash": hash_parts([payload]),
        **changes,
    }
    header, raw = build(Header(**fields))
    return header, raw + payload


def fault(data: bytes, size: int | None = None) -> str:
    """The kind of fault that reading the file meets, or "" if there is none."""
    try:
        header = parse_header(data, len(data) if size is None else size)
        check_payload(header, data[header.length :])
        check_link(header, link(), PRINT.digest)
    except ChunkFault as found:
        return found.kind
    return ""


def test_a_chunk_says_everything_about_itself() -> None:
    header, data = chunk()
    assert parse_header(data, len(data)) == header
    assert header.file_bytes == len(data)
    assert header.length % 64 == 0
    assert header.layout == FIELDS["layout"]
    assert fault(data) == ""


def test_golden_content_id() -> None:
    assert chunk()[0].content == "6771ffc1619ae4147ec2d1861794dd1c5f301a8a6a2812d9b5e3b6bc01f5423f"


def test_every_single_flipped_bit_is_found() -> None:
    header, data = chunk()
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << at % 8
        kind = fault(bytes(spoilt))
        assert kind, f"byte {at} of {len(data)} (header {header.length})"


@given(st.integers(0, 4000))
def test_cut_or_padded_files_are_found(size: int) -> None:
    data = chunk()[1]
    if size == len(data):
        return
    other = (data + bytes(4000))[:size]
    assert fault(other) in ("truncated", "padded")


def test_another_chunk_under_this_name_is_found() -> None:
    assert fault(chunk(of=link(salt="other"))[1]) == "name"
    assert fault(chunk(of=link(range(1, 9)))[1]) == "name"


def test_tokens_that_do_not_give_the_chain_id_are_found() -> None:
    other = link(range(1, 9))
    with pytest.raises(ChunkFault, match="chain"):
        parse_header(chunk(tokens=other.tokens)[1])


def test_a_collision_is_refused_by_the_tokens() -> None:
    header = chunk()[0]
    of = link()
    forged = link(range(1, 9))
    for name in ("id", "parent", "start"):  # as if two texts had one hash
        object.__setattr__(forged, name, getattr(of, name))
    with pytest.raises(ChunkFault, match="collision"):
        check_link(header, forged, PRINT.digest)


def test_another_fingerprint_is_a_miss_not_damage() -> None:
    with pytest.raises(ChunkFault) as found:
        check_link(chunk()[0], link(), bytes(32))
    assert found.value.kind == "identity"
    assert not found.value.damaged


def test_a_newer_version_and_an_unknown_format_are_misses() -> None:
    data = bytearray(chunk()[1])
    data[8] = 2
    with pytest.raises(ChunkFault, match="this version reads 1") as found:
        parse_header(bytes(data))
    assert not found.value.damaged
    with pytest.raises(ChunkFault, match="'fp3' is not known") as found:
        parse_header(chunk(format="fp3")[1])
    assert not found.value.damaged


def test_a_header_whose_fingerprint_belongs_to_other_fields_is_damaged() -> None:
    other = fingerprint({**FIELDS, "kv_dtype": "bfloat16"})
    with pytest.raises(ChunkFault, match="does not match its fields"):
        parse_header(chunk(meta=other.text)[1])


# -------------------------------------------------------------------- formats

LAYOUT = {"dtype": "float32", "vector": 8}


@given(st.binary(max_size=4096))
def test_lossless_formats_give_the_bytes_back(raw: bytes) -> None:
    pytest.importorskip("zstandard")
    for form in ("raw", "zstd"):
        stored = encode(form, raw, LAYOUT)
        assert bytes(decode(form, bytes(stored), len(raw), LAYOUT)) == raw


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_int8_stays_within_half_a_step_of_each_vector(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(30, 8)) * 10.0 ** rng.integers(-3, 3, (30, 1))
    values[3] = 0
    if kind == "bfloat16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = values.astype(kind).tobytes()
    layout = {"dtype": kind, "vector": 8}
    back = decode("int8", bytes(encode("int8", raw, layout)), len(raw), layout)
    was, now = _floats(raw, kind), _floats(bytes(back), kind)
    step = np.abs(was).max(1, keepdims=True) / 127
    slack = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[kind] * np.abs(was).max(1)[:, None]
    assert (np.abs(was - now) <= step / 2 + slack + 1e-7).all()


def _floats(raw: bytes, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(-1, 8)
    return np.frombuffer(raw, kind).astype(np.float32).reshape(-1, 8)


def test_formats_refuse_what_they_cannot_hold() -> None:
    pytest.importorskip("zstandard")
    with pytest.raises(StoreError, match="int8 needs"):
        encode("int8", b"\0" * 16, {"dtype": "uint64", "vector": 2})
    with pytest.raises(StoreError, match="not finite"):
        encode("int8", np.full(8, np.inf, np.float32).tobytes(), LAYOUT)
    with pytest.raises(StoreError, match="not known"):
        require("fp3")
    for form in ("zstd", "int8"):
        stored = bytearray(encode(form, bytes(320), LAYOUT))
        for bad in (stored[:5], stored + b"x", b""):
            with pytest.raises(ChunkFault):
                bytes(decode(form, bytes(bad), 319 if bad == stored + b"x" else 320, LAYOUT))
    with pytest.raises(ChunkFault, match="expected"):
        decode("raw", b"abc", 4, LAYOUT)


# -------------------------------------------------------------------- sealing


def test_a_sealed_piece_opens_with_its_key_at_its_place_only() -> None:
    pytest.importorskip("cryptography")
    one, other = Sealer(bytes(32)), Sealer(b"k" * 32)
    sealed = one.seal(b"the prompt", b"place")
    assert b"the prompt" not in sealed
    assert sealed == one.seal(b"the prompt", b"place"), "equal rows are equal chunks"
    others = [one.seal(b"the prompT", b"place"), one.seal(b"the prompt", b"placE")]
    others.append(other.seal(b"the prompt", b"place"))
    assert len({piece[:28] for piece in [sealed, *others]}) == 4, "no nonce serves two texts"
    assert one.unseal(sealed, b"place") == b"the prompt"
    assert one.key_id != other.key_id
    for sealer, data, place in (
        (other, sealed, b"place"),
        (one, sealed, b"other"),
        (one, sealed[:-1], b"place"),
        (one, sealed[:5], b"place"),
    ):
        with pytest.raises(ChunkFault, match="key"):
            sealer.unseal(data, place)


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * 32 + "\n")
    assert load_key(str(path)) == b"\xab" * 32
    monkeypatch.setenv("STORE_KEY", "cd" * 32)
    assert load_key("env:STORE_KEY") == b"\xcd" * 32
    path.write_text("ab")
    for source in (str(path), str(tmp_path / "none"), "env:NO_SUCH_KEY"):
        with pytest.raises(ConfigError):
            load_key(source)
    with pytest.raises(ConfigError, match="32 bytes"):
        Sealer(b"short")


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "cryptography.exceptions", "obstore"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[store\]"):
        require("zstd")
    with pytest.raises(MissingExtra, match=r"pip install .*\[store\]"):
        Sealer(bytes(32))
    from forkserve.store.depots.s3 import S3Depot

    with pytest.raises(MissingExtra, match=r"pip install .*\[s3\]"):
        S3Depot("bucket")
