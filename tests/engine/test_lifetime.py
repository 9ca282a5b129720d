"""The bundled engine among threads and processes: closed in a pass, forked, without threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from forkserve import Engine
from forkserve.engine.local import LocalBackend
from forkserve.engine.local.gate import Gate
from forkserve.errors import BackendError
from forkserve.kernels.native import library
from forkserve.types import Batch, SamplingParams
from tests.waiting import HANGS_S

from .conftest import Checkpoints, tiny_config
from .rig import Rig, greedy

needs_native = pytest.mark.skipif(library.available() is not None, reason="no native kernels")


def run(script: str, *args: object) -> str:
    """What a process of its own prints: it may hang or die."""
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_closed_while_a_pass_runs(
    checkpoint: Checkpoints, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels=kernels)
    rig = Rig(backend)
    node = rig.root()
    want = rig.logits(rig.work(node, range(9)))[0].copy()
    spans, inside, closed = node.spans(), threading.Event(), threading.Event()
    compute: Any = backend._runner.run
    results: list[np.ndarray] = []

    def slow(*args: Any) -> Any:
        inside.set()
        assert closed.wait(HANGS_S)
        return compute(*args)

    monkeypatch.setattr(backend._runner, "run", slow)
    work = rig.work(rig.root(), range(9))
    thread = threading.Thread(target=lambda: results.extend(rig.logits(work)))
    thread.start()
    assert inside.wait(HANGS_S)
    backend.close()  # returns at once
    backend.close()
    assert backend._kv.rows.numel(), "the pass still needs it"
    closed.set()
    thread.join()
    assert (results[0] == want).all() if backend.info.extra["exact"] else len(results)
    assert not backend._kv.rows.numel(), "who leaves last frees it"
    rows = bytes(9 * backend.info.kv_bytes_per_token)
    for verb in (
        lambda: backend.execute(Batch([work])),
        lambda: backend.read_rows(spans),
        lambda: backend.read_rows_into(spans, bytearray(rows)),
        lambda: backend.write_rows(spans[0], rows, 0),
        lambda: backend.identity(lambda files: ""),
    ):
        with pytest.raises(BackendError, match="closed"):
            verb()
    backend.discard(range(100))


def test_a_gate_may_be_closed_from_inside() -> None:
    freed: list[int] = []
    gate = Gate(lambda: freed.append(1))
    with gate:
        with gate:
            gate.close()
        assert not freed
        with pytest.raises(BackendError, match="closed"), gate:
            pass
    gate.close()
    assert freed == [1]


_FORK = """
import os, signal, sys
from forkserve.engine.local import LocalBackend
from tests.engine.conftest import tiny_config
from tests.engine.rig import Rig

def logits(backend):
    rig = Rig(backend)
    return rig.logits(rig.work(rig.root(), range(200)))[0].copy()

backend = LocalBackend(tiny_config(), sys.argv[1], kernels=sys.argv[2], threads=3)
want = logits(backend)
child = os.fork()
if not child:
    signal.alarm(200)
    same = LocalBackend(tiny_config(), sys.argv[1], kernels=sys.argv[2], threads=2)
    for here in (same, backend):
        got = logits(here)
        assert (got == want).all() if sys.argv[2] == "native" else abs(got - want).max() < 1e-3
    same.close()
    backend.close()
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, f"the child ended with {status}"
assert (logits(backend) == want).all()
print("both ran")
"""


def test_a_forked_process_computes(checkpoint: Checkpoints, kernels: str) -> None:
    """OpenMP's threads are not copied by a fork, and its next parallel region would hang."""
    assert "both ran" in run(_FORK, checkpoint("llama")[1], kernels)


_NO_THREADS = """
import resource
import numpy as np
from forkserve.errors import BackendError
from forkserve.kernels.native.attention import AttentionPlan, Pool, gather
from forkserve.kernels.native.forward import Forward, LayerWeights, Shape
from forkserve.kernels.native.library import load
from forkserve.kernels.native.linear import pack
from forkserve.types import Work

library, ones = load(), np.ones((4, 16), np.float32)
def square(rows=16, threads=1):
    return pack(library, np.ones((rows, 16), np.float32), None, "float32", threads)
products = [square() for _ in range(4)]
layer = LayerWeights(ones[0], square(48), products[0], ones[0], *products[1:], ones, ones)
forward = Forward(library, Shape(16, 16, 1, 1, 16, 16, 1e-6, 1.0), [layer], final_norm=ones[0],
                  head=square(), embed=None, threads=64)
plan = AttentionPlan(library, kv_heads=1, group=1, head_dim=16, page_size=16, pages=2,
                     scratch_page=0, threads=64)
plan.build(gather([Work("", 0, [1, 2], 0, (), None)], 16))
memory = np.zeros((2, 32, 16), np.float32)
pool = Pool(memory.ctypes.data, 1, 1, 16, 16, 32, 0)
ids, rows = np.array([1, 2], np.int32), np.array([1], np.int32)
def packing():
    square(640, threads=64)
def passing():
    forward.run(ids, [plan], pool, rows, np.empty((1, 16), np.float32))
def attending():
    plan.attend(pool, np.ones((2, 1, 16), np.float32))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + 100_000_000, before[1]))
for verb in (packing, passing, attending, packing, passing, attending):
    try:
        verb()
    except BackendError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
packing()
passing()
attending()
forward.close()
print("ran")
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by way of /proc")
def test_threads_that_cannot_be_had_are_an_error_and_no_hang() -> None:
    said = run(_NO_THREADS)
    assert said.count("cannot start 64 threads to pack") == 2
    assert said.count("cannot start 64 threads for attention") == 2
    assert said.count("cannot start its threads") == 2
    assert "ran" in said


def test_one_logit_that_is_no_number_is_an_error(checkpoint: Checkpoints, kernels: str) -> None:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels=kernels)
    if kernels == "native":
        head = backend._runner._forward._kept[2].arrays[0].view(np.float32)  # type: ignore[attr-defined]
        head[5] = np.nan  # of output 5
    else:
        decoder = backend._runner._decoder  # type: ignore[attr-defined]
        with torch.inference_mode():
            decoder.head.weight[5, 0] = float("nan")
    rig = Rig(backend)
    for sample in (greedy(), greedy(temperature=0.7)):
        work = rig.work(rig.root(), range(9), sample=sample)
        with pytest.raises(BackendError, match="no logit is finite"):
            rig.run(work)
    logits = rig.logits(rig.work(rig.root(), range(3)))[0]
    assert np.isnan(logits).sum() == 3
    backend.close()


class _LittleMemory:
    """The native library on a machine where a pass of more than some rows finds no memory."""

    def __init__(self, real: Any, most: int) -> None:
        self.real, self.most = real, most

    def fs_forward_run(self, handle: Any, call: Any) -> int:
        return 1 if call._obj.n > self.most else int(self.real.fs_forward_run(handle, call))


@needs_native
def test_without_memory_a_native_batch_is_tried_smaller(checkpoint: Checkpoints) -> None:
    folder, prompt = checkpoint("llama")[1], [i % 250 for i in range(90)]
    go_on = SamplingParams(ignore_eos=True)
    with Engine(LocalBackend(tiny_config(), folder, kernels="native")) as cold:
        want = cold.generate(cold.open(prompt).id, 5, params=go_on)
    backend = LocalBackend(tiny_config(), folder, kernels="native")
    forward: Any = backend._runner._forward  # type: ignore[attr-defined]
    real = forward._library
    forward._library = _LittleMemory(real, 20)
    with Engine(backend) as eng:
        assert eng.generate(eng.open(prompt).id, 5, params=go_on) == want
        assert eng.stats().failed_passes
        eng.check()
        forward._library = real
