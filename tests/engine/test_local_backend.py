"""The local backend's contract: ragged batches, replays, copies, discards, limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from forkserve.config import ForkServeConfig
from forkserve.engine.local import LocalBackend
from forkserve.engine.local.cost import CostModel
from forkserve.errors import BackendError, ConfigError
from forkserve.kernels.native import library
from forkserve.types import Batch, RowCopy, SampleSpec, SamplingParams, Span, Work

from .conftest import VOCAB, Checkpoints, assert_close, reference, tiny_config
from .rig import Rig, greedy, kv_bytes, kv_rows


@pytest.fixture
def backend(checkpoint: Checkpoints, kernels: str) -> Iterator[LocalBackend]:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels=kernels)
    assert backend.info.extra["kernels"] == kernels
    yield backend
    backend.close()


def ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def mixed_works(rig: Rig, seed: int) -> list[Work]:
    """Prefills, chunks and decodes of several trees, ready to run in one batch."""
    draw = random.Random(seed)
    nodes = []
    for _ in range(2):
        root = rig.root()
        rig.run(rig.work(root, ids(draw.randrange(3, 120), draw.random())))
        nodes += [root, *(rig.fork(root, draw.randrange(1, root.end + 1)) for _ in range(3))]
    works = [rig.work(node, ids(draw.choice([1, 1, 1, 4, 30]), 7)) for node in nodes[1:]]
    return [*works, rig.work(rig.root(), ids(17, 8))]


@pytest.mark.parametrize("seed", range(3))
def test_a_row_does_not_depend_on_its_batch(backend: LocalBackend, seed: int) -> None:
    rig = Rig(backend, seed)
    works = mixed_works(rig, seed)
    together = rig.logits(*works)
    for work, want in zip(works, together, strict=True):
        (alone,) = rig.logits(work)
        np.testing.assert_allclose(alone, want, atol=1e-5, rtol=0)


def test_results_are_given_where_they_are_asked(backend: LocalBackend) -> None:
    rig = Rig(backend)
    works = [
        rig.work(rig.root(), ids(5)),
        rig.work(rig.root(), ids(5), logits=True),
        rig.work(rig.root(), ids(5), all_logits=True),
        rig.work(rig.root(), ids(5), sample=greedy(5, logprobs=True)),
    ]
    nothing, last, every, drawn = rig.run(*works)
    assert nothing.token is None
    assert nothing.logits is None
    assert every.logits.shape == (5, VOCAB)
    np.testing.assert_allclose(last.logits, every.logits[-1], atol=1e-5)
    assert drawn.logits is None
    assert drawn.token == int(last.logits.argmax())
    p = torch.log_softmax(torch.tensor(last.logits), 0)[drawn.token]
    assert drawn.logprob == pytest.approx(float(p), abs=1e-4)


def test_logits_are_computed_for_rows_that_are_asked_and_no_others(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(backend)
    asked: list[list[int]] = []
    real = backend._runner.run

    def spy(works: Any, tokens: Any, wanted: Any, keep: bool) -> Any:
        asked.append(list(wanted))
        logits, top = real(works, tokens, wanted, keep)
        assert len(logits) == len(top) == len(wanted)
        return logits, top

    monkeypatch.setattr(backend._runner, "run", spy)
    rig.run(
        rig.work(rig.root(), ids(5)),
        rig.work(rig.root(), ids(5), logits=True),
        rig.work(rig.root(), ids(3), all_logits=True),
        rig.work(rig.root(), ids(5), sample=greedy(5)),
    )
    rig.run(rig.work(rig.root(), ids(40)))
    assert asked == [[9, 10, 11, 12, 17], []]


def test_replay_gives_the_logits_and_writes_nothing(backend: LocalBackend) -> None:
    rig = Rig(backend)
    node, text = rig.root(), ids(30)
    first = rig.run(rig.work(node, text, logits=True))[0].logits
    before = kv_bytes(backend)
    again = rig.run(rig.replay(node, text[-1], logits=True))[0].logits
    assert kv_bytes(backend) == before
    np.testing.assert_allclose(again, first, atol=1e-5, rtol=0)


def test_only_named_rows_are_written(backend: LocalBackend) -> None:
    rig = Rig(backend)
    rig.run(rig.work(rig.root(), ids(13)))
    written = ~np.isnan(kv_rows(backend))
    assert (written.sum(2) == 13).all()


def test_row_copies_come_first_and_in_order(backend: LocalBackend, checkpoint: Any) -> None:
    """A packed tail: r rows of the parent's last page are copied into the child's first one."""
    model, _ = checkpoint("llama")
    page, text = backend.config.page_size, ids(page_rows := 16 * 2 + 3)
    backend._kv.rows.fill_(float("nan"))
    span = Span("a", [4, 9, 2], 0, page_rows)
    backend.execute(Batch([Work("s", 0, text, 0, (), span)]))
    copies = [RowCopy(2, 0, 7, 3, 2), RowCopy(2, 2, 7, 5, 1), RowCopy(7, 3, 11, 0, 3)]
    context = (Span("a", [4, 9, 2], 0, 2 * page), Span("b", [11], 2 * page, 3))
    work = Work("s", 1, [5], page_rows, context, Span("b", [11], page_rows, 1, 3), logits=True)
    result = backend.execute(Batch([work], copies)).results[0]
    want = reference(model, [*text, 5])[-1]
    assert_close(result.logits, want)
    for row in (7 * page + 2, 7 * page + 6, 11 * page + 4):  # r rows moved, not P
        assert np.isnan(kv_rows(backend, row, 1)).all()


def test_an_empty_batch_may_only_copy(backend: LocalBackend) -> None:
    row = np.full(backend.info.kv_bytes_per_token // 4, 3.0, np.float32).tobytes()
    backend.write_rows(Span("", [0], 0, 1), row, 0)
    assert backend.execute(Batch([], [RowCopy(0, 0, 1, 0, 1)])).results == []
    assert (kv_rows(backend, backend.config.page_size, 1) == 3.0).all()


def test_sampling_does_not_depend_on_the_batch(backend: LocalBackend) -> None:
    rig = Rig(backend)
    spec = SampleSpec(SamplingParams(temperature=1.0), seed=3, position=9, request=0, step=0)
    alone = rig.run(rig.work(rig.root(), ids(9, 1), sample=spec))[0].token
    others = [rig.work(rig.root(), ids(4, i), sample=greedy()) for i in range(5)]
    assert rig.run(*others, rig.work(rig.root(), ids(9, 1), sample=spec))[5].token == alone


@pytest.mark.parametrize("variant", ["bfloat16", "int8"])
def test_small_numbers_are_close_to_float32(
    checkpoint: Checkpoints, kernels: str, variant: str
) -> None:
    model, folder = checkpoint("qwen2")
    backend = LocalBackend(tiny_config(), folder, dtype=variant, kernels=kernels)
    assert backend.info.dtype == variant
    rig, text = Rig(backend), ids(60)
    node = rig.root()
    want = reference(model, text)
    got = np.concatenate(
        [rig.logits(rig.work(node, text[a:b]))[0] for a, b in ((0, 50), (50, 53), (53, 60))]
    )
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 3e-2


def test_errors_leave_the_backend_usable(backend: LocalBackend) -> None:
    rig = Rig(backend)
    with pytest.raises(BackendError, match="no tokens"):
        backend.execute(Batch([Work("s", 0, [], 0, (), None)]))
    with pytest.raises(BackendError, match="outside the vocabulary"):
        backend.execute(Batch([Work("s", 0, [VOCAB], 0, (), None)]))
    with pytest.raises(BackendError, match="beyond the context"):
        backend.execute(Batch([Work("s", 0, [1], 512, (), None)]))
    works = [Work("s", i, [1] * 512, 0, (), None) for i in range(17)]
    with pytest.raises(BackendError, match="8704 replayed rows"):
        backend.execute(Batch(works))
    assert rig.run(rig.work(rig.root(), [1], logits=True))[0].logits is not None


def test_use_after_close(checkpoint: Checkpoints, kernels: str) -> None:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels=kernels)
    backend.close()
    backend.close()
    backend.discard([1])
    with pytest.raises(BackendError, match="closed"):
        backend.execute(Batch())
    with pytest.raises(BackendError, match="closed"):
        backend.read_rows([Span("", [0], 0, 1)])
    with pytest.raises(BackendError, match="closed"):
        backend.write_rows(Span("", [0], 0, 1), b"", 0)


@pytest.mark.skipif(library.available() is not None, reason=str(library.available()))
def test_native_kernels_touch_nothing_outside_the_pool(checkpoint: Checkpoints) -> None:
    backend = LocalBackend(tiny_config(), checkpoint("llama")[1], kernels="native")
    beyond = Span("", [10**6], 0, 1)
    with pytest.raises(BackendError, match="outside the pool of 2048 rows"):
        backend.read_rows([beyond])
    with pytest.raises(BackendError, match="outside the pool"):
        backend.write_rows(beyond, bytes(backend.info.kv_bytes_per_token), 0)
    with pytest.raises(BackendError, match="outside the pool"):
        backend.execute(Batch([], [RowCopy(0, 0, 128, 0, 1)]))
    for context, write in (((beyond,), Span("w", [0], 1, 1)), ((), beyond)):
        work = Work("s", 0, [1], len(context), context, write)
        with pytest.raises(BackendError, match="outside the pool"):
            backend.execute(Batch([work]))
    backend.close()


def test_a_forced_instruction_set_is_no_reason_for_torch(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKSERVE_ISA", "sse2")
    with pytest.raises(ConfigError, match="'sse2' is unknown"):
        LocalBackend(tiny_config(), checkpoint("llama")[1])


def test_settings_are_checked(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint("llama")[1]
    with pytest.raises(ConfigError, match=r"first: LocalBackend\(ForkServeConfig\(\), \.\.\.\)"):
        LocalBackend("smollm2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float16"):
        LocalBackend(tiny_config(), folder, dtype="float16")
    with pytest.raises(ConfigError, match=r"dtype=torch\.bfloat16 .* 'float32', 'bfloat16'"):
        LocalBackend(tiny_config(), folder, dtype=torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        LocalBackend(tiny_config(), folder, threads=0)
    with pytest.raises(ConfigError, match="threads='2' must be an integer"):
        LocalBackend(tiny_config(), folder, threads="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kernels='cuda' is unknown; auto, native, torch"):
        LocalBackend(tiny_config(), folder, kernels="cuda")
    with pytest.raises(ConfigError, match="page_size 8 is not a multiple of 16"):
        LocalBackend(tiny_config(page_size=8), folder, kernels="native")
    with pytest.raises(ConfigError, match="'w8a16' needs the native kernels"):
        LocalBackend(tiny_config(), folder, dtype="w8a16", kernels="torch")
    with pytest.raises(ConfigError, match=r"GB.*capacity_pages"):
        LocalBackend(ForkServeConfig(capacity_pages=10**13), folder)
    plain = LocalBackend(tiny_config(page_size=8), folder)
    assert plain.info.extra["kernels"] == "torch"
    assert "multiple of 16" in plain.info.extra["why_torch"]
    assert "runs on torch kernels, which are slower: page_size 8 is not" in caplog.text
    small = LocalBackend(tiny_config(max_context=64), folder)
    assert small.info.max_context == 64
    small.close()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_follows_live_pages() -> None:
    """A large pool costs nothing until rows are written; long freed runs are given back.

    The native layout is the same but for the order inside a page.
    """
    from forkserve.engine.local.kv import KVSize, PagedKV

    before = resident_bytes()
    kv = PagedKV(KVSize(4, 2, 64, 16, 1 << 20, 64, torch.float32), spare_bytes=0)
    assert kv.rows.nbytes > 60e9
    assert resident_bytes() - before < 20e6
    rows = 512 * 16
    kv.rows[:, :, :rows] = 1.0
    live = rows * kv.bytes_per_token
    assert 0.9 * live < resident_bytes() - before < 1.2 * live + 20e6
    kv.discard(range(4, 512))
    assert resident_bytes() - before < 0.1 * live + 20e6
    assert (kv.rows[:, :, : 4 * 16] == 1.0).all()
    kv.discard([600, 601])  # short runs stay


def test_cost_model_learns_and_is_monotone() -> None:
    cost = CostModel(10.0, 16, 40.0)
    sizes = [1, 2, 3, 8, 16, 17, 100, 512, 5000]
    for _ in range(40):
        for n in (1, 8, 512):
            for context in (0, 2000):
                cost.observe(n, context, 20 + 2 * n + 1e-3 * n * context)
    cost.observe(8, 0, 1e6)  # an outlier
    predictions = [cost.predict_ms(n, 100) for n in sizes]
    assert predictions == sorted(predictions)
    for n in (1, 8, 512):
        for context in (0, 2000):
            truth = 20 + 2 * n + 1e-3 * n * context
            assert 0.5 * truth < cost.predict_ms(n, context) < 2 * truth
    assert cost.predict_ms(0) == 0.0
    assert cost.predict_ms(8, 2000) > cost.predict_ms(8, 0)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("place", [1, 16, 128])
def test_one_bad_sample_spoils_no_size(place: int, factor: float) -> None:
    """The first one too, and sizes that were never seen even less."""
    sizes = [1, 5, 16, 64, 200, 2048, 100_000]
    cost = CostModel(10.0, 16, 40.0)
    before = [cost.predict_ms(n) for n in sizes]
    cost.observe(place, 0, before[0] * factor)
    after = [cost.predict_ms(n) for n in sizes]
    assert after == sorted(after)
    assert all(a / 2 <= b <= 2.01 * a for a, b in zip(before, after, strict=True))


def test_sizes_that_are_known_well_are_not_lifted_by_a_smaller_one() -> None:
    cost = CostModel(10.0, 16, 40.0)
    for _ in range(20):
        cost.observe(512, 0, 500.0)
    for _ in range(3):
        cost.observe(8, 0, 1e9)
    assert cost.predict_ms(8) <= cost.predict_ms(512) < 600


def test_sizes_between_and_beyond_follow_their_neighbours() -> None:
    """A machine of half the speed that was thought: everything takes twice as long."""
    cost = CostModel(10.0, 16, 40.0)
    truth = CostModel(20.0, 16, 80.0)
    for _ in range(30):
        for n in (1, 16, 256):
            cost.observe(n, 0, truth.predict_ms(n))
    for n in (1, 4, 16, 64, 256, 1000, 10_000):
        assert cost.predict_ms(n) == pytest.approx(truth.predict_ms(n), rel=0.02)


def test_predictions_are_refined_by_execution(backend: LocalBackend) -> None:
    rig = Rig(backend)
    assert backend.predict_ms(1) > 0
    for _ in range(3):
        rig.run(rig.work(rig.root(), ids(100)))
    assert backend.predict_ms(100) <= backend.predict_ms(200, 50)
