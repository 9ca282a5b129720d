"""Chunks under several keys in one store, and what sealing twice gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkserve.store import Store
from forkserve.store.checkup import checkup
from forkserve.store.rebuild import integrity, rebuild, verify
from forkserve.store.seal import Sealer
from forkserve.store.vault import Vault

from .engines import PROMPT, cold, engine
from .rig import PRINT, chain, files, good, load, rows, vault

pytest.importorskip("cryptography")
LINKS = chain(range(40))  # ten chunks


def sealed_with(v: Vault, sealer: Sealer | None) -> Vault:
    return Vault(v.catalog, list(v.depots.values()), sealer=sealer)


def test_each_key_finds_and_stores_its_own(tmp_path: Path) -> None:
    """One key, another, none, and back: nobody sees or loses what is another's."""
    v = vault(tmp_path)
    keys = [Sealer(b"1" * 32), Sealer(b"2" * 32), None]
    for stored, sealer in enumerate(keys):
        mine = sealed_with(v, sealer)
        assert good(mine, LINKS) == 0
        assert mine.put(PRINT, LINKS, rows).written == 10
        assert good(mine, LINKS) == 10
        assert len(files(tmp_path)) == 10 * (stored + 1)
    for sealer in (keys[0], keys[2], keys[1], keys[0]):
        mine = sealed_with(v, sealer)
        assert good(mine, LINKS) == 10
        assert mine.put(PRINT, LINKS, rows).known == 10
    v.catalog.close()
    (tmp_path / "catalog.db").unlink()
    again = vault(tmp_path, sealer=keys[1])
    assert rebuild(again).adopted == 30
    for sealer in keys:
        assert good(sealed_with(again, sealer), LINKS) == 10
    assert verify(again).clean
    assert not again.catalog.events("divergence")
    again.catalog.close()


def test_a_part_of_an_older_version_is_asked_for_its_key(tmp_path: Path) -> None:
    """Its row does not say; the file does, and the answer is kept."""
    v = vault(tmp_path, sealer=Sealer(b"1" * 32))
    v.put(PRINT, LINKS, rows)
    with v.catalog.write() as db:
        db.execute("DROP TRIGGER part_key_fixed")
        db.execute("UPDATE part SET key = NULL")
    assert v.put(PRINT, LINKS[:2], rows).known == 2
    assert v.catalog.read("SELECT count(*) FROM part WHERE key IS NULL") == [(8,)]
    for sealer in (Sealer(b"2" * 32), None):
        other = sealed_with(v, sealer)
        assert load(other, LINKS) == []
        assert other.put(PRINT, LINKS, rows).written == 10
        assert good(other, LINKS) == 10
    assert good(v, LINKS) == 10
    assert v.catalog.read("SELECT count(*) FROM part WHERE key IS NULL") == [(0,)]
    v.catalog.close()


def test_a_part_that_turns_out_to_be_there_twice_is_kept_once(tmp_path: Path) -> None:
    v = vault(tmp_path)
    old = v.pack(PRINT, LINKS[0], bytes(128))
    v.adopt([old])
    with v.catalog.write() as db:
        db.execute("DROP TRIGGER part_key_fixed")
        db.execute("UPDATE part SET key = NULL")
    v.adopt([v.pack(PRINT, LINKS[0], rows(LINKS[0]))])  # by a process that did not ask
    v.catalog.learn(old[0])
    assert good(v, LINKS[:1]) == 1
    assert integrity(v) == []
    v.catalog.close()


def test_equal_rows_sealed_twice_are_no_divergence(tmp_path: Path) -> None:
    a, b = (vault(tmp_path, sealer=Sealer(b"1" * 32)) for _ in range(2))
    staged = [a.pack(PRINT, link, rows(link)) for link in LINKS]
    assert b.put(PRINT, LINKS, rows).written == 10
    a.adopt(staged)  # both found it absent
    assert a.catalog.events("divergence") == []
    assert len(files(tmp_path)) == 10
    a.adopt([a.pack(PRINT, LINKS[0], bytes(128))])
    assert len(a.catalog.events("divergence")) == 1, "other rows are still seen to be others"
    a.catalog.close()
    b.catalog.close()


def test_an_engine_with_another_key_caches_anew_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K1", "11" * 32)
    monkeypatch.setenv("K2", "22" * 32)
    seen: set[str | None] = set()
    for key in ("K1", "K2", "K1", None, "K2", None, "K1"):
        with Store(tmp_path, restore="always", encrypt=key and f"env:{key}") as store:
            eng = engine(store)
            session = eng.open(PROMPT)
            assert session.cached_tokens == (512 if key in seen else 0)
            assert eng.generate(session.id, 4) == cold(PROMPT, 4)
            eng.publish(session.id)
            seen.add(key)
            assert verify(store.vault).clean
            found = {check.name: check.found for check in checkup(store)}["key"]
            assert ("another key" in found) == (len(seen) > 1)
            eng.shutdown()
