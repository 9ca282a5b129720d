"""What is stored once more, evicted, copied or closed just when somebody else acts."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forkserve.cli import main
from forkserve.errors import SessionError, StoreError
from forkserve.store import Store, bundle, faults
from forkserve.store.behind import WriteBehind
from forkserve.store.budget import Budget
from forkserve.store.bundle import export_bundle
from forkserve.store.catalog import Catalog, CatalogFault
from forkserve.store.collect import collect
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from forkserve.store.policies import Lru
from forkserve.store.publish import Capture, Publisher
from forkserve.store.rebuild import rebuild, verify
from forkserve.store.records import read_session
from forkserve.store.vault import Vault

from .engines import PROMPT, engine
from .rig import PRINT, chain, files, good, rows, vault
from .test_shared import filled

LINKS = chain(range(12))
HOUR = 3600.0
FILE = 4096


def forsake(v: Vault) -> None:
    """Nobody has used anything for years."""
    with v.catalog.write() as db:
        db.execute("UPDATE chunk SET created_at = 1, used_at = 1")


# -------------------------------------------------------------------- stored once more


@pytest.mark.parametrize("how", ["put", "adopt", "another format"])
def test_garbage_that_is_stored_once_more_begins_its_grace_anew(tmp_path: Path, how: str) -> None:
    v = vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    if how == "put":
        assert v.put(PRINT, LINKS, rows).known == 3
    elif how == "adopt":
        v.adopt([v.pack(PRINT, link, rows(link)) for link in LINKS])
    else:
        pytest.importorskip("zstandard")
        v.format = "zstd"
        assert v.put(PRINT, LINKS, rows).written == 3
    assert collect(v, grace_s=HOUR).chunks == 0
    assert good(v, LINKS) == 3
    v.catalog.close()


def test_what_gc_takes_after_a_publish_has_seen_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    renew, swept = v.catalog.renew, []

    def late(*values: Any) -> set[str]:
        swept.append(collect(other, grace_s=HOUR).chunks)
        return renew(*values)

    monkeypatch.setattr(v.catalog, "renew", late)
    assert v.put(PRINT, LINKS, rows).written == 3
    assert swept == [3]
    assert good(v, LINKS) == 3
    assert collect(other, grace_s=HOUR).chunks == 0


def test_a_copy_elsewhere_is_no_use(tmp_path: Path) -> None:
    """Eviction goes by when a chunk was used: bringing it to a further place must not count."""
    far = MemoryDepot(place="object")
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.put(PRINT, LINKS, rows)
    forsake(v)
    for path in files(tmp_path):
        v.copy_one(path.stem, "disk", "object")
    rebuild(v)
    assert v.catalog.read("SELECT DISTINCT used_at FROM chunk") == [(1.0,)]


def test_a_publish_of_an_engine_renews_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Sessions of an engine that is not the owner are in no catalog: no root reaches their rows."""
    with Store(tmp_path, "shared") as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        assert eng.publish("a").wait().written == 2
        forsake(store.vault)
        assert eng.publish("a").wait().known == 2
        assert collect(store.vault, grace_s=HOUR).chunks == 0
        forsake(store.vault)
        assert collect(store.vault, grace_s=HOUR).chunks == 2
        eng.shutdown()


# -------------------------------------------------------------------- eviction


def pin(v: Vault, chain_id: bytes) -> None:
    with v.catalog.write() as db:
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (chain_id.hex(),))


def at(point: str, act: Callable[[], Any]) -> None:
    """Do `act` once, when a fault point is reached."""
    todo = [act]

    def hook(reached: str) -> None:
        if reached == point and todo:
            todo.pop()()

    faults.hook = hook


def test_what_is_named_after_it_was_chosen_is_not_evicted(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    budget = Budget(v, "disk", 3 * FILE, Lru(), low=1.0)
    at("evict.copied", lambda: pin(other, LINKS[1].id))
    with pytest.raises(StoreError, match="full of named and pinned"):
        budget.make_room(2 * FILE)
    assert good(v, LINKS) == 2, "the last one was free to go"
    assert verify(v).orphans == 0


def test_what_got_a_successor_after_it_was_chosen_is_not_evicted(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS[:2], rows)
    budget = Budget(v, "disk", 2 * FILE, Lru(), low=1.0)
    at("evict.copied", lambda: other.put(PRINT, LINKS, rows))
    with pytest.raises(StoreError, match="full of named and pinned"):
        budget.make_room(FILE)
    assert good(v, LINKS) == 3, "no hole"


def test_gc_tells_what_it_took_and_not_what_it_had_seen(tmp_path: Path) -> None:
    v, other = vault(tmp_path), vault(tmp_path)
    v.put(PRINT, LINKS, rows)
    forsake(v)
    at("gc.marked", lambda: pin(other, LINKS[1].id))
    swept = collect(v, grace_s=HOUR)
    assert (swept.chunks, good(v, LINKS)) == (1, 2)
    assert v.catalog.counters()["evicted_bytes/disk/gc"] == swept.bytes == FILE


def test_a_reader_of_a_damaged_chunk_changes_nothing(tmp_path: Path) -> None:
    v, reader = vault(tmp_path), vault(tmp_path, "reader")
    v.put(PRINT, LINKS, rows)
    damaged = files(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = files(tmp_path)
    for _ in range(2):
        assert good(reader, LINKS) < 3
    assert [fault[1] for fault in verify(reader).faults] == [damaged.stem]
    assert files(tmp_path) == before
    assert [fault[2] for fault in verify(v).faults] == ["payload"], "the owner sets it aside"
    assert len(files(tmp_path)) == 2


# -------------------------------------------------------------------- further places


class _Gone(FaultyDepot):
    """A bucket that does not exist: nothing is found there, and nothing can be put."""

    missing = True

    def put(self, items: Any) -> Any:
        if self.missing:
            raise FileNotFoundError("no such bucket")
        return super().put(items)


def test_a_further_place_that_is_missing_loses_no_chunk(tmp_path: Path) -> None:
    far = _Gone(MemoryDepot(place="object"))
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    sender = WriteBehind(v, "object")
    v.stored = lambda: None  # sent by hand
    v.put(PRINT, LINKS, rows)
    assert sender.step()
    assert sender.waiting() == 3, "a missing bucket is not a missing chunk"
    assert v.catalog.events("behind_lost") == []
    with v.catalog.write() as db:
        db.execute("DELETE FROM outbox")
    with pytest.raises(StoreError, match="are needed"):
        Budget(v, "disk", 3 * FILE, Lru(), low=1.0).make_room(FILE)
    assert good(v, LINKS) == 3, "what cannot move stays"
    far.missing = False
    assert Budget(v, "disk", 3 * FILE, Lru(), low=1.0).make_room(FILE).moved == 1
    assert good(v, LINKS) == 3


@pytest.mark.xdist_group("s3")
def test_a_bucket_that_does_not_exist_is_no_missing_chunk(
    tmp_path: Path, s3_options: dict[str, Any]
) -> None:
    """A wrong --far must not strike what lies in the right one."""
    from forkserve.store.depots.s3 import S3Depot

    far = S3Depot("nobody-made-this", "x", timeout_s=5.0, **s3_options)
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    v.put(PRINT, LINKS, rows)
    for path in files(tmp_path):
        with v.catalog.write() as db:
            db.execute("INSERT INTO replica VALUES (?, 'object', 1, 1, NULL)", (path.stem,))
        with pytest.raises(OSError, match="object store: ") as caught:
            v.copy_one(path.stem, "disk", "object")
        assert "\n" not in str(caught.value)
        path.unlink()
    calls: list[Callable[[], Any]] = [
        lambda: verify(v),
        lambda: collect(v, grace_s=HOUR),
        lambda: far.put([("0" * 64, [b"x"])]),
    ]
    for call in calls:
        with pytest.raises(OSError, match="object store: ") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)
    assert good(v, LINKS) == 0
    listed = "SELECT count(*) FROM replica WHERE place = 'object'"
    assert v.catalog.read(listed) == [(3,)], "nobody can say that they are gone"
    with pytest.raises(OSError, match="NoSuchBucket: The specified bucket does not exist"):
        far.open("0" * 64)


@pytest.mark.parametrize("times", [1, 3, 1000])
def test_a_copy_that_gc_takes_before_it_is_listed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    far = lambda: LocalDepot(tmp_path / "far", place="object")  # noqa: E731
    one, left = filled(tmp_path / "one", far), [times]
    put = LocalDepot.put

    def taken(self: LocalDepot, items: Any) -> Any:
        stats = put(self, items)
        if left[0]:
            left[0] -= 1
            self.delete([key for key, _ in items])
            raise FileNotFoundError("a chunk vanished while it was written")
        return stats

    with Store(tmp_path / "two", far=[far()]) as store:
        monkeypatch.setattr(LocalDepot, "put", taken)
        if times > 100:
            with pytest.raises(OSError, match="doesn't keep chunk") as caught:
                rebuild(store.vault, take=[one])
            assert not isinstance(caught.value, FileNotFoundError)
        else:
            assert rebuild(store.vault, take=[one]).copied == 2
            assert verify(store.vault).clean


# -------------------------------------------------------------------- the end of a publisher


def capture(v: Vault, released: list[int]) -> Capture:
    return Capture(PRINT, LINKS, lambda link, spare: rows(link), lambda: released.append(1))


def test_a_publish_that_meets_a_closing_store_is_refused_and_gives_its_pages_back(
    tmp_path: Path,
) -> None:
    """It has passed the check when the store closes: it must neither hang nor hold pages."""
    v, released = vault(tmp_path), list[int]()
    publisher = Publisher(v)
    assert publisher.offer(capture(v, released)).wait(30).written == 3
    put = publisher._queue.put

    def late(*values: Any, **options: Any) -> None:
        publisher._queue.put = put  # type: ignore[method-assign]
        publisher.close()
        put(*values, **options)

    publisher._queue.put = late  # type: ignore[method-assign]
    ticket = publisher.offer(capture(v, released))
    with pytest.raises(StoreError, match="closed meanwhile"):
        ticket.wait(30)
    assert released == [1, 1]
    assert not publisher.offer(capture(v, released)).accepted
    assert released == [1, 1, 1]
    assert publisher.drain(30)


def test_pages_that_were_taken_from_a_waiting_publish_are_given_back_once(tmp_path: Path) -> None:
    v, gate, entered = vault(tmp_path), threading.Event(), threading.Event()

    def hook(point: str) -> None:
        if point == "publish.captured":
            entered.set()
            gate.wait(60)

    faults.hook = hook
    publisher, released = Publisher(v, depth=1), [list[int]() for _ in range(3)]
    first = publisher.offer(capture(v, released[0]))
    assert entered.wait(60)
    second = publisher.offer(capture(v, released[1]))
    put = publisher._queue.put

    def full(*values: Any, **options: Any) -> None:
        assert publisher.relieve(), "the first one is being read"
        put(*values, **{**options, "timeout": 0.01})

    publisher._queue.put = full  # type: ignore[method-assign]
    third = publisher.offer(capture(v, released[2]), patience_s=60.0)
    publisher._queue.put = put  # type: ignore[method-assign]
    assert not third.accepted
    assert publisher.dropped == 2, "each was counted once"
    gate.set()
    assert first.wait(60).written == 3
    with pytest.raises(StoreError, match="needed for tokens"):
        second.wait(60)
    publisher.close()
    assert released == [[1], [1], [1]]


# -------------------------------------------------------------------- the catalog, the files


def test_an_interrupt_right_behind_begin_leaves_no_transaction_open(tmp_path: Path) -> None:
    """Ctrl-C while a statement waits for another process comes when it has its lock."""
    v = vault(tmp_path)
    catalog, real = v.catalog, v.catalog._db

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def execute(self, sql: str, *values: Any) -> Any:
            done = real.execute(sql, *values)
            if sql.startswith("BEGIN"):
                raise KeyboardInterrupt
            return done

    catalog._db = Interrupted()  # type: ignore[assignment]
    for block in (catalog.write, catalog.moment):
        with pytest.raises(KeyboardInterrupt), block():  # type: ignore[operator]
            pass
    catalog._db = real
    assert v.put(PRINT, LINKS, rows).written == 3
    with catalog.write(), pytest.raises(CatalogFault, match="open already"), catalog.write():
        pass
    assert vault(tmp_path).put(PRINT, chain(range(20, 32)), rows).written == 3


def test_a_session_is_read_as_it_was_at_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside the engine that writes: texts and nodes must not be of two moments."""
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    reader = Catalog(tmp_path, "reader")
    read, todo = reader.read, [1, 1, 1]

    def between(sql: str, values: Any = ()) -> Any:
        found = read(sql, values)
        if todo:
            todo.pop()
            eng.commit("a", h.tip, [5, 6, 7])
        return found

    monkeypatch.setattr(reader, "read", between)
    record = read_session(reader, "a", None)
    assert record is not None
    assert [len(node.tokens) for node in record.nodes] in ([700], [700, 3])
    assert record.tips[0] == record.nodes[-1].id
    reader.close()
    eng.shutdown()


def test_what_nobody_waited_for_is_written_when_its_session_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    assert eng._journal is not None
    monkeypatch.setattr(eng._journal, "_wake", threading.Event())  # its thread sleeps on
    monkeypatch.setattr(eng._journal, "_thread", threading.current_thread())
    generation = eng.start("a", 5)
    eng.open(PROMPT[::-1], session="b", salt="b")
    eng.generate("b", 20)  # whose passes serve both
    assert generation.done
    tokens = list(generation.tokens)
    eng.close("a")
    monkeypatch.undo()
    assert eng.resume("a").id == "a"
    assert eng.tokens("a") == [*PROMPT, *tokens]
    eng.shutdown()


def test_more_chunks_than_files_may_be_open_are_stored(tmp_path: Path) -> None:
    depot = LocalDepot(tmp_path / "chunks")
    items = [(f"{n:064x}", [bytes([n % 256])]) for n in range(600)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free + 200, soft), hard))
    try:
        stats = depot.put(items)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [stat.key for stat in stats] == [key for key, _ in items]
    assert len(list(depot.entries())) == 600


@pytest.mark.parametrize("missing", [True, False])
def test_an_import_that_meets_a_full_disk_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    """Whole chunks of it, half a chunk, and their folders are there when it fails."""
    eng = engine(tmp_path / "from")
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    assert eng.store is not None
    export_bundle(eng.store.vault, tmp_path / "b", ["n"])
    eng.shutdown()
    there, count, write = tmp_path / "there", [0], os.write
    if not missing:
        there.mkdir()

    def full(file: int, data: Any) -> int:
        count[0] += 1
        if count[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(bundle, "_STAGED", 1)  # each chunk is made durable alone
    command = ["store", "-d", str(there), "import", str(tmp_path / "b")]
    with monkeypatch.context() as patch:
        patch.setattr("forkserve.store.depots.local.os.write", full)
        refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert f"No space left on device: '{there / 'chunks'}'" in refused.output
    assert there.exists() is not missing
    assert not list(there.rglob("*"))
    assert "imported 1 state," in CliRunner().invoke(main, command).output


def test_copies_that_a_rebuild_has_made_before_it_failed_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie under the id of a new store: without it nobody would ever delete them."""
    one, put = filled(tmp_path / "one", lambda: LocalDepot(tmp_path / "far", place="far")), [0]
    real = LocalDepot.put

    def full(self: LocalDepot, items: Any) -> Any:
        put[0] += 1
        if put[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, items)

    head = ["store", "-d", str(tmp_path / "two"), "--far", str(tmp_path / "far"), "rebuild"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalDepot, "put", full)
        assert "No space left" in CliRunner().invoke(main, [*head, "--from", one]).output
    with Store(tmp_path / "two", "reader") as store:
        assert store.catalog.usage()["far"][1] == 1
    assert "1 copied" in CliRunner().invoke(main, [*head, "--from", one]).output
    folders = [path.name for path in (tmp_path / "far").iterdir()]
    assert len([name for name in folders if len(name) == 32]) == 2
    refused = CliRunner().invoke(
        main, ["store", "-d", str(tmp_path / "three"), *head[3:], "--from", "0" * 32]
    )
    assert refused.exit_code == 2
    assert not (tmp_path / "three").exists(), "nothing was copied"


# -------------------------------------------------------------------- closed meanwhile


def test_what_is_written_after_a_shutdown_takes_nothing_away(tmp_path: Path) -> None:
    """A generation has ended, and its caller comes to write that when the trees are closed."""
    with Store(tmp_path) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        said = eng.generate("a", 3)
        journal = eng._journal
        assert journal is not None
        eng.shutdown()
        journal.sync("a")
        assert verify(store.vault).problems == []
        again = engine(store)
        again.resume("a")
        assert again.tokens("a") == PROMPT + said
        again.shutdown()


@pytest.mark.parametrize("verb", ["open", "resume", "warm", "prefetch"])
def test_a_session_that_is_closed_while_its_rows_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with Store(tmp_path, restore="always", memory_bytes=1 << 20) as store:
        eng = engine(store)
        eng.open(PROMPT, session="a")
        eng.publish("a")
        tree = eng.tree("a")
        if verb == "resume":
            eng.shutdown()
            eng = engine(store)
        elif verb == "open":
            eng.close("a")
        else:
            with eng._core.lock:
                eng._core.drop_rows(tree, tree.root)
        bring_back = eng._bring_back

        def late(tree: Any, *args: Any, **options: Any) -> Any:
            eng.close(tree.session)
            return bring_back(tree, *args, **options)

        monkeypatch.setattr(eng, "_bring_back", late)
        if verb == "prefetch":
            eng._prefetch(tree, tree.root)
        else:
            with pytest.raises(SessionError, match="closed meanwhile"):
                eng.open(PROMPT, session="b") if verb == "open" else getattr(eng, verb)("a")
        assert eng.sessions() == []
        assert eng.stats().live_pages == eng.stats().index_pages
        eng.shutdown()
