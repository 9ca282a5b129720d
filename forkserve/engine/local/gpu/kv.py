"""KV on a device, indexed by page id; the same map as `forkserve.engine.local.kv`.

With 8-bit rows a scale per row and head lies beside them and goes wherever the row goes: into
copies, and behind the rows into what `read` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from forkserve.engine.local.gpu.device import on
from forkserve.engine.local.kv import KVSize
from forkserve.errors import ConfigError
from forkserve.kernels.copy_rows import copy_rows
from forkserve.kernels.plan import span_rows
from forkserve.kernels.quant import KVRows
from forkserve.types import RowCopy, Span

__all__ = ["DeviceKV"]

_CODED = {"int8": torch.int8, "fp8": torch.uint8}


class DeviceKV:
    """K (rotated) and V of every layer: `layers[i]`; `rows` [layers, 2*Hk, R, D] holds them all.

    The last row, `dump`, takes what nobody reads.  Raises `ConfigError` if the pool does not fit.
    """

    def __init__(self, size: KVSize, format: str, device: torch.device) -> None:
        self.page_size, self.format = size.page_size, format
        self.capacity_rows, self.scratch_rows = size.capacity_rows, size.scratch_rows
        self.dtype = _CODED.get(format, size.dtype)
        self._device = device
        count = self.capacity_rows + self.scratch_rows + self.page_size
        self.dump = count - 1
        shape = (size.layers, 2 * size.kv_heads, count, size.head_dim)
        self._heads = shape[0] * shape[1]
        self._scale_bytes = 4 if format != "none" else 0
        self._row_bytes = size.head_dim * self.dtype.itemsize
        try:
            self.rows = torch.empty(shape, dtype=self.dtype, device=device)
            self.scales = (
                torch.empty(shape[:3], dtype=torch.float32, device=device)
                if format != "none"
                else None
            )
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            raise ConfigError(
                f"a KV pool of {size.capacity_pages} pages of {self.page_size} tokens needs "
                f"{count * self.bytes_per_token / 1e9:.1f} GB on {device}, which has "
                f"{_free_gb(device)} GB free; lower capacity_pages, or store KV in 8 bits"
            ) from error

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row over all layers, K and V, scales included."""
        return self._heads * (self._row_bytes + self._scale_bytes)

    @property
    def layers(self) -> list[KVRows]:
        """Views of each layer."""
        scales = self.scales if self.scales is not None else [None] * len(self.rows)
        return [KVRows(r, s, self.format) for r, s in zip(self.rows, scales, strict=True)]

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Run the row copies of a batch, in order."""
        with on(self._device):
            copy_rows(self.rows, copies, self.page_size)
            if self.scales is not None:
                copy_rows(self.scales[..., None], copies, self.page_size)

    def read(self, spans: Sequence[Span]) -> bytearray:
        """Rows of consecutive spans as bytes, [layers, 2*Hk, n, D]; then scales [layers, 2*Hk, n].

        Waits for what writes them.
        """
        at = self._where(np.concatenate([span_rows(span, self.page_size) for span in spans]))
        out = bytearray(_bytes(self.rows.index_select(2, at)))
        if self.scales is not None:
            out += _bytes(self.scales.index_select(2, at))
        return out

    def read_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """The same into a buffer of that many bytes."""
        memoryview(out)[:] = self.read(spans)

    def write(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """Write the rows from `at` on of a run that `read` gave to the slots of a span."""
        layers, heads = self.rows.shape[:2]
        run = np.frombuffer(rows, np.uint8)
        count = run.size // self.bytes_per_token
        where = self._where(span_rows(span, self.page_size))
        taken = slice(at, at + span.length)
        split = self._heads * count * self._row_bytes
        values = run[:split].reshape(layers, heads, count, -1)[:, :, taken]
        self.rows.index_copy_(2, where, self._sent(values, self.dtype))
        if self.scales is not None:
            scales = run[split:].reshape(layers, heads, count, -1)[:, :, taken]
            self.scales.index_copy_(2, where, self._sent(scales, torch.float32)[..., 0])

    def take(self, spans: Sequence[Span]) -> None:
        """Nothing is ever given back; see `discard`."""

    def discard(self, pages: Sequence[int]) -> None:
        """Device memory is not given back page by page: it was taken for this pool alone."""

    def close(self) -> None:
        """Drop the tensors."""
        self.rows = torch.empty(0)
        self.scales = None

    def _sent(self, taken: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
        """Bytes [layers, 2*Hk, n, row] on the device, as values of `dtype`."""
        return torch.from_numpy(taken.copy()).view(dtype).to(self._device)

    def _where(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: npt.NDArray[np.uint8] = tensor.contiguous().cpu().view(torch.uint8).numpy().reshape(-1)
    return flat.data


def _free_gb(device: torch.device) -> str:
    if device.type != "cuda":
        return "an unknown number of"
    return f"{torch.cuda.mem_get_info(device)[0] / 1e9:.1f}"
