"""Where the parts of a chunk lie, as a look-up reads it: one column, kept by triggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forkserve.store.catalog import Catalog
from forkserve.store.depots import LocalDepot
from forkserve.store.lookups import LOOKUP
from forkserve.store.rebuild import integrity
from forkserve.store.vault import Vault

from .rig import PRINT, SIZE, chain
from .test_catalog import put_row


def test_a_look_up_sorts_nothing_and_reads_no_replica(tmp_path: Path) -> None:
    """A long chain in a large catalog: each table more is a scattered page a chunk."""
    catalog = Catalog(tmp_path)
    plan = [row[3] for row in catalog.read("EXPLAIN QUERY PLAN " + LOOKUP, ("[]", 1, ""))]
    assert [line.split(" ")[:2] for line in plan] == [
        ["SCAN", "w"],
        ["SEARCH", "c"],
        ["SEARCH", "p"],
    ]
    catalog.close()


def test_the_places_of_a_part_are_those_of_its_replicas(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    (link,) = chain(range(SIZE))
    put_row(catalog, link)
    content = catalog.lookup(PRINT, [link])[0].content

    def note(sql: str, *values: Any) -> tuple[str, ...]:
        with catalog.write() as db:
            db.execute(sql, values)
        found = catalog.lookup(PRINT, [link])
        return found[0].places if found else ()

    insert = "INSERT OR IGNORE INTO replica (content, place, used, created_at) VALUES (?, ?, 1, 0)"
    assert note(insert, content, "s3") == ("disk", "s3")
    assert note(insert, content, "s3") == ("disk", "s3"), "once"
    assert note(insert, content, "disk2") == ("disk", "s3", "disk2")
    delete = "DELETE FROM replica WHERE place = ?"
    assert set(note(delete, "disk")) == {"disk2", "s3"}
    v = Vault(catalog, [LocalDepot(tmp_path / "chunks")])
    assert integrity(v) == []
    with catalog.write() as db:
        db.execute("UPDATE part SET places = 'disk2'")
    assert integrity(v) == ["1 parts whose places are wrong"]
    with catalog.write() as db:
        db.execute("UPDATE part SET places = 'disk2,s'")
    assert integrity(v) == ["1 parts whose places are wrong"]
    assert note(delete, "s3") == ("disk2",)
    assert integrity(v) == []
    assert note(delete, "disk2") == ()
    assert catalog.read("SELECT 1 FROM part UNION SELECT 1 FROM chunk") == []
    catalog.close()
