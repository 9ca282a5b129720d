"""Export and import: to another machine and back, and never a changed byte."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from forkserve.errors import StoreError
from forkserve.store import Store
from forkserve.store.bundle import export_bundle, import_bundle
from forkserve.store.rebuild import verify

from .engines import PROMPT, cold, engine


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two named states of one trunk in a file."""
    eng = engine(tmp_path / "from")
    h = eng.open(PROMPT, session="a")
    eng.publish("a", name="case-17/trunk")
    eng.commit("a", h.tip, PROMPT[:300])
    eng.publish("a", name="case-17/after-triage")
    assert eng.store is not None
    done = export_bundle(eng.store.vault, tmp_path / "bundle")
    assert (len(done.names), done.chunks) == (2, 3)
    eng.shutdown()
    return tmp_path / "bundle"


def test_a_state_travels_to_another_store(tmp_path: Path, bundle: Path) -> None:
    with Store(tmp_path / "to", "owner") as store:
        for _ in range(2):  # a second time changes nothing
            assert len(import_bundle(store.vault, bundle).names) == 2
        eng = engine(store)
        h = eng.restore("case-17/after-triage")
        assert h.cached_tokens == 768
        assert eng.tokens(h.id) == PROMPT + PROMPT[:300]
        assert eng.generate(h.id, 4) == cold(PROMPT + PROMPT[:300], 4)
        assert verify(store.vault).clean
        eng.shutdown()
    assert (bundle.stat().st_mode & 0o077) == 0


def test_every_change_of_a_bundle_is_refused_and_nothing_of_it_is_seen(
    tmp_path: Path, bundle: Path
) -> None:
    good = bundle.read_bytes()
    with Store(tmp_path / "to", "shared") as store:
        for at in [*range(520, len(good) - 10_300, 997), 40_000 % len(good)]:
            data = bytearray(good)
            data[at] ^= 0x10
            bundle.write_bytes(data)
            try:
                import_bundle(store.vault, bundle)
            except StoreError:
                assert store.catalog.read("SELECT 1 FROM part") == []
                assert store.catalog.read("SELECT name FROM name") == []
            else:  # a byte of tar's padding: nothing of ours has changed
                assert not any(store.vault.catalog.read("SELECT 1 FROM name WHERE tokens < 700"))
                for name in ("case-17/trunk", "case-17/after-triage"):
                    with store.catalog.write() as db:
                        db.execute("DELETE FROM name WHERE name = ?", (name,))
                        db.execute("DELETE FROM replica")
        for size in (0, 100, 600, len(good) // 2, len(good) - 11_000):
            bundle.write_bytes(good[:size])
            with pytest.raises(StoreError):
                import_bundle(store.vault, bundle)
        with pytest.raises(StoreError, match="cannot read"):
            import_bundle(store.vault, tmp_path / "missing")


def rewrite(path: Path, change: str, extra: bool = False) -> None:
    """A bundle whose manifest was edited, with a matching hash or without."""
    from forkserve.store.bundle import _hash

    with tarfile.open(path) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
    outer = json.loads(members[0][1])
    manifest = json.loads(outer["manifest"])
    if change == "tokens":
        manifest["names"][0]["ids"] = manifest["names"][1]["ids"]
    elif change == "drop":
        manifest["chunks"].pop()
    elif change == "format":
        manifest["format"] = 9
    elif change == "add":
        manifest["chunks"].append(manifest["chunks"][0])
    body = json.dumps(manifest)
    members[0] = (members[0][0], json.dumps({"manifest": body, "hash": _hash(body, None)}).encode())
    if extra:
        members.append(("../../evil", b"x"))
    with tarfile.open(path, "w") as tar:
        from forkserve.store.bundle import _add

        for name, data in members:
            _add(tar, name, data)


@pytest.mark.parametrize("change", ["tokens", "drop", "format", "add", "extra"])
def test_a_manifest_with_a_matching_hash_must_still_fit(
    tmp_path: Path, bundle: Path, change: str
) -> None:
    rewrite(bundle, change, extra=change == "extra")
    with Store(tmp_path / "to", "shared") as store:
        with pytest.raises(StoreError):
            import_bundle(store.vault, bundle)
        assert store.catalog.usage() == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "two\nlines"),
        ("name", 5),
        ("seed", "x"),
        ("root", "0" * 64),  # of another salt
        ("root", "x"),
        ("chain", 7),
        ("tokens", -1),
        ("created_at", "soon"),
        ("salt", "~"),
        ("salt", "/w=="),  # no UTF-8
        ("ids", "AAA="),
        ("ids", None),
        ("fingerprint", "{}"),
        ("fingerprint", 3),
        ("node", 1.5),
        ("more", 1),
    ],
)
def test_a_manifest_that_makes_no_sense_is_a_typed_error(
    tmp_path: Path, bundle: Path, key: str, value: Any
) -> None:
    """Whoever makes a bundle can make its hash as well."""
    from forkserve.store.bundle import _add, _signed

    with tarfile.open(bundle) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    manifest = json.loads(json.loads(members[0][1])["manifest"])
    manifest["names"][0][key] = value
    with tarfile.open(bundle, "w") as tar:
        for name, data in [(members[0][0], _signed(manifest, None)), *members[1:]]:
            _add(tar, name, data)
    with Store(tmp_path / "to", "shared") as store:
        with pytest.raises(StoreError):
            import_bundle(store.vault, bundle)
        assert store.catalog.usage() == {}
        assert store.catalog.read("SELECT count(*) FROM name") == [(0,)]


def test_a_name_that_is_taken_by_another_text_is_refused(tmp_path: Path, bundle: Path) -> None:
    eng = engine(tmp_path / "to")
    eng.open([1, 2, 3], session="x")
    eng.publish("x", name="case-17/trunk")
    assert eng.store is not None
    with pytest.raises(
        StoreError, match="stands here for another state, node 1 of session 'x': rename"
    ):
        import_bundle(eng.store.vault, bundle)
    eng.shutdown()


def test_export_says_what_it_cannot_do(tmp_path: Path, bundle: Path) -> None:
    target = tmp_path / "out"
    with Store(tmp_path / "empty", "shared") as store, pytest.raises(StoreError, match="no named"):
        export_bundle(store.vault, target)
    with Store(tmp_path / "from", "shared") as store:
        with pytest.raises(StoreError, match="no state named"):
            export_bundle(store.vault, target, ["nobody"])
        next((tmp_path / "from" / "chunks").rglob("*.kv")).write_bytes(b"spoilt")
        with pytest.raises(StoreError, match="no sound copy"):
            export_bundle(store.vault, target)
    assert not target.exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_export_overwrites_only_what_it_is_asked_to(tmp_path: Path, bundle: Path) -> None:
    target, late, link = tmp_path / "out", tmp_path / "late", tmp_path / "link"
    target.write_text("a thesis")
    link.symlink_to(tmp_path / "nothing")
    with Store(tmp_path / "from", "shared") as store:
        for taken in (target, link):
            with pytest.raises(StoreError, match=f"{taken} exists"):
                export_bundle(store.vault, taken)
        with pytest.raises(StoreError, match="late exists"):  # it came while chunks were written
            export_bundle(store.vault, late, progress=lambda done, total: late.touch())
        assert target.read_text() == "a thesis"
        assert late.read_bytes() == b""
        export_bundle(store.vault, target, overwrite=True)
    assert target.read_bytes() == bundle.read_bytes()
    assert not list(tmp_path.glob(".*.tmp-*"))


def test_an_encrypted_bundle_needs_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("K", "33" * 32)
    path = tmp_path / "bundle"
    with Store(tmp_path / "from", encrypt="env:K") as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.publish("a", name="x")
        export_bundle(store.vault, path)
        eng.shutdown()
    with Store(tmp_path / "to", encrypt="env:K") as store:
        import_bundle(store.vault, path)
        eng = engine(store)
        assert eng.restore("x").cached_tokens == 512
        eng.shutdown()
    for options in ({}, {"encrypt": "env:L"}):
        monkeypatch.setenv("L", "44" * 32)
        other = Store(tmp_path / f"no{len(options)}", **options)  # type: ignore[arg-type]
        with other, pytest.raises(StoreError, match="another key"):
            import_bundle(other.vault, path)
