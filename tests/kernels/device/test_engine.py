"""The engine on Triton kernels beside the engine on torch operators: the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for _needed in ("pydantic", "tokenizers", "transformers", "safetensors", "llguidance", "gguf"):
    pytest.importorskip(_needed)

from forkserve.engine.local import LocalBackend  # noqa: E402
from forkserve.engine.local import backend as backends  # noqa: E402
from forkserve.engine.local.gpu.runner import GpuRunner  # noqa: E402
from forkserve.errors import BackendError, ConfigError  # noqa: E402
from forkserve.kernels.jit import INTERPRETED  # noqa: E402
from forkserve.types import Batch, RowCopy, SampleSpec, SamplingParams, Span, Work  # noqa: E402
from tests.engine.conftest import tiny_config, tiny_model, tiny_tokenizer  # noqa: E402
from tests.engine.rig import Node, Rig, greedy  # noqa: E402

DEVICE = "interpreter" if INTERPRETED else "cuda"
VOCAB = 320
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}  # low, so that they bite
Pair = Callable[..., tuple[Rig, Rig]]


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of no use under the interpreter, and take some."""
    if INTERPRETED:
        monkeypatch.setattr(backends, "_WARM_UP_SAMPLES", 1)
        monkeypatch.setattr(backends, "_WARM_UP_ROWS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = repr((family, changes))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            tiny_model(family, **changes).save_pretrained(made[key])
            tiny_tokenizer(made[key])
        return made[key]

    return make


@pytest.fixture
def pair(folder: Callable[..., Path]) -> Pair:
    """Rigs over the same weights: on kernels and on torch operators, pages in the same order."""

    def make(family: str = "llama", kv: str = "none", debug: bool = False, **changes: Any) -> Any:
        path = folder(family, **changes)
        on_kernels = LocalBackend(tiny_config(), path, device=DEVICE, kv=kv, debug=debug)
        on_torch = LocalBackend(tiny_config(), path, kernels="torch")
        return Rig(on_kernels), Rig(on_torch)

    return make


def ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def close(got: list[np.ndarray], want: list[np.ndarray], tolerance: float = 1e-4) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)


def session(rig: Rig, steps: int) -> list[Any]:
    """A trunk, three branches forked at two places, decoded together; logits and tokens."""
    root = rig.root()
    out: list[Any] = list(rig.logits(rig.work(root, ids(22))))
    out += rig.logits(rig.work(root, ids(2, 1)))  # a chunk behind it
    nodes: list[Node] = [rig.fork(root), rig.fork(root), rig.fork(root, 21)]
    out += rig.logits(*(rig.work(n, ids(1 + i, 2)) for i, n in enumerate(nodes)))
    tokens = [5, 6, 7]
    for step in range(steps):
        spec = [greedy(step) for _ in nodes]
        works = [rig.work(n, [t], sample=s) for n, t, s in zip(nodes, tokens, spec, strict=True)]
        tokens = [result.token for result in rig.run(*works)]
        out.append(np.array(tokens))
    replay = rig.replay(nodes[0], 9, logits=True)
    out.append(rig.run(replay)[0].logits)
    return out


@pytest.mark.parametrize(
    ("family", "changes", "steps"),
    [
        ("llama", {}, 3),
        ("qwen3", {"num_hidden_layers": 1}, 2),
        ("gemma3", {"sliding_window": 20, "num_hidden_layers": 2}, 2),
        ("qwen2", {"num_hidden_layers": 1}, 1),
        ("mistral", {"sliding_window": 10, "num_hidden_layers": 1}, 1),
        ("gemma2", {**CAPS, "sliding_window": 20, "num_hidden_layers": 2}, 1),
    ],
)
def test_the_same_answers_as_torch(
    pair: Pair, family: str, changes: dict[str, Any], steps: int
) -> None:
    on_kernels, on_torch = pair(family, **changes)
    got, want = session(on_kernels, steps), session(on_torch, steps)
    close([x for x in got if x.ndim > 1], [x for x in want if x.ndim > 1])
    assert [x.tolist() for x in got if x.dtype == np.int64] == [
        x.tolist() for x in want if x.dtype == np.int64
    ]
    runner = on_kernels.backend._runner
    assert isinstance(runner, GpuRunner)
    # The last pass has one row: whether warming up left tables that hold it depends on the model.
    assert runner.replayed - (steps - 1) in (0, 1), "decoding replays one recorded pass"
    assert runner._planner.grown == steps - 1, "over plans that grow"


@pytest.mark.parametrize(("kv", "tolerance"), [("int8", 0.03), ("fp8", 0.15)])
def test_eight_bit_rows(pair: Pair, kv: str, tolerance: float) -> None:
    on_kernels, on_torch = pair(kv=kv, num_hidden_layers=1)
    assert on_kernels.backend.info.kv_bytes_per_token == 2 * 2 * (16 + 4)
    assert on_kernels.backend.info.extra["kv"] == kv
    got, want = (r.logits(r.work(r.root(), ids(30)))[0] for r in (on_kernels, on_torch))
    close([got], [want], tolerance)


def test_draws_without_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain requests are drawn on the device, the rest by the engine's sampler: equal tokens."""
    on_kernels, on_torch = pair(num_hidden_layers=1)
    counted = {"seen": np.array([1, 2], np.int32), "counts": np.array([2, 0], np.int32)}
    hot: dict[str, Any] = {"temperature": 1.3}
    plain = [
        SampleSpec(SamplingParams(logprobs=True), 1, 4, 0, 0),
        SampleSpec(SamplingParams(**hot, logprobs=True, stop=("x",)), 2, 5, 0, 0),
        SampleSpec(SamplingParams(**hot, stop_ids=(3,), ignore_eos=True, seed=9), 9, 4, 0, 0),
    ]
    other = [
        SampleSpec(SamplingParams(), 11, 7, 0, 0, allowed=[11, 12]),
        SampleSpec(SamplingParams(**hot, top_k=3), 12, 6, 0, 0),
        SampleSpec(SamplingParams(**hot, top_p=0.4), 13, 6, 0, 0),
        SampleSpec(SamplingParams(**hot, min_p=0.3), 14, 6, 0, 0),
        SampleSpec(SamplingParams(logit_bias={7: 100.0}), 15, 6, 0, 0),
        SampleSpec(SamplingParams(**hot, repetition_penalty=3.0), 16, 6, 0, 0, **counted),
        SampleSpec(SamplingParams(**hot, presence_penalty=2.0), 17, 6, 0, 0, **counted),
        SampleSpec(SamplingParams(**hot, frequency_penalty=2.0), 18, 6, 0, 0, **counted),
        SampleSpec(SamplingParams(logprobs=True, top_logprobs=4), 19, 6, 0, 0),
    ]

    def answers(rig: Rig) -> list[Any]:
        specs = enumerate([*plain, *other])
        return rig.run(*(rig.work(rig.root(), ids(4, i), sample=s) for i, s in specs))

    want = answers(on_torch)
    asked: list[int] = []
    real = backends.sample
    monkeypatch.setattr(backends, "sample", lambda *a: asked.append(a[1].seed) or real(*a))
    got = answers(on_kernels)
    assert [g.token for g in got] == [w.token for w in want]
    assert asked == [spec.seed for spec in other]
    for g, w in zip(got, want, strict=True):
        assert g.logprob == (None if w.logprob is None else pytest.approx(w.logprob, abs=1e-4))
    best, likeliest = got[-1].top, want[-1].top
    assert [token for token, _ in best] == [token for token, _ in likeliest]
    assert [p for _, p in best] == pytest.approx([p for _, p in likeliest], abs=1e-4)


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_rows_travel(pair: Pair, kv: str) -> None:
    """Read, copied to other pages and written back, rows and their scales stay the same rows."""
    rig, _ = pair(kv=kv, num_hidden_layers=1)
    backend, text = rig.backend, ids(40)
    first = Span("a", [4, 9, 2], 0, 40)
    backend.execute(Batch([Work("s", 0, text, 0, (), first)]))
    run = backend.read_rows([Span("a", [4, 9, 2], 0, 30), Span("b", [9, 2], 30, 10, 14)])
    assert len(run) == 40 * backend.info.kv_bytes_per_token
    backend.write_rows(Span("c", [30, 31, 32], 7, 33, 7), run, 7)
    backend.execute(Batch([], [RowCopy(4, 0, 30, 0, 7)]))
    assert backend.read_rows([Span("d", [30, 31, 32], 0, 40)]) == run
    moved = Span("d", [30, 31, 32], 0, 40)
    works = [Work("s", 1, [7], 40, (span,), None, logits=True) for span in (first, moved)]
    a, b = (backend.execute(Batch([work])).results[0].logits for work in works)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_sixteen_and_eight_bits(folder: Callable[..., Path], dtype: str) -> None:
    path = folder("llama", num_hidden_layers=1)
    on_kernels = Rig(LocalBackend(tiny_config(), path, device=DEVICE, dtype=dtype))
    on_torch = Rig(LocalBackend(tiny_config(), path, kernels="torch"))
    got, want = (r.logits(r.work(r.root(), ids(30)))[0] for r in (on_kernels, on_torch))
    close([got], [want], 3e-2)


def test_debugging_refuses_to_write_what_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pass by what works name, and in the kernel by what it does."""
    rig, _ = pair(debug=True, num_hidden_layers=1)
    backend = rig.backend
    trunk = Span("t", [3], 0, 8)
    backend.execute(Batch([Work("s", 0, ids(8), 0, (), trunk)]))
    before = backend.read_rows([trunk])
    reader = Work("s", 1, [1], 8, (trunk,), Span("r", [5], 8, 1))
    writer = Work("s", 2, [2], 0, (), Span("w", [3], 0, 1, 4))
    with pytest.raises(BackendError, match="slot 4 of page 3"):
        backend.execute(Batch([reader, writer]))
    assert backend.read_rows([trunk]) == before
    assert backend.execute(Batch([reader])).results
    monkeypatch.setattr(backend, "debug", False)  # the kernel's guard alone
    with pytest.raises(BackendError, match="a kernel wanted to write slot 4 of page 3"):
        backend.execute(Batch([reader, writer]))
    runner = backend._runner
    plan = runner._planner.plan

    def shifted(works: Any) -> Any:
        plans = plan(works)
        for each in plans.values():
            each.slots[:] += 1
        return plans

    monkeypatch.setattr(runner._planner, "plan", shifted)
    with pytest.raises(BackendError, match=r"slot 1 of page 5, which no work names"):
        backend.execute(Batch([reader]))
    assert backend.read_rows([trunk]) == before


def test_memory_for_replays_does_not_grow_with_the_context(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that nobody keeps take a GPU's memory at once: as many as a batch has, and no more."""
    monkeypatch.setattr(backends, "_DEVICE_SCRATCH", 20)
    path = folder("llama", num_hidden_layers=1)
    config = tiny_config(max_batch_tokens=4)
    backend = LocalBackend(config, path, device=DEVICE)
    assert backend._kv.scratch_rows == 32
    assert LocalBackend(config, path, kernels="torch")._kv.scratch_rows >= backend.info.max_context
    replay = Work("s", 0, ids(32), 0, (), None, logits=True)
    assert np.isfinite(backend.execute(Batch([replay])).results[0].logits).all()
    with pytest.raises(BackendError, match="33 replayed rows in one batch; at most 32 fit"):
        backend.execute(Batch([Work("s", 0, ids(33), 0, (), None, logits=True)]))


def test_limits_are_said(folder: Callable[..., Path], pair: Pair) -> None:
    path = folder("llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="float64"):
        LocalBackend(tiny_config(), path, device=DEVICE, dtype="float64")
    with pytest.raises(ConfigError, match="int4"):
        LocalBackend(tiny_config(), path, device=DEVICE, kv="int4")
    with pytest.raises(ConfigError, match="native"):
        LocalBackend(tiny_config(), path, device=DEVICE, kernels="native")
    with pytest.raises(ConfigError, match=r"GB.*capacity_pages"):
        LocalBackend(tiny_config(capacity_pages=10**12), path, device=DEVICE)
    rig, _ = pair(num_hidden_layers=1)
    rig.backend.close()
    rig.backend.close()
    with pytest.raises(BackendError, match="closed"):
        rig.backend.execute(Batch())
    assert torch.get_default_dtype() == torch.float32
