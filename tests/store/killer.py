"""Kills children at every step, or at any moment, and checks what they leave.  Run as a program.

It has no thread of its own, so it may fork: a round costs milliseconds instead of an interpreter.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.store import Store, faults
from forkserve.store.bundle import export_names, import_bundle
from forkserve.store.collect import collect
from forkserve.store.rebuild import verify

from .engines import PROMPT, cold

CONFIG = ForkServeConfig(page_size=16, capacity_pages=512)


def open_engine(folder: Path) -> Engine:
    return Engine(MockBackend(CONFIG), store=folder)


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
        eng.publish("a", name=name, wait=turn % 2 == 0)
        if turn % 3 == 2:
            with store.catalog.write() as db:  # some states lose their name: garbage to collect
                db.execute("DELETE FROM name WHERE name LIKE ?", (f"n{rng.randrange(99)}%",))
            other = eng.open([rng.randrange(99) for _ in range(300)])
            eng.publish(other.id)
            eng.close(other.id)
        if turn % 3 == 1:
            import_bundle(store.vault, bundle)
            with store.catalog.write() as db:
                db.execute("DELETE FROM name WHERE name = 'travels'")
        if turn % 2:
            collect(store.vault, grace_s=-5)
    eng.shutdown()


def check(folder: Path, acked: list[int], writing: bool) -> None:
    """After a kill: database and files agree, no acknowledged token is lost, work goes on."""
    with Store(folder, "shared") as store:
        report = verify(store.vault)
        assert report.clean, report
        names = store.catalog.read("SELECT name FROM name")
    eng = open_engine(folder)
    assert eng.store is not None
    if acked or "a" in eng.stored_sessions():
        eng.resume("a")
        text = eng.tokens("a")
        assert text[: len(acked)] == acked, (len(text), len(acked))
        eng.check()
        assert eng.generate("a", 2) == cold(text, 2)
        if writing:
            assert eng.publish("a").tokens == len(eng.tokens("a")) // 256 * 256
    if names and writing:
        eng.tokens(eng.restore(str(names[0][0])).id)
    collect(eng.store.vault, grace_s=-5)
    assert verify(eng.store.vault).clean
    assert verify(eng.store.vault).orphans == 0
    assert not list(folder.rglob(".tmp*"))
    eng.shutdown()


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
        h = eng.open([n * 7 % 251 for n in range(600)])
        eng.publish(h.id, name="travels")
        assert eng.store is not None
        export_names(eng.store.vault, folder / "bundle")
        eng.shutdown()

    _, status = os.waitpid(fork(job), 0)
    assert status == 0
    return folder / "bundle"


def main() -> None:
    folder, mode, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    bundle = make_bundle(folder)
    killed: dict[str, int] = {}
    if mode == "points":
        for point in faults.POINTS:
            for nth in range(1, rounds + 1):
                home = folder / f"{point}-{nth}"
                if round_(home, nth, bundle, point, nth, 0):
                    killed[point] = killed.get(point, 0) + 1
                shutil.rmtree(home)
    else:
        rng = random.Random(1)
        home = folder / "store"
        for number in range(rounds):
            if number % 25 == 0:
                shutil.rmtree(home, ignore_errors=True)
            if round_(home, number, bundle, "", 0, rng.random() ** 2 * 0.5):
                killed["random"] = killed.get("random", 0) + 1
    print(json.dumps(killed))


if __name__ == "__main__":
    main()
