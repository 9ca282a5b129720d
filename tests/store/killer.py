"""Kills children at every step, or at any moment, and checks what they leave.  Run as a program.

It has no thread of its own, so it may fork: a round costs milliseconds instead of an interpreter.
What a child would import on its way is imported here, or each of hundreds pays for it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.ma
import numpy.random  # noqa: F401

import forkserve.store.mover  # noqa: F401
from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.errors import StoreError
from forkserve.store import Store, faults
from forkserve.store.bundle import export_bundle, import_bundle
from forkserve.store.collect import collect
from forkserve.store.depots import LocalDepot
from forkserve.store.policies import KeepSession
from forkserve.store.rebuild import verify
from forkserve.store.scrub import scrub
from tests.waiting import HANGS_S

from .engines import PROMPT, cold
from .rig import PRINT, chain, rows
from .test_migrate import old_store

CONFIG = ForkServeConfig(page_size=16, capacity_pages=512)
MOVED = ("moved", "twin")  # a session of the bundle, and under another id
TRAVELS = [n * 7 % 251 for n in range(600)]


def open_store(folder: Path, **options: Any) -> Store:
    """A budget that is reached, a further place, and a tier in memory."""
    far = LocalDepot(folder.with_name(folder.name + "-far"), place="object")
    return Store(
        folder,
        policy=KeepSession(),
        budget_bytes=400_000,
        far=[far],
        write_behind=True,
        memory_bytes=100_000,
        device_bytes=60_000,
        **options,
    )


def open_engine(folder: Path) -> Engine:
    return Engine(MockBackend(CONFIG), store=open_store(folder))


def shut(eng: Engine) -> None:
    assert eng.store is not None
    eng.shutdown()
    eng.store.close()


def session(eng: Engine) -> None:
    if "a" in eng.stored_sessions():
        eng.resume("a")
    else:
        eng.open(PROMPT, session="a")


def work(folder: Path, acks: int, seed: int, bundle: Path) -> None:
    """Everything that must survive a kill; says after each verb what is durable."""
    rng = random.Random(seed)
    eng = open_engine(folder)
    session(eng)
    store = eng.store
    assert store is not None

    def acknowledge() -> None:
        os.write(acks, (json.dumps(eng.tokens("a")) + "\n").encode())

    acknowledge()
    for turn in range(8):
        tip = eng.tip("a")
        if len(eng.tokens("a")) < 3000:
            child = eng.fork("a", tip, "guess", [1, 2, 3])
            eng.speculate("a", child)
            eng.commit("a", tip, [1, 2, rng.randrange(9)] * rng.randrange(1, 60))
            acknowledge()
            eng.generate("a", 3)
            acknowledge()
        name = f"n{seed}-{turn}"
        with suppress(StoreError):  # the budget may be full of what has no receipt yet
            eng.publish("a", name=name, wait=turn % 2 == 0)
        if turn % 3 == 2:
            with store.catalog.write() as db:  # some states lose their name: garbage to collect
                db.execute("DELETE FROM name WHERE name LIKE ?", (f"n{rng.randrange(99)}%",))
            other = eng.open([rng.randrange(99) for _ in range(300)])
            with suppress(StoreError):
                eng.publish(other.id)
            eng.close(other.id)
        if turn % 3 == 1:
            with suppress(StoreError):
                import_bundle(store.vault, bundle, as_session=MOVED[turn > 3])
            with store.catalog.write() as db:
                db.execute("DELETE FROM name WHERE name = 'travels'")
                db.execute("DELETE FROM session WHERE id IN (?, ?)", MOVED)
        eng.observe("a", "tool", ms=1.0, output=[turn, 1, 2], schema_stable=True)
        if turn % 2:
            collect(store.vault, grace_s=-5)
        if turn == 3:
            scrub(store.vault)
        if turn == 5:
            for budget in store.budgets.values():
                with suppress(StoreError):
                    budget.make_room(150_000)
            fill(store, seed)
        eng.settle_tiers()
    shut(eng)


def fill(store: Store, seed: int) -> None:
    """More chunks than the budget allows, of no session: some have to go."""
    for n in range(80):
        with suppress(StoreError):
            store.vault.put(PRINT, chain([seed % 1000, n, *range(10)]), rows)


def check(folder: Path, acked: list[int], writing: bool) -> None:
    """After a kill: database and files agree, no acknowledged token is lost, work goes on."""
    with open_store(folder, role="shared") as store:
        report = verify(store.vault)
        assert report.clean, report
        names = store.catalog.read("SELECT name FROM name")
    eng = open_engine(folder)
    assert eng.store is not None
    assert eng.store.behind is not None
    if acked or "a" in eng.stored_sessions():
        eng.resume("a")
        text = eng.tokens("a")
        assert text[: len(acked)] == acked, (len(text), len(acked))
        eng.check()
        assert eng.generate("a", 2) == cold(text, 2)
        if writing:
            assert eng.store.behind.drain(HANGS_S)
            assert eng.publish("a").tokens == len(eng.tokens("a")) // 256 * 256
    for moved in {*MOVED} & {*eng.stored_sessions()}:  # whole, or not at all
        eng.resume(moved)
        assert eng.tokens(moved) == [*TRAVELS, 1, 2, 3, 4]
        assert [node.branch for node in eng.tree(moved)][1:] == ["aside", "next"]
        assert eng.generate(moved, 2) == cold([*TRAVELS, 1, 2, 3, 4], 2)
        eng.close(moved)
    if names and writing:
        eng.tokens(eng.restore(str(names[0][0])).id)
    assert eng.store.behind.drain(HANGS_S)  # what was on its way when the process was killed
    eng.store.behind.close()
    collect(eng.store.vault, grace_s=-5)
    report = verify(eng.store.vault)
    assert report.clean, report
    assert report.orphans == 0
    assert not list(folder.rglob(".tmp*"))
    assert eng.store.budgets["disk"].used() <= 400_000
    assert eng.store.catalog.read("SELECT count(*) FROM lease") == [(0,)]
    shut(eng)


def fork(job: Any, *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            job(*args)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def round_(folder: Path, seed: int, bundle: Path, point: str, nth: int, after_s: float) -> bool:
    """One child, one kill, one check; True if the child was killed before it was done."""
    read, write = os.pipe()

    def child() -> None:
        os.close(read)
        left = [nth]

        def hook(reached: str) -> None:
            if reached == point:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        faults.hook = hook if point else None
        work(folder, write, seed, bundle)

    pid = fork(child)
    os.close(write)
    if not point:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().split(b"\n")
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, f"the child failed at {point} {nth}"
    acked: list[int] = json.loads(lines[-2]) if len(lines) > 1 else []
    _, status = os.waitpid(fork(check, folder, acked, True), 0)
    assert status == 0, f"broken after a kill at {point or f'{after_s:.3f} s'} ({nth})"
    return killed


def make_bundle(folder: Path) -> Path:
    def job() -> None:
        eng = open_engine(folder / "source")
        h = eng.open(TRAVELS, session="moved")
        eng.publish(h.id, name="travels")
        eng.attempt("moved", eng.fork("moved", h.tip, "aside", [9, 9]))
        eng.commit("moved", h.tip, [1, 2, 3, 4], branch="next")
        assert eng.store is not None
        export_bundle(eng.store.vault, folder / "bundle", ["travels"], ["moved"])
        shut(eng)

    _, status = os.waitpid(fork(job), 0)
    assert status == 0
    return folder / "bundle"


def remove(home: Path) -> None:
    for folder in (home, home.with_name(home.name + "-far")):
        shutil.rmtree(folder, ignore_errors=True)


def lane(folder: Path, numbers: range, bundle: Path) -> None:
    """Rounds that each go on where the kill before it left things; now and then from nothing."""
    rng, killed = random.Random(numbers.start), 0
    home = folder / f"store-{numbers.start}"
    for number in numbers:
        if number % 25 == 0:
            remove(home)
            if number % 50 == 0:
                old_store(home)  # migrated by whoever opens it first
        killed += round_(home, number, bundle, "", 0, rng.random() ** 2 * 0.5)
    remove(home)
    (folder / f"killed-{numbers.start}").write_text(str(killed))


def main() -> None:
    folder, mode, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    bundle = make_bundle(folder)
    killed: dict[str, int] = {}
    if mode == "points":
        for point in faults.POINTS:
            for nth in range(1, rounds + 1):
                home = folder / f"{point}-{nth}"
                if point.startswith("migrate"):
                    old_store(home)
                if round_(home, nth, bundle, point, nth, 0):
                    killed[point] = killed.get(point, 0) + 1
                remove(home)
    else:
        # Two beside each other: for half of the time a round waits, for its moment or for a disk.
        lanes = [range(rounds // 2), range(rounds // 2, rounds)]
        pids = [fork(lane, folder, numbers, bundle) for numbers in lanes]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        assert codes == [0, 0]
        killed["random"] = sum(int((folder / f"killed-{n.start}").read_text()) for n in lanes)
    print(json.dumps(killed))


if __name__ == "__main__":
    main()
