"""llama.cpp behind a pipe: a JSON line asks for one piece of work, a JSON line gives its seconds.

Runs under a Python that has `llama-cpp-python` and nothing of ours.  Low-level API: a context of
unified KV, forks by ``llama_memory_seq_cp``.  Arguments: MODEL THREADS FLASH(0|1) CONTEXT.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as ll
import numpy as np

SEQUENCES = 20
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Peer:
    """One model, one context."""

    def __init__(self, model: str, threads: int, flash: bool, context: int) -> None:
        self._quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self._quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(model.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, context, 512
        params.n_seq_max, params.kv_unified, params.no_perf = SEQUENCES, True, True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise SystemExit(f"llama.cpp cannot run {model}")
        self.memory = ll.llama_get_memory(self.context)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(context, 0, SEQUENCES)
        self.filled = 0

    def run(self, rows: Sequence[Row]) -> None:
        """One decode call."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        fault = ll.llama_decode(self.context, batch)
        if fault:
            raise SystemExit(f"llama_decode gave {fault} for {len(rows)} rows")

    def best(self, row: int) -> int:
        """The token with the largest logit."""
        logits = ll.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def fill(self, tokens: Sequence[int]) -> None:
        """Sequence 0 holds these tokens and nothing else."""
        ll.llama_memory_clear(self.memory, False)
        last = len(tokens) - 1
        self.run([(token, i, 0, i == last) for i, token in enumerate(tokens)])
        self.filled = len(tokens)

    # -- what can be asked for: each gives seconds -------------------------------------------

    def prefill(self, tokens: list[int]) -> float:
        begin = time.perf_counter()
        self.fill(tokens)
        self.best(-1)
        return time.perf_counter() - begin

    def decode(self, tokens: list[int], steps: int, k: int) -> float:
        """k sequences over one trunk, greedy, one decode call a step."""
        if self.filled != len(tokens):
            self.fill(tokens)
        at, names = self.filled, range(1, k + 1)
        for name in names:
            ll.llama_memory_seq_cp(self.memory, 0, name, 0, -1)
        chosen = [100 + name for name in names]
        begin = time.perf_counter()
        for step in range(steps):
            self.run([(t, at + step, n, True) for t, n in zip(chosen, names, strict=True)])
            chosen = [self.best(row) for row in range(k)]
        seconds = time.perf_counter() - begin
        for name in names:
            ll.llama_memory_seq_rm(self.memory, name, -1, -1)
        return seconds

    def fork(self, tokens: list[int], k: int) -> float:
        """Seconds for one branch of k."""
        if self.filled != len(tokens):
            self.fill(tokens)
        begin = time.perf_counter()
        for name in range(1, k + 1):
            ll.llama_memory_seq_cp(self.memory, 0, name, 0, -1)
        seconds = time.perf_counter() - begin
        for name in range(1, k + 1):
            ll.llama_memory_seq_rm(self.memory, name, -1, -1)
        return seconds / k


def main() -> None:
    """Answer until the pipe closes."""
    model, threads, flash, context = sys.argv[1:5]
    peer = Peer(model, int(threads), flash == "1", int(context))
    answer({"ready": ll.__version__})
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer({"s": getattr(peer, asked.pop("do"))(**asked)})


def answer(value: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
