"""vLLM's CPU engine behind a pipe: see `llamacpp_worker`.

Runs under a Python that has `vllm` and nothing of ours.  Arguments: MODEL THREADS DTYPE CONTEXT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

MODEL, THREADS, DTYPE, CONTEXT = sys.argv[1:5]
for _name, _value in {
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

# Whatever the engine prints goes to stderr: stdout is the pipe.
_pipe = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import vllm  # noqa: E402


class Peer:
    """One engine with automatic prefix caching."""

    def __init__(self) -> None:
        self.llm = vllm.LLM(
            model=MODEL,
            skip_tokenizer_init=True,
            dtype=DTYPE,
            max_model_len=int(CONTEXT),
            max_num_seqs=16,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds for `tokens` greedy tokens of each prompt."""
        params = vllm.SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        self.llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - begin

    def prefill(self, tokens: list[int]) -> float:
        return self.generate([tokens], 1)

    def decode(self, tokens: list[int], steps: int, k: int) -> float:
        """k prompts that share `tokens`, which the prefix cache holds: the tokens after the first.

        The difference of two runs, so that what the cache does not hold is not counted.
        """
        prompts = [[*tokens, 100 + branch] for branch in range(k)]
        self.generate(prompts, 1)
        return self.generate(prompts, steps + 1) - self.generate(prompts, 1)


def main() -> None:
    """Answer until the pipe closes."""
    peer = Peer()
    print(json.dumps({"ready": vllm.__version__}), file=_pipe)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        print(json.dumps({"s": getattr(peer, asked.pop("do"))(**asked)}), file=_pipe)


if __name__ == "__main__":
    main()
