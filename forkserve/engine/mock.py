"""A deterministic language model that really reads its KV rows through the page tables.

Two layers of integer arithmetic, so that every sum is exact whatever the batch or the chunking::

    a_t = mix(token_t, t)                       layer 1 row
    b_t = mix(a_t, sum of a_j for j <= t)       layer 2 row: depends on everything before
    logits_t = hash(id, sum of b_j for j <= t)

With a window of w rows a sum runs over t - w < j <= t.
A row that is missing, repeated, stale, from another sequence or at another position changes every
later token.  Free slots hold random values, so reading one does as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forkserve.clock import Clock, VirtualClock
from forkserve.config import ForkServeConfig, require_config
from forkserve.engine.protocol import Tokenizer
from forkserve.engine.sampling import logprobs, sample
from forkserve.errors import BackendError, ConfigError, ModelError
from forkserve.prompt_text import PromptText, content, joined, occurrences
from forkserve.types import Batch, BatchResult, ModelInfo, SampleSpec, Span, Work, WorkResult
from forkserve.values import utf8

__all__ = ["ByteTokenizer", "MockBackend"]

U64 = npt.NDArray[np.uint64]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|eos|>")
_MARKERS = re.compile("|".join(map(re.escape, _SPECIAL)))
EOS = 259
_ASKED = 4096  # requests that are remembered


class ByteTokenizer:
    """One id per byte, then four markers; ids above are unused and decode to nothing.

    split_special_tokens: markers in chat messages are content; False trusts all of them.
    """

    split_special_tokens = True

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if not special or "<|" not in text:
            return list(utf8(text))
        ids: list[int] = []
        at = 0
        for (begin, end), own in occurrences(text, _MARKERS):
            if own:
                ids += [*utf8(text[at:begin]), 256 + _SPECIAL.index(text[begin:end])]
                at = end
        return ids + list(utf8(text[at:]))

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        out = bytearray()
        for i in ids:
            if i < 256:
                out.append(i)
            elif not skip_special and i < 256 + len(_SPECIAL):
                out += _SPECIAL[i - 256].encode()
        return bytes(out)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> PromptText:
        """ChatML, with the tools as JSON lines in a system turn of their own."""
        import json

        said = content if self.split_special_tokens else PromptText
        parts: list[str] = []
        if tools:
            listing = said("\n".join(json.dumps(t) for t in tools))
            parts += ["<|im_start|>system\n", listing, "<|im_end|>\n"]
        for message in messages:
            parts += ["<|im_start|>", said(str(message["role"])), "\n"]
            given = message.get("content") or ""
            if not isinstance(given, str):
                raise ModelError(f"the mock's chat template takes text, not {given!r}")
            parts.append(said(given))
            for call in message.get("tool_calls") or ():
                written = json.dumps(call.get("function", call))
                parts += ["<tool_call>", said(written), "</tool_call>"]
            parts.append("<|im_end|>\n")
        return joined([*parts, "<|im_start|>assistant\n" if add_generation_prompt else ""])


class MockBackend:
    """The mock.  Everything it does is a function of its arguments and of what it was asked.

    vocab_size, max_context: of the model that it stands for.  force_preempt_every: tell the engine
    to pre-empt a running generation every n-th pass (tests).
    replies: texts or token lists that successive generations answer with, in order, each ended by
    end-of-text; afterwards the model speaks for itself.
    window: rows that each layer sees, the row itself included; 0 sees all.
    step_ms: of a pass.  prefill_us: what each of its new tokens adds.
    clock: time; the default virtual clock advances by the cost model of each pass, in ms:
    ``step_ms + prefill_us / 1000 * new tokens``.  on_batch: called with every batch that is run.
    """

    def __init__(
        self,
        config: ForkServeConfig | None = None,
        *,
        vocab_size: int = 1024,
        max_context: int = 2_000_000,
        clock: Clock | None = None,
        step_ms: float = 0.2,
        prefill_us: float = 12.0,
        replies: Sequence[str | Sequence[int]] = (),
        force_preempt_every: int = 0,
        window: int = 0,
        on_batch: Callable[[Batch], None] | None = None,
    ) -> None:
        if window < 0:
            raise ConfigError(f"window={window} is out of range: rows that a layer sees, 0 for all")
        self.config = ForkServeConfig() if config is None else config
        require_config(self.config, "MockBackend")
        self.window = window
        tokenizer = ByteTokenizer()
        tokenizer.split_special_tokens = self.config.split_special_tokens
        self.tokenizer: Tokenizer = tokenizer
        self.clock: Clock = clock or VirtualClock()
        self.step_ms = step_ms
        self.prefill_us = prefill_us
        self.force_preempt_every = force_preempt_every
        self.info = ModelInfo(
            name="mock",
            vocab_size=vocab_size,
            max_context=min(max_context, self.config.max_context or max_context),
            eos_ids=(EOS,),
            kv_bytes_per_token=16,
            device="cpu",
            dtype="uint64",
            extra={"window": window} if window else {},
        )
        self._replies = [self._ids(reply) for reply in replies]
        self._by_request: dict[int, list[int]] = {}
        self._asked: dict[int, None] = {}  # requests that have drawn, the latest ones
        self._on_batch = on_batch
        self._fail_next: Exception | None = None
        shape = (self.config.capacity_pages, self.config.page_size, 2)
        self._poison = np.random.default_rng(self.config.seed ^ 0x5EED)
        try:
            self._rows: U64 = np.empty(shape, np.uint64)  # [pages, P, (a, b)]
        except (MemoryError, ValueError) as error:
            rows = self.config.capacity_pages * self.config.page_size
            raise ConfigError(
                f"capacity_pages={self.config.capacity_pages} of {self.config.page_size} tokens "
                f"need {16 * rows / 2**30:.4g} GiB, which cannot be had ({error}); lower it"
            ) from error
        self._fresh = np.ones(shape[0], bool)  # pages whose slots were never poisoned
        self._ids_row: U64 = np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    # ---------------------------------------------------------------- contract

    def execute(self, batch: Batch) -> BatchResult:
        if self._fail_next is not None:
            error, self._fail_next = self._fail_next, None
            raise error
        if self._on_batch is not None:
            self._on_batch(batch)
        for c in batch.copies:
            self._touch([c.dst_page])
            source = self._rows[c.src_page, c.src_row : c.src_row + c.rows]
            self._rows[c.dst_page, c.dst_row : c.dst_row + c.rows] = source
        sums: dict[tuple[Hashable, int], U64] = {}
        out = [self._run(work, sums) for work in batch.works]
        for work, (rows, _) in zip(batch.works, out, strict=True):
            if work.write is not None:
                self._write(work.write, rows)
        tokens = sum(len(work.tokens) for work in batch.works)
        elapsed = self.predict_ms(tokens) if batch.works else 0.0
        if isinstance(self.clock, VirtualClock):
            self.clock.advance(elapsed)
        return BatchResult([result for _, result in out], elapsed)

    def predict_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        return self.step_ms + self.prefill_us / 1000 * new_tokens

    def discard(self, pages: Sequence[int]) -> None:
        self._fresh[list(pages)] = True

    def close(self) -> None:
        self._by_request.clear()

    # ---------------------------------------------------------------- rows as bytes

    def identity(self, weights: Callable[[Sequence[Path]], str]) -> Mapping[str, Any]:
        return {
            "weights": "mock/v1",  # there are none: the arithmetic below is the model
            "architecture": "mock",
            "config": {"window": self.window} if self.window else {},
            "layout": {"dtype": "uint64", "order": "token,pair", "shape": [2], "row_bytes": 16},
            "kv_dtype": "uint64",
            "kv_quantization": "none",
            "rope": {},
            "adapter": "none",
            "variant": {
                "engine": "mock",
                "version": "1",
                "kernels": "numpy/v1",
                "device": "cpu",
                "determinism": "exact",
            },
        }

    def read_rows(self, spans: Sequence[Span]) -> bytearray:
        return bytearray(np.concatenate([self._read(span) for span in spans]).tobytes())

    def read_rows_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        out[:] = self.read_rows(spans)

    def write_rows(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        self._write(span, np.frombuffer(rows, np.uint64).reshape(-1, 2)[at : at + span.length])

    # ---------------------------------------------------------------- test aids

    def script(self, *replies: str | Sequence[int]) -> None:
        """Queue replies for generations to come."""
        self._replies += [self._ids(reply) for reply in replies]

    def corrupt(self, page: int, row: int = 0) -> None:
        """Flip a bit of one row: used to prove that a test would notice."""
        self._rows[page, row, 1] ^= np.uint64(1)

    def fail_next(self, error: Exception | None = None) -> None:
        """Let the next pass raise."""
        self._fail_next = error or BackendError("the mock was told to fail")

    # ---------------------------------------------------------------- the model

    def _run(self, work: Work, sums: dict[tuple[Hashable, int], U64]) -> tuple[U64, WorkResult]:
        """New rows [n, 2] and the result of one work."""
        tokens = np.asarray(work.tokens, np.uint64)
        positions = np.arange(work.start, work.start + len(tokens), dtype=np.uint64)
        a = _mix(tokens * np.uint64(0xD6E8FEB86659FD93) + positions + np.uint64(1))
        if self.window:
            seen = self._seen(work)
            total_a = self._sliding(seen[:, 0], a)
            b = _mix(a ^ total_a)
            total_b = self._sliding(seen[:, 1], b)
        else:
            before = np.zeros(2, np.uint64)
            for span in work.context:
                key = (span.key, span.length)
                if key not in sums:  # a trunk under many branches is summed once
                    sums[key] = self._read(span).sum(0, dtype=np.uint64)
                before = before + sums[key]
            total_a = np.cumsum(a, dtype=np.uint64) + before[0]
            b = _mix(a ^ total_a)
            total_b = np.cumsum(b, dtype=np.uint64) + before[1]
        result = WorkResult()
        if work.all_logits:
            result.logits = np.stack([self._logits(t) for t in total_b])
        elif work.logits or work.sample is not None:
            result.logits = self._logits(total_b[-1])
        if work.sample is not None:
            scripted = self._scripted(work.sample)
            last = result.logits if result.logits is not None else self._logits(total_b[-1])
            last = last[-1] if last.ndim == 2 else last
            drawn, params = sample(last, work.sample), work.sample.params
            result.token = drawn if scripted is None else scripted
            if params.logprobs:
                found = logprobs(last, result.token, params.top_logprobs)
                result.logprob, result.top = found
            if not work.logits and not work.all_logits:
                result.logits = None
        return np.stack([a, b], 1), result

    def _seen(self, work: Work) -> U64:
        """Rows [m, 2] before a work that its first token sees, m < window."""
        low, parts = max(work.start - self.window + 1, 0), [np.empty((0, 2), np.uint64)]
        for span in work.context:
            skip = min(max(low - span.start, 0), span.length)
            parts.append(self._read(span)[skip:])
        rows = np.concatenate(parts)
        if len(rows) != work.start - low:
            raise BackendError(
                f"node {work.node} reads rows [{low}, {work.start}), of which {len(rows)} are there"
            )
        return rows

    def _sliding(self, before: U64, values: U64) -> U64:
        """For each value the sum of the last `window` ones, itself included."""
        total = np.cumsum(np.concatenate([np.zeros(1, np.uint64), before, values]), dtype=np.uint64)
        end = np.arange(len(before) + 1, len(total))
        return total[end] - total[np.maximum(end - self.window, 0)]

    def _logits(self, total: np.uint64) -> npt.NDArray[np.float32]:
        """A row of logits in [0, 8), a hash of (id, total)."""
        bits = _mix(self._ids_row ^ total) >> np.uint64(40)
        return bits.astype(np.float32) * np.float32(8 / 2**24)

    def _read(self, span: Span) -> U64:
        first = span.offset // self.config.page_size
        last = -(-(span.offset + span.length) // self.config.page_size)
        pages = list(span.pages[first:last])
        self._touch(pages)
        rows = self._rows[pages].reshape(-1, 2)
        begin = span.offset - first * self.config.page_size
        return rows[begin : begin + span.length]

    def _write(self, span: Span, rows: U64) -> None:
        slots = np.arange(span.offset, span.offset + span.length)
        pages = np.asarray(span.pages)[slots // self.config.page_size]
        self._touch(np.unique(pages).tolist())
        self._rows[pages, slots % self.config.page_size] = rows

    def _touch(self, pages: Sequence[int]) -> None:
        """Poison pages on first use after they were freed: stale rows are never readable."""
        for page in pages:
            if self._fresh[page]:
                self._fresh[page] = False
                self._rows[page] = self._poison.integers(
                    0, 2**63, self._rows.shape[1:], dtype=np.uint64
                )

    def _scripted(self, spec: SampleSpec) -> int | None:
        if spec.request not in self._asked:  # its first draw; forced tokens may stand before it
            self._asked[spec.request] = None
            if len(self._asked) > _ASKED:
                del self._asked[next(iter(self._asked))]
            if self._replies and spec.request not in self._by_request:
                self._by_request[spec.request] = self._replies.pop(0)
        reply = self._by_request.get(spec.request)
        if reply is None:
            return None
        if spec.step < len(reply):
            return reply[spec.step]
        self._by_request.pop(spec.request, None)
        return EOS

    def _ids(self, reply: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(reply) if isinstance(reply, str) else list(reply)


def _mix(x: U64) -> U64:
    """The splitmix64 finaliser: a bijection of 64-bit words that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
