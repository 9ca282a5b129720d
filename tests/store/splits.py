"""One generation of SmolLM2 cut after every token: written, killed, resumed.  Run as a program.

    python -m store.splits write FOLDER    # FOLDER/0 .. FOLDER/8: the store after k tokens
    python -m store.splits resume FOLDER   # FOLDER/k.npz: what each goes on with, and `whole.npz`

The writer kills itself; the reader forks a child for every split, so that each has rows from its
directory alone, and loads the weights once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forkserve import Engine, ForkServeConfig
from forkserve.engine import LocalBackend
from forkserve.store import Store
from forkserve.types import Batch, BatchResult, SamplingParams

COUNT = 8
PROMPT = [t % 40_000 for t in range(7, 7 + 268 * 131, 131)]  # one whole chunk and twelve tokens
PARAMS = SamplingParams(ignore_eos=True)


class Recording(LocalBackend):
    """Keeps the logits that every token was taken from."""

    def __init__(self) -> None:
        config = ForkServeConfig(capacity_pages=64, prefix_index=False)
        super().__init__(config, dtype="float32", kernels="native", threads=1)
        self.rows: list[np.ndarray[Any, Any]] = []

    def execute(self, batch: Batch) -> BatchResult:
        works = [
            replace(work, logits=work.logits or work.sample is not None) for work in batch.works
        ]
        done = super().execute(replace(batch, works=works))
        for work, result in zip(works, done.results, strict=True):
            if work.sample is not None:
                assert result.logits is not None
                self.rows.append(np.array(result.logits))
        return done


def write(folder: Path) -> None:
    eng = Engine(Recording(), store=folder / "live")
    eng.open(PROMPT, session="a")
    assert eng.publish("a").wait().written == 1
    for k in range(COUNT + 1):
        # What a killed writer leaves: the memory that its processes share (-shm) is not part of it.
        shutil.copytree(folder / "live", folder / str(k), ignore=shutil.ignore_patterns("*-shm"))
        if k < COUNT:
            eng.generate("a", 1, params=PARAMS)
    os.kill(os.getpid(), signal.SIGKILL)


def save(backend: Recording, out: Path, tokens: list[int], **facts: Any) -> None:
    np.savez(out, tokens=tokens, logits=np.array(backend.rows), **facts)


def whole(backend: Recording, folder: Path) -> None:
    """The run that nothing interrupts, without a store."""
    eng = Engine(backend)
    eng.open(PROMPT, session="a")
    save(backend, folder / "whole.npz", eng.generate("a", COUNT, params=PARAMS))


def go_on(backend: Recording, folder: Path, k: int) -> None:
    with Store(folder / str(k), restore="always") as store:
        eng = Engine(backend, store=store)
        h = eng.resume("a")
        text = eng.tokens("a")
        tokens = eng.generate("a", COUNT - k, params=PARAMS)
        facts = {"restored": h.cached_tokens, "before": text[len(PROMPT) :]}
        computed = eng.stats().prefilled_tokens.committed
        owners = [event["pid"] for event in store.catalog.events("takeover")]
        save(backend, folder / f"{k}.npz", tokens, computed=computed, owners=owners, **facts)
        eng.shutdown()


def child(job: Any, *args: Any) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            job(*args)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"{job.__name__} {args[2:]} failed with status {status}")


def resume(folder: Path) -> None:
    backend = Recording()
    child(whole, backend, folder)
    for k in range(COUNT + 1):
        child(go_on, backend, folder, k)


if __name__ == "__main__":
    {"write": write, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
