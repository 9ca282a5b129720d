"""Input and surroundings that no sane program gives a store, and that it meets all the same."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError, SessionError, StoreError
from forkserve.store import Store
from forkserve.store.catalog import doomed
from forkserve.store.collect import collect
from forkserve.store.depots import FaultyDepot, LocalDepot, MemoryDepot
from forkserve.store.lease import hold
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .engines import PROMPT, cold, engine, prefilled
from .rig import PRINT, chain, files, good, rows, vault
from .test_cli import ask, run

# -------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        {"role": "boss"},
        {"restore": "maybe"},
        {"queue": 0},  # for `queue.Queue` that would be no limit at all
        {"queue": 1.5},
        {"budget_bytes": 0},
        {"budget_bytes": "10"},
        {"budget_bytes": math.nan},
        {"memory_bytes": 0},
        {"memory_bytes": -1},
        {"device_bytes": 5},
        {"device_bytes": 0, "memory_bytes": 5},
        {"scrub_bytes_s": 0},
        {"scrub_bytes_s": math.nan},
        {"scrub_bytes_s": "fast"},
        {"write_behind": True},
        {"far_bytes": 5},
        {"far": "archive"},  # a string is a sequence of directories of one letter
        {"far": [3]},
        {"far": [""]},
        {"far": ["http://host/x"]},
        {"far": ["gs://bucket"]},
        {"far": ["a", "b"]},  # both would be called "far", and one would hide the other
        {"far": ["states/chunks"]},
        {"encrypt": ""},
        {"encrypt": 3},
        {"policy": 3},
        {"format": "int8"},  # it would store what nobody may read
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        Store("states", **options)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    Store("states").close()


@pytest.mark.parametrize("name", ["", "a,b"])
def test_a_place_whose_name_the_catalog_cannot_list_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="without a comma"):
        Store(tmp_path / "states", far=[LocalDepot(tmp_path / "far", place=name)])


@pytest.mark.parametrize("folder", ["", "a\0b", 5, None])
def test_what_is_no_directory_is_refused(folder: Any) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        Store(folder)


def test_an_option_that_the_object_store_does_not_know_is_a_typed_error() -> None:
    pytest.importorskip("obstore")
    from forkserve.store.depots import depot_at

    with pytest.raises(ConfigError, match="nonsense"):
        depot_at("s3://bucket/prefix?nonsense=1")


# -------------------------------------------------------------------- names

HALF = "half a pair: \ud800"


@pytest.mark.parametrize("argument", ["session", "tenant", "salt"])
def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path, argument: str) -> None:
    eng = engine(tmp_path)
    with pytest.raises(ConfigError, match="surrogate"):
        eng.open(PROMPT[:9], **{argument: HALF})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="surrogate"):
        eng.resume(HALF)
    with pytest.raises(ConfigError, match="surrogate"):
        eng.restore(HALF)
    for name in (HALF, "", "a\nb", "x" * 513, 5, b"x", ["x"]):
        with pytest.raises(StoreError, match="no name"):
            eng.publish("s1", name=name)  # type: ignore[arg-type]
    assert eng.sessions() == []
    eng.shutdown()


def test_a_branch_name_that_no_file_can_hold_costs_nobody_his_session(tmp_path: Path) -> None:
    """Names of branches come from programs that may have them from a model."""
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    guess = eng.fork("a", h.tip, HALF, [1, 2, 3])
    eng.commit("a", h.tip, [1, 2, 3], branch=HALF)
    eng.commit("a", eng.tip("a"), [4, 5])
    assert eng.store is not None
    assert eng.store.health()["failures"] == {}
    text = list(eng.tokens("a"))
    eng.shutdown()
    eng = engine(tmp_path)
    assert list(eng.tokens(eng.resume("a").id)) == text
    assert guess in eng.tree("a").nodes
    eng.shutdown()


@pytest.mark.parametrize("name", ["é✓ 漢字", "../../up", "x" * 512, "' OR 1=1 --", "%s{}"])
def test_odd_names_are_only_names(tmp_path: Path, name: str) -> None:
    eng = engine(tmp_path / "s")
    eng.open(PROMPT, session=name, tenant=name)
    eng.publish(name, name=name)
    eng.shutdown()
    eng = engine(tmp_path / "s")
    assert list(eng.tokens(eng.resume(name).id)) == PROMPT
    assert list(eng.tokens(eng.restore(name).id)) == PROMPT
    with pytest.raises(SessionError, match="open already"):
        eng.resume(name)
    eng.shutdown()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


# -------------------------------------------------------------------- files under a running engine


def test_a_relative_directory_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    eng = engine(Store("states", far=["archive"], write_behind=True))
    h = eng.open(PROMPT, session="a")
    monkeypatch.chdir(tmp_path / "elsewhere")
    eng.publish("a", name="n")
    eng.commit("a", h.tip, [1, 2])
    store = eng.store
    assert store is not None
    assert store.behind is not None
    assert store.behind.drain(HANGS_S)
    assert store.health()["failures"] == {}
    eng.shutdown()
    store.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "archive").rglob("*.kv"))) == 2


@pytest.mark.parametrize("gone", ["database", "replaced", "folder"])
def test_a_database_that_goes_under_a_running_engine_is_no_silent_loss(
    tmp_path: Path, gone: str
) -> None:
    """SQLite writes on into a deleted file: what is called durable must not be lost like that."""
    home = tmp_path / "s"
    eng = engine(home)
    h = eng.open(PROMPT, session="a")
    if gone == "folder":
        shutil.rmtree(home)
    else:
        for path in home.glob("catalog.db*"):
            path.unlink()
    if gone == "replaced":
        engine(home).shutdown()
    eng.commit("a", h.tip, [1, 2])
    assert eng.generate("a", 4) == cold([*PROMPT, 1, 2], 4), "tokens go on"
    assert eng.store is not None
    assert eng.store.health()["failures"]["CatalogFault"] >= 1
    assert "removed or replaced" in eng.store.health()["last_failure"]
    with pytest.raises(StoreError):
        eng.publish("a", name="n")
    eng.shutdown()


def test_chunks_that_go_under_a_running_engine_are_computed_and_written_again(
    tmp_path: Path,
) -> None:
    eng = engine(Store(tmp_path, restore="always"))
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    eng.close("a")
    eng._core.index.clear()
    shutil.rmtree(tmp_path / "chunks")
    before = prefilled(eng)
    h = eng.restore("n")
    assert (h.cached_tokens, prefilled(eng) - before) == (0, len(PROMPT))
    assert eng.generate(h.id, 4) == cold(PROMPT, 4)
    assert eng.publish(h.id, name="m").wait().written == 2
    eng.shutdown()


# -------------------------------------------------------------------- another model


class OtherWeights(MockBackend):
    def identity(self, weights: Any) -> Mapping[str, Any]:
        return {**super().identity(weights), "weights": "mock/v2"}


class OtherKernels(MockBackend):
    def identity(self, weights: Any) -> Mapping[str, Any]:
        old = super().identity(weights)
        return {**old, "variant": {**old["variant"], "kernels": "numpy/v2"}}


def test_a_session_of_another_model_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """The same token ids say another text there."""
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    eng.shutdown()
    other = Engine(OtherWeights(ForkServeConfig()), store=tmp_path)
    with pytest.raises(StoreError, match=r"another model: weights was mock/v1, and is mock/v2"):
        other.resume("a")
    with pytest.raises(StoreError, match="the state 'n' was made by another model"):
        other.restore("n")
    assert other.open(PROMPT, session="b").cached_tokens == 0
    other.shutdown()


def test_other_kernels_take_the_text_and_compute_the_rows(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    eng.shutdown()
    with Store(tmp_path, restore="always") as store:
        other = Engine(OtherKernels(ForkServeConfig(page_size=32)), store=store)
        assert other.resume("a").cached_tokens == 0
        assert other.generate("a", 4) == cold(PROMPT, 4)
        assert other.generate(other.restore("n").id, 4) == cold(PROMPT, 4)
        other.shutdown()


# -------------------------------------------------------------------- a forked process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_cannot_write_and_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    assert eng.store is not None
    pid = os.fork()
    if pid == 0:  # no assertion here: pytest's copy must not go on
        wrong = 0
        for verb in (
            lambda: eng.commit("a", h.tip, [9]),
            lambda: eng.publish("a", name="child"),
            lambda: eng.store.catalog.set_setting("x", "y"),  # type: ignore[union-attr]
            lambda: eng.store.catalog.read("SELECT 1"),  # type: ignore[union-attr]
        ):
            try:
                verb()
                wrong += 1
            except Exception as error:
                wrong += "after a fork" not in str(error)
        try:
            eng.store.close()
        except BaseException:
            wrong += 10
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(StoreError, match="in use by process"):
        Store(tmp_path)
    eng.commit("a", h.tip, [1, 2])
    eng.publish("a", name="n")
    assert eng.store.health()["failures"] == {}
    eng.shutdown()


# -------------------------------------------------------------------- a far place that hangs


class Slow(FaultyDepot):
    """Waits in `delete` or `open` until it is let go."""

    def __init__(self, inner: MemoryDepot, what: str) -> None:
        super().__init__(inner)
        self.what, self.inside, self.go = what, threading.Event(), threading.Event()

    def _due(self, what: str) -> None:
        super()._due(what)
        if what == self.what:
            self.inside.set()
            assert self.go.wait(HANGS_S)


def test_a_far_place_that_is_slow_to_delete_keeps_nobody_from_the_catalog(tmp_path: Path) -> None:
    far = Slow(MemoryDepot(place="object"), "delete")
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), far])
    links = chain(range(4))
    v.put(PRINT, links, rows)
    (path,) = files(tmp_path)
    far.inner.put([(path.stem, [path.read_bytes()])])  # of a copy that was killed before its row
    pin = [(links[0].id.hex(), "me", None)]
    with v.catalog.write() as db:
        db.executemany("INSERT INTO pin VALUES (?, ?, ?)", pin)
    gc = threading.Thread(target=collect, args=(v,), kwargs={"grace_s": -5})
    gc.start()
    assert far.inside.wait(HANGS_S)
    v.put(PRINT, chain([7, *range(11)]), rows)  # others write
    assert good(v, chain([7, *range(11)])) == 3
    with pytest.raises(OSError, match="is being deleted"):  # but not that very object
        v.copy_one(path.stem, "disk", "object")
    far.go.set()
    gc.join(HANGS_S)
    assert list(far.inner.entries()) == []
    assert v.copy_one(path.stem, "disk", "object") > 0
    assert v.catalog.read("SELECT count(*) FROM lease") == [(0,)]
    assert verify(v).clean
    v.catalog.close()


def test_who_dies_while_deleting_far_objects_blocks_no_copy(tmp_path: Path) -> None:
    v = vault(tmp_path, depots=[LocalDepot(tmp_path / "chunks"), MemoryDepot(place="object")])
    v.put(PRINT, chain(range(4)), rows)
    (path,) = files(tmp_path)
    with v.catalog.write() as db:
        hold(db, [doomed(path.stem, "object")], v.catalog.now(), 86_400)
        db.execute('UPDATE lease SET holder = \'[1, "another boot", ""]\'')
        db.execute("INSERT INTO pin VALUES (?, 'me', NULL)", (chain(range(4))[0].id.hex(),))
    collect(v, grace_s=3600)
    assert v.copy_one(path.stem, "disk", "object") > 0
    v.catalog.close()


def test_a_far_place_that_does_not_answer_costs_its_patience_and_then_a_prefill(
    tmp_path: Path,
) -> None:
    far = Slow(MemoryDepot(place="object"), "open")
    with Store(tmp_path, far=[far], restore="always") as store:
        eng = engine(store, prefix_index=False)
        eng.open(PROMPT, session="a")
        eng.publish("a")
        eng.close("a")
        for path in files(tmp_path):
            store.vault.copy_one(path.stem, "disk", "object")
        store.catalog.forget("disk", [path.stem for path in files(tmp_path)])
        store.restorer.patience_s = 0.05
        assert eng.open(PROMPT, session="b").cached_tokens == 0
        assert eng.generate("b", 4) == cold(PROMPT, 4)
        assert store.catalog.events("read_slow")
        far.go.set()
        store.restorer.patience_s = 30.0
        assert eng.open(PROMPT, session="c").cached_tokens == 512
        eng.shutdown()


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "args",
    [
        ("pin", "n", "--ttl", "nan"),  # a pin for good, for SQLite
        ("pin", "n", "--ttl", "inf"),
        ("gc", "--grace", "nan"),
        ("gc", "--grace", "-1"),  # what is being published just now would be garbage
        ("scrub", "--rate", "nan"),
        ("push", "--wait", "nan"),
        ("decisions", "--limit", "0"),
        ("show", HALF),
        ("lookup", "--salt", HALF, "[1]"),
        ("lookup", "[99999999999]"),
        ("name", "n", "--to", HALF),
        ("name", "n", "--to", ""),
        ("name", "n", "--to", "two\nlines"),
        ("export", "out", HALF),
    ],
    ids=str,
)
def test_a_command_that_makes_no_sense_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    eng = engine(tmp_path / "s")
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    eng.shutdown()
    output = run(tmp_path / "s", *args, code=2).output
    assert output.strip().splitlines()[-1].startswith("Error: ")
    with Store(tmp_path / "s") as store:
        assert store.catalog.read("SELECT name FROM name") == [("n",)]
        assert store.catalog.read("SELECT count(*) FROM pin") == [(0,)]
        assert len(files(tmp_path / "s")) == 2


def test_a_name_given_twice_is_exported_once(tmp_path: Path) -> None:
    eng = engine(tmp_path / "s")
    eng.open(PROMPT, session="a")
    eng.publish("a", name="n")
    eng.shutdown()
    assert ask(tmp_path / "s", "export", tmp_path / "out", "n", "n")["names"] == ["n"]
