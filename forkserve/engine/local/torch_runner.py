"""The forward pass on torch operators: the fallback, and what the native one is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forkserve.engine.local.checkpoint import Checkpoint
from forkserve.engine.local.decoder import Decoder
from forkserve.engine.local.kv import KVSize, PagedKV
from forkserve.engine.local.runner import Floats, Ints, Setup
from forkserve.errors import BackendError
from forkserve.kernels.plan import plan_attention
from forkserve.types import Work

__all__ = ["TorchRunner"]

# Of KV, and of weights that are no integers.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


class TorchRunner:
    """Satisfies `Runner`.  Sums are ordered as torch likes, so rows are equal up to rounding."""

    kernels = "torch"
    exact = False

    def __init__(self, source: Checkpoint, setup: Setup) -> None:
        spec, dtype = source.spec, _DTYPES[setup.variant]
        self._windows = spec.windows
        self.version = str(torch.__version__)
        with torch.inference_mode():
            self._decoder: Decoder | None = Decoder(
                source, dtype, setup.context, coded=setup.variant == "int8"
            )
        self.kv = PagedKV(KVSize.of(spec, setup, dtype))

    def run(
        self, works: Sequence[Work], ids: Ints, wanted: Sequence[int], keep: bool
    ) -> tuple[Floats, Ints]:
        """See `Runner`."""
        if self._decoder is None:
            raise BackendError("this backend is closed")
        plan = plan_attention(works, self.kv.page_size, self.kv.capacity_rows, self._windows)
        positions = torch.from_numpy(
            np.concatenate([np.arange(w.start, w.start + len(w.tokens)) for w in works])
        )
        with torch.inference_mode():
            hidden = self._decoder.forward(torch.from_numpy(ids), positions, plan, self.kv.layers)
            logits = self._decoder.logits(hidden[list(wanted)]).numpy()
        return logits, logits.argmax(1).astype(np.int32)

    def close(self) -> None:
        """See `Runner`."""
        self._decoder = None
        self.kv.close()
