"""The bundled engine: a decoder over paged KV on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forkserve.clock import Clock, SystemClock
from forkserve.config import ForkServeConfig, require_config
from forkserve.engine.local.checkpoint import open_checkpoint
from forkserve.engine.local.cost import CostModel
from forkserve.engine.local.forked import torch_threads
from forkserve.engine.local.gate import Gate
from forkserve.engine.local.portable import identity
from forkserve.engine.local.runner import Floats, Ints, Runner, Setup, make_runner
from forkserve.engine.local.writes import refuse_writes
from forkserve.engine.protocol import Tokenizer
from forkserve.engine.sampling import logprobs, sample
from forkserve.errors import BackendError, ConfigError, ModelError
from forkserve.types import Batch, BatchResult, ModelInfo, Span, Work, WorkResult
from forkserve.values import whole

__all__ = ["LocalBackend"]

_WARM_UP_ROWS = 16
_DEVICE_SCRATCH = 8192  # rows of a GPU for works that may not write: memory is taken for each
_WARM_UP_SAMPLES = 3


class LocalBackend:
    """Satisfies `forkserve.engine.protocol.Backend`.

    model: a GGUF file, a directory of safetensors, or "smollm2".  dtype: the execution variant:
    "float32", "bfloat16", "int8", or "w8a16" (native kernels alone).
    kernels: "native", "torch", or "auto", which takes the native ones where they were built and
    fit; `info.extra` says what was taken and why.  threads: None leaves torch's own number.
    device: "cuda" or "cuda:1" runs on a GPU, on Triton kernels (docs/kernels.md).  kv: "int8" or
    "fp8" keeps KV rows in 8 bits there.  debug: refuse to write rows that the page pool says stand,
    or that the same batch reads, and on a GPU any row but those that works name (slower).
    Raises `ModelError` for weights that are missing, corrupt or unsupported, `ConfigError` for a
    config that is none or a device that is not there.
    """

    def __init__(
        self,
        config: ForkServeConfig,
        model: str | Path = "smollm2",
        *,
        dtype: str = "float32",
        kernels: str = "auto",
        threads: int | None = None,
        device: str = "cpu",
        kv: str = "none",
        debug: bool = False,
    ) -> None:
        require_config(config, "LocalBackend")
        if threads is not None and whole("threads", threads) < 1:
            raise ConfigError(f"threads={threads} is out of range; give at least 1")
        threads = torch_threads(threads)
        self.config = config
        self.debug = debug
        self.clock: Clock = SystemClock()
        source = open_checkpoint(model)
        try:
            context = min(source.spec.context, config.max_context or source.spec.context)
            source.spec = spec = source.spec.within(context)
            tokenizer = source.load_tokenizer()
            tokenizer.split_special_tokens = config.split_special_tokens
            self.tokenizer: Tokenizer = tokenizer
            eos_ids = source.eos_ids(tokenizer)
            replayed = context if device == "cpu" else min(context, _DEVICE_SCRATCH)
            setup = Setup(
                variant=dtype,
                context=context,
                page_size=config.page_size,
                capacity_pages=config.capacity_pages,
                scratch_rows=max(config.max_batch_tokens, replayed, _WARM_UP_ROWS),
                threads=threads,
                device=device,
                kv=kv,
                debug=debug,
            )
            with _enough_memory(source.name, context):
                runner, why_torch = make_runner(source, setup, kernels)
            self._files = source.files()
        finally:
            source.close()
        self._spec = spec
        self._runner = runner
        self._kv = runner.kv
        self._gate = Gate(runner.close)
        self.info = ModelInfo(
            name=source.name,
            vocab_size=spec.vocab,
            max_context=context,
            eos_ids=eos_ids,
            kv_bytes_per_token=runner.kv.bytes_per_token,
            device=device,
            dtype=dtype,
            extra={
                "family": spec.family,
                "layers": spec.layers,
                "heads": spec.heads,
                "kv_heads": spec.kv_heads,
                "head_dim": spec.head_dim,
                "threads": threads if runner.kernels == "native" else torch.get_num_threads(),
                "kernels": runner.kernels,
                "instruction_set": getattr(runner, "isa", None),
                "why_torch": why_torch,
                "exact": runner.exact,
                "kv": kv,
                "window": spec.window,
            },
        )
        with _enough_memory(source.name, context):
            self._cost = self._warm_up(runner)

    def execute(self, batch: Batch) -> BatchResult:
        """Do the copies, then one forward pass over all works."""
        begin = self.clock.now_ms()
        torch_threads()
        if self.debug:
            refuse_writes(batch, self.config.page_size)
        with self._gate:
            targets = [Span("", [c.dst_page], 0, c.rows) for c in batch.copies]
            self._kv.take([*targets, *(work.write for work in batch.works if work.write)])
            self._kv.copy(batch.copies)
            results = self._run(self._runner, batch.works) if batch.works else []
        elapsed = self.clock.now_ms() - begin
        rows = sum(len(work.tokens) for work in batch.works)
        if rows:
            attended = sum(len(work.tokens) * work.start for work in batch.works)
            self._cost.observe(rows, attended / rows, elapsed)
        return BatchResult(results, elapsed)

    def predict_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Predicted time of a pass over `new_tokens` rows that attend to `context_tokens` each."""
        return self._cost.predict_ms(new_tokens, context_tokens)

    def discard(self, pages: Sequence[int]) -> None:
        """Long runs of freed pages go back to the operating system."""
        with contextlib.suppress(BackendError), self._gate:  # a closed one has none any more
            self._kv.discard(pages)

    def identity(self, weights: Callable[[Sequence[Path]], str]) -> Mapping[str, Any]:
        """What must be equal for stored rows to be ours; see `Portable`."""
        with self._gate:
            return identity(self._spec, self.info, self._runner, self._files, weights)

    def read_rows(self, spans: Sequence[Span]) -> bytearray:
        """Rows of consecutive spans as bytes; see `Portable`."""
        with self._gate:
            return self._kv.read(spans)

    def read_rows_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """The same into a buffer that is there already; see `Refilling`."""
        with self._gate:
            self._kv.read_into(spans, out, rest)

    def write_rows(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """Rows of a stored run into the slots of a span; see `Portable`."""
        with self._gate:
            self._kv.take([span])
            self._kv.write(span, rows, at)

    def close(self) -> None:
        """Drop weights and KV, now or when the pass that uses them has ended.  Idempotent."""
        self._gate.close()

    # -- one pass --------------------------------------------------------------------------

    def _run(self, runner: Runner, works: Sequence[Work]) -> list[WorkResult]:
        self._check(works)
        ids = np.concatenate([np.asarray(work.tokens) for work in works])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.info.vocab_size:
            raise BackendError(
                f"token ids {low}..{high} are outside the vocabulary of {self.info.vocab_size}"
            )
        wanted: list[int] = []
        parts: list[tuple[int, int]] = []  # each work's range within `wanted`
        end = 0
        for work in works:
            begin, end = end, end + len(work.tokens)
            if work.all_logits:
                rows = range(begin, end)
            else:
                rows = range(end - 1, end) if work.sample or work.logits else range(0)
            parts.append((len(wanted), len(wanted) + len(rows)))
            wanted.extend(rows)
        keep = any(work.all_logits for work in works)
        logits, top = runner.run(works, ids.astype(np.int32), wanted, keep)
        drawn: Mapping[int, tuple[int, float]] = getattr(runner, "drawn", {})
        return [
            _result(work, logits[low:high], top[low:high], drawn.get(high - 1))
            for work, (low, high) in zip(works, parts, strict=True)
        ]

    def _check(self, works: Sequence[Work]) -> None:
        """Refuse what would read or write outside the tensors."""
        unwritten = 0
        for work in works:
            count = len(work.tokens)
            if not count:
                raise BackendError(f"work of node {work.node} has no tokens")
            if work.start + count > self.info.max_context:
                raise BackendError(
                    f"work of node {work.node} ends at position {work.start + count}, beyond the "
                    f"context of {self.info.max_context}"
                )
            unwritten += count if work.write is None else 0
        if unwritten > self._kv.scratch_rows:
            raise BackendError(
                f"{unwritten} replayed rows in one batch; at most {self._kv.scratch_rows} fit"
            )

    def _warm_up(self, runner: Runner) -> CostModel:
        """A first cost model from passes over scratch rows; no page is touched."""

        def time(rows: int) -> float:
            work = Work("", 0, [0] * rows, 0, (), None, logits=True)
            samples = []
            for _ in range(_WARM_UP_SAMPLES):
                begin = self.clock.now_ms()
                self._run(runner, [work])
                samples.append(self.clock.now_ms() - begin)
            return min(samples)  # one that was disturbed would overrate every larger pass

        rows = min(_WARM_UP_ROWS, self.info.max_context)
        many = time(rows)  # first, since it also pays for touching the weights
        return CostModel(time(1), rows, many)


@contextlib.contextmanager
def _enough_memory(name: str, context: int) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise ModelError(
            f"{name}: no memory for its weights and tables of {context} positions; "
            "lower max_context, or take another dtype"
        ) from error


def _result(
    work: Work, logits: Floats, top: Ints, drawn: tuple[int, float] | None = None
) -> WorkResult:
    """What the work asked for, from its rows of logits and the ids of their largest.

    drawn: token and log p, where the runner has drawn already.
    """
    result = WorkResult()
    if work.all_logits:
        result.logits = np.asarray(logits)
    elif work.logits:
        result.logits = logits[-1].copy()
    if work.sample is not None and drawn is not None:
        result.token = drawn[0]
        result.logprob = drawn[1] if work.sample.params.logprobs else None
    elif work.sample is not None:
        row, params = logits[-1], work.sample.params
        result.token = sample(row, work.sample, int(top[-1]))
        if params.logprobs:
            result.logprob, result.top = logprobs(row, result.token, params.top_logprobs)
    return result
