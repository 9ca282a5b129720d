"""What ends, closes or fails half-way leaves nothing open and loses nothing."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forkserve.cli import main
from forkserve.errors import SessionError, StoreError
from forkserve.store import Store, bundle, faults
from forkserve.store.bundle import export_bundle
from forkserve.store.catalog import Catalog, CatalogFault
from forkserve.store.depots import LocalDepot
from forkserve.store.publish import Capture, Publisher
from forkserve.store.rebuild import verify
from forkserve.store.records import read_session
from forkserve.store.vault import Vault

from .engines import PROMPT, engine
from .rig import PRINT, chain, rows, vault
from .test_shared import filled

LINKS = chain(range(12))


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
