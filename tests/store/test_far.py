"""An object store behind the disk: a real S3 server, from publish to restore elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from forkserve.store import Store
from forkserve.store.rebuild import rebuild, verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine

AWAY = "http://127.0.0.1:9"  # nobody listens there
pytestmark = pytest.mark.xdist_group("s3")


def test_evicted_chunks_move_to_s3_and_are_restored_from_there(
    tmp_path: Path, s3_options: dict[str, Any]
) -> None:
    from forkserve.store.depots.s3 import S3Depot

    prefix = f"e{time.time_ns()}"
    far = S3Depot("chunks", prefix, **s3_options)
    with Store(tmp_path / "one", far=[far], budget_bytes=30_000) as store:
        eng = engine(store)
        for n in range(4):
            h = eng.open([n, *PROMPT], session=f"s{n}")
            eng.publish(h.id)
        assert store.catalog.usage()["object"][1] >= 4
        assert verify(store.vault).clean
        eng.shutdown()
    with Store(tmp_path / "one", far=[far]) as store:
        eng = engine(store)
        for n in range(4):
            assert eng.resume(f"s{n}").cached_tokens == 512
            assert eng.generate(f"s{n}", 2) == cold([n, *PROMPT], 2)
        eng.shutdown()
    with Store(tmp_path / "two", far=[S3Depot("chunks", prefix, **s3_options)]) as store:
        assert rebuild(store.vault).adopted == 0, "they are another store's"
        assert rebuild(store.vault, take=["all"]).adopted >= 4, "by their headers"
        eng = engine(store)
        assert eng.open([0, *PROMPT]).cached_tokens > 0
        eng.shutdown()


def test_write_behind_brings_every_chunk_to_s3_and_survives_its_absence(
    tmp_path: Path, s3_options: dict[str, Any]
) -> None:
    from forkserve.store.depots.s3 import S3Depot

    prefix = f"w{time.time_ns()}"
    away = S3Depot("chunks", prefix, timeout_s=0.5, **{**s3_options, "endpoint": AWAY})
    with Store(tmp_path / "one", far=[away], write_behind=True) as store:
        eng = engine(store)
        h = eng.open(PROMPT, session="a")
        eng.publish(h.id, name="x")
        assert eng.generate("a", 3) == cold(PROMPT, 3)
        assert store.behind is not None
        assert store.behind.waiting() == 2
        eng.shutdown()
    far = S3Depot("chunks", prefix, **s3_options)
    with Store(tmp_path / "one", far=[far], write_behind=True) as store:
        with store.catalog.write() as db:
            db.execute("UPDATE outbox SET due_at = 0")
        assert store.behind is not None
        assert store.behind.drain(HANGS_S)
        assert len(list(store.vault.depots["object"].entries())) == 2
        assert verify(store.vault).clean
        text = store.metrics()["tiers"]["object"]
        assert text["parts"] == 2
    with Store(tmp_path / "two", far=[S3Depot("chunks", prefix, **s3_options)]) as store:
        assert rebuild(store.vault, take=["all"]).adopted == 2
        eng = engine(store)
        assert eng.open(PROMPT).cached_tokens == 512
        eng.shutdown()
