"""Golden vectors, and what must and must not change an id."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.identity import (
    Link,
    chunk_id,
    digest,
    exact_of,
    fingerprint,
    lossy_of,
    parse_fingerprint,
    plan_chain,
    root_id,
    token_bytes,
    weights_id,
)
from forkserve.store.records import NameRecord

FIELDS: dict[str, Any] = {
    "weights": "blake3:" + "0" * 64,
    "architecture": "llama",
    "config": {"layers": 2, "heads": 4, "eps": 1e-5, "tied": True},
    "layout": {"order": "layer,kv,head,token,dim", "dtype": "float32", "shape": [2, 2, 2, 8]},
    "kv_dtype": "float32",
    "kv_quantization": "none",
    "rope": {"theta": 10000.0, "rope_type": "default"},
    "adapter": "none",
    "variant": {
        "engine": "torch",
        "version": "2.13.0",
        "kernels": "reference/v1",
        "device": "cpu",
        "determinism": "exact",
    },
}

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


def changed(path: str, value: Any) -> dict[str, Any]:
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in FIELDS.items()}
    *above, last = path.split(".")
    target = out
    for name in above:
        target = target[name]
    target[last] = value
    return out


# Made by this code once; they must never change while FORMAT is 1.
GOLDEN = {
    "root": "7b6b6fb01e69cb09e263163095ba7b08a7ffa82dba33863068a61af451751c25",
    "root-acme": "9c4758baa9bc9cbe3c5baced1a0f3bdd6853fae10089de29a571d8b7e9107e29",
    "chunk": "f35a46e885973d9e4d7ab187616d2021287833f31c146e2fe41b81ac82039dbb",
    "fingerprint": "31f375c313038e3fd10e7ff1a5a19a8370ffaa6d74bd15a6500b5e4160239e75",
}


def test_golden_vectors() -> None:
    assert root_id("").hex() == GOLDEN["root"]
    assert root_id("acme").hex() == GOLDEN["root-acme"]
    assert chunk_id(root_id("acme"), token_bytes(range(16))).hex() == GOLDEN["chunk"]
    assert fingerprint(FIELDS).digest.hex() == GOLDEN["fingerprint"]


def test_no_environment_variable_and_no_process_changes_an_id() -> None:
    code = (
        "from forkserve.store.identity import *\n"
        "print(chunk_id(root_id('acme'), token_bytes(range(16))).hex())"
    )
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == GOLDEN["chunk"]


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_two_lists_of_fields_never_collide(a: list[bytes], b: list[bytes]) -> None:
    assert (digest(b"t", *a) == digest(b"t", *b)) == (a == b)


@given(tokens, st.integers(0, 39), st.integers(1, 5))
def test_an_edit_changes_its_chunk_and_all_after_it(ids: list[int], at: int, size: int) -> None:
    at %= len(ids)
    before = plan_chain(ids, "s", size)
    after = plan_chain([*ids[:at], ids[at] ^ 1, *ids[at + 1 :]], "s", size)
    for number, (x, y) in enumerate(zip(before, after, strict=True)):
        assert (x.id == y.id) == (number < at // size)


@given(tokens, tokens, tokens)
def test_a_suffix_under_two_parents_shares_no_id(a: list[int], b: list[int], c: list[int]) -> None:
    if a != b and len(a) == len(b):
        left = {link.id for link in plan_chain(a + c, "", 1)[len(a) :]}
        right = {link.id for link in plan_chain(b + c, "", 1)[len(b) :]}
        assert not left & right


@given(tokens)
def test_two_salts_share_nothing_and_one_shares_all(ids: list[int]) -> None:
    one, other = plan_chain(ids, "one", 3), plan_chain(ids, "other", 3)
    assert not {link.id for link in one} & {link.id for link in other}
    assert one == plan_chain(ids, "one", 3)


def test_chunk_size_is_part_of_the_chain_and_unfull_chunks_are_left_out() -> None:
    ids = list(range(1000))
    chain = plan_chain(ids, "")
    assert [(link.start, link.count) for link in chain] == [(0, 256), (256, 256), (512, 256)]
    assert chain[0].id != plan_chain(ids, "", 128)[0].id
    assert [link.parent for link in chain] == [root_id(""), chain[0].id, chain[1].id]


@given(st.integers(0, 2**32 - 1 - 600), st.lists(st.integers(0, 2**31 - 1), max_size=600))
def test_a_link_cannot_contradict_itself(start: int, ids: list[int]) -> None:
    raw, parent = token_bytes(ids), root_id("")
    if not ids:
        with pytest.raises(StoreError, match="whole 32-bit token ids"):
            Link(parent, start, raw)
        return
    link = Link(parent, start, raw)
    assert (link.id, link.count) == (chunk_id(parent, raw), len(ids))
    assert link.start + link.count <= 2**32 - 1
    wrong: list[tuple[Any, Any, Any]] = [
        (parent, start, raw[:-1]),
        (parent, start, ids),
        (parent[:-1], start, raw),
        (parent.hex(), start, raw),
        (parent, -1, raw),
        (parent, start + 0.5, raw),
        (parent, True, raw),
        (parent, 2**32 - 1 - len(ids) + 1, raw),
        (parent, start, raw[:-1] + b"\x80"),
    ]
    for fields in wrong:
        with pytest.raises(StoreError):
            Link(*fields)


NAMED = {"name": "n", "session": "s", "node": 0, "tenant": "t", "salt": "", "seed": 1}


@given(st.integers(1, 600), st.booleans())
def test_a_named_state_cannot_contradict_itself(count: int, stored: bool) -> None:
    ids = array("i", range(count))
    chains = [link.id.hex() for link in plan_chain(ids, "")]
    good: dict[str, Any] = {
        **NAMED,
        "tokens": ids,
        "chain": chains[-1] if stored and chains else None,
    }
    NameRecord(**good)
    other = plan_chain(range(1, 257), "")[0].id.hex()
    for change in (
        {"tokens": array("i")},
        {"tokens": ids.tolist()},
        {"tokens": array("i", [*ids, -1])},
        {"tokens": array("q", ids)},
        {"chain": "zz"},
        {"chain": other},
        {"node": -1},
        {"node": None},
        {"seed": "1"},
        {"name": ""},
        *([{"salt": "another"}, {"tokens": ids[:255]}] if good["chain"] else []),
    ):
        with pytest.raises(StoreError):
            NameRecord(**{**good, **change})


def test_a_lossy_fingerprint_is_another_and_leads_back() -> None:
    exact = fingerprint(FIELDS)
    lossy = lossy_of(exact)
    assert lossy.digest != exact.digest
    assert (exact.lossy, lossy.lossy) == (False, True)
    assert exact_of(lossy) == exact == exact_of(exact)
    assert lossy_of(lossy) == lossy == parse_fingerprint(lossy.text)
    for value in ("exact", "", 1, True):
        with pytest.raises(StoreError):
            fingerprint(changed("variant.rows", value))


@pytest.mark.parametrize("bad", [[-1], [2**31], ["x"], [1.5]])
def test_impossible_token_ids_are_refused(bad: list[Any]) -> None:
    with pytest.raises(StoreError):
        token_bytes(bad)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("weights", "blake3:" + "1" * 64),
        ("architecture", "qwen3"),
        ("config.layers", 3),
        ("config.eps", 1e-6),
        ("layout.order", "token,layer"),
        ("kv_dtype", "bfloat16"),
        ("kv_quantization", "int8"),
        ("rope.theta", 1e6),
        ("rope.factor", 2.0),
        ("adapter", {"id": "blake3:" + "a" * 64, "scale": 1.0}),
        ("variant.engine", "native"),
        ("variant.version", "2.13.1"),
        ("variant.kernels", "reference/v2"),
        ("variant.device", "cuda:sm90"),
        ("variant.determinism", "numeric"),
    ],
)
def test_every_field_changes_the_fingerprint(path: str, value: Any) -> None:
    assert fingerprint(changed(path, value)).digest != fingerprint(FIELDS).digest


def test_an_adapters_scale_counts() -> None:
    one, two = ({"id": "blake3:aa", "scale": scale} for scale in (1.0, 0.5))
    assert (
        fingerprint(changed("adapter", one)).digest != fingerprint(changed("adapter", two)).digest
    )


def test_order_of_fields_does_not_count_and_json_round_trips() -> None:
    turned = dict(reversed(FIELDS.items()))
    made = fingerprint(turned)
    assert made == fingerprint(FIELDS)
    assert parse_fingerprint(made.text) == made
    assert made.layout == FIELDS["layout"]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("weights", "auto", "what it really is"),
        ("weights", None, "NoneType"),
        ("kv_dtype", "", "what it really is"),
        ("kv_dtype", "auto", "what it really is"),
        ("config.layers", None, "what it really is"),
        ("config.eps", float("nan"), "nan"),
        ("layout.shape", ["any"], "what it really is"),
        ("variant.determinism", "mostly", "not known"),
        ("variant.extra", 1, "unknown: extra"),
        ("speed", "fast", "unknown: speed"),
        ("adapter", {"id": "x"}, "missing: scale"),
        ("adapter", 7, "is a int"),
    ],
)
def test_unknown_and_vague_values_are_errors(path: str, value: Any, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        fingerprint(changed(path, value))


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_an_error(name: str) -> None:
    with pytest.raises(StoreError, match=f"missing: {name}"):
        fingerprint({k: v for k, v in FIELDS.items() if k != name})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format":2}', '{"format":1}', '{"format": 1}'])
def test_text_that_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(StoreError):
        parse_fingerprint(text)


class Cache(dict[tuple[str, int, int, int], str]):
    asked = 0

    def get_digest(self, key: tuple[str, int, int, int]) -> str | None:
        self.asked += 1
        return self.get(key)

    def put_digest(self, key: tuple[str, int, int, int], hexdigest: str) -> None:
        self[key] = hexdigest


def test_weights_are_hashed_once_and_verify_sees_through_an_equal_stat(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 10_000)
    cache = Cache()
    first = weights_id([path], cache)
    assert weights_id([path], cache) == first
    assert len(cache) == 1
    before = path.stat()
    with path.open("r+b") as file:  # same size, and the same time put back
        file.write(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_id([path], cache) == first
    assert weights_id([path], cache, verify=True) != first
    assert weights_id([path], cache) != first, "verify refreshes the cache"


def test_a_store_can_be_told_to_verify_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    stat = path.stat()

    def made(**options: Any) -> bytes:
        with Store(tmp_path / "states", **options) as store:
            return store.identify(lambda weights: {**FIELDS, "weights": weights([path])}).digest

    first = made()
    with path.open("r+b") as file:
        file.write(b"\1")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert made() == first, "size, time and inode are the same"
    assert made(verify_weights=True) != first


def test_weights_are_their_bytes_not_their_name_or_order(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "1").write_bytes(b"one")
    (tmp_path / "a" / "2").write_bytes(b"two")
    (tmp_path / "b" / "x").write_bytes(b"two")
    (tmp_path / "b" / "y").write_bytes(b"one")
    left = weights_id([tmp_path / "a" / "1", tmp_path / "a" / "2"])
    assert left == weights_id([tmp_path / "b" / "x", tmp_path / "b" / "y"])
    assert left != weights_id([tmp_path / "a" / "1"])


def test_weights_without_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="without a file"):
        weights_id([])
    with pytest.raises(StoreError, match="cannot read"):
        weights_id([tmp_path / "missing"])
