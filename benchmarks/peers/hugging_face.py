"""Hugging Face transformers as a peer: float32, our reader's weights, a repeated cache."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import models

__all__ = ["HuggingFace"]


class HuggingFace:
    """One model.  Every method gives seconds; call it under `torch.inference_mode`."""

    def __init__(self, model: str | Path) -> None:
        self.model = models.hugging_face(model)
        self._caches: dict[int, Any] = {}

    def prefill(self, tokens: list[int]) -> float:
        """A whole prompt, to its last logits."""
        begin = time.perf_counter()
        self._fill(tokens)
        return time.perf_counter() - begin

    def decode(self, tokens: list[int], steps: int, k: int = 1) -> float:
        """`steps` greedy tokens of k branches; copying the trunk's cache does not count."""
        cache = self._copy(tokens)
        if k > 1:
            cache.batch_repeat_interleave(k)
        chosen = torch.arange(100, 100 + k)[:, None]
        begin = time.perf_counter()
        for _ in range(steps):
            logits = self.model(chosen, past_key_values=cache, use_cache=True).logits
            chosen = logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - begin

    def decode_each(self, tokens: list[int], steps: int, k: int) -> float:
        """The same branches one after another, each on its copy; copying counts."""
        self._copy(tokens)
        begin = time.perf_counter()
        for branch in range(k):
            cache, chosen = self._copy(tokens), torch.tensor([[100 + branch]])
            for _ in range(steps):
                logits = self.model(chosen, past_key_values=cache, use_cache=True).logits
                chosen = logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - begin

    def save(self, folder: Path) -> None:
        """The model as a directory that other engines read."""
        self.model.save_pretrained(folder)

    def close(self) -> None:
        """Drop the caches."""
        self._caches.clear()

    def _copy(self, tokens: list[int]) -> Any:
        if len(tokens) not in self._caches:
            self._caches[len(tokens)] = self._fill(tokens)
        return copy.deepcopy(self._caches[len(tokens)])

    def _fill(self, tokens: list[int]) -> Any:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([tokens])
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache
