"""What runs a forward pass for the backend: the native kernels, or torch operators."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from forkserve.engine.local.checkpoint import Checkpoint
from forkserve.engine.local.kv import PagedKV
from forkserve.engine.local.spec import ModelSpec
from forkserve.errors import BackendError, ConfigError
from forkserve.kernels.native import library
from forkserve.types import Work

if TYPE_CHECKING:
    from forkserve.engine.local.gpu.kv import DeviceKV

__all__ = ["KERNELS", "VARIANTS", "Runner", "Setup", "make_runner"]

_log = logging.getLogger(__name__)
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

KERNELS = ("auto", "native", "torch")
# Execution variants: the numbers that weights are kept in; see docs/engine.md.
VARIANTS = ("float32", "bfloat16", "int8", "w8a16")
_NATIVE = ("w8a16",)  # variants that have native kernels only


class Runner(Protocol):
    """Weights, KV and the forward pass.  One call at a time.

    kernels: "native" or "torch"; version: of what it computes, raised when a bit of it changes.
    exact: a row's bits depend on the tokens before it alone, not on batch, chunks or pages.
    """

    kernels: str
    version: str
    exact: bool

    @property
    def kv(self) -> PagedKV | DeviceKV:
        """The KV that `run` writes."""
        ...

    def run(
        self, works: Sequence[Work], ids: Ints, wanted: Sequence[int], keep: bool
    ) -> tuple[Floats, Ints]:
        """Logits [m, V] of the rows `wanted` of the batch, and the id of each row's largest.

        keep: the array is the caller's; otherwise the next call may overwrite it.
        """
        ...

    def close(self) -> None:
        """Drop weights and KV.  Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What a runner is made for.  context: positions; scratch_rows: replayed rows of a batch.

    device: "cpu", "cuda", "cuda:1".  kv: 8-bit format of KV rows, or "none" for the variant's own.
    debug: on a GPU, refuse to write any row of the pool but those that works name.
    """

    variant: str
    context: int
    page_size: int
    capacity_pages: int
    scratch_rows: int
    threads: int
    device: str = "cpu"
    kv: str = "none"
    debug: bool = False


def make_runner(source: Checkpoint, setup: Setup, kernels: str) -> tuple[Runner, str | None]:
    """The runner, and why "auto" did not take the native kernels (None if it did), which it logs.

    Raises `ConfigError` for a variant or shape that the kernels asked for don't have, and for a
    FORKSERVE_ISA that can't be had; `BackendError` if the native ones are asked for and were not
    built.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"kernels='{kernels}' is unknown; {', '.join(KERNELS)} are the choices")
    if setup.variant not in VARIANTS:
        raise ConfigError(
            f"dtype={setup.variant!r} is not supported; the names "
            f"{', '.join(map(repr, VARIANTS))} are"
        )
    if setup.device != "cpu":
        return _gpu_runner(source, setup, kernels), None
    if setup.kv != "none":
        raise ConfigError(f"kv='{setup.kv}' needs a GPU: on the CPU rows are in the model's dtype")
    reason = None
    if kernels != "torch":
        reason = _unfit(source.spec, setup)
        if reason and kernels == "native":
            raise ConfigError(f"no native kernels: {reason}")
        try:
            if reason is None:
                library.load()  # a ConfigError is a wrong FORKSERVE_ISA, and no reason for torch
        except BackendError as error:
            reason = str(error)
            if kernels == "native":
                raise
        if reason is None:
            from forkserve.engine.local.native import NativeRunner

            return NativeRunner(source, setup), None
    if setup.variant in _NATIVE:
        raise ConfigError(
            f"dtype '{setup.variant}' needs the native kernels"
            + (f": {reason}" if reason else "; leave out kernels='torch'")
        )
    if reason:
        _log.warning("%s runs on torch kernels, which are slower: %s", source.name, reason)
    from forkserve.engine.local.torch_runner import TorchRunner

    return TorchRunner(source, setup), reason


def _gpu_runner(source: Checkpoint, setup: Setup, kernels: str) -> Runner:
    if kernels != "auto":
        raise ConfigError(f"kernels='{kernels}' runs on the CPU; leave it out with a GPU")
    from forkserve.engine.local.gpu.device import find_device
    from forkserve.engine.local.gpu.runner import GpuRunner

    return GpuRunner(source, setup, find_device(setup.device, setup.variant))


def _unfit(spec: ModelSpec, setup: Setup) -> str | None:
    """Why the native kernels can't run this model with these settings."""
    if setup.page_size % 16:
        return f"page_size {setup.page_size} is not a multiple of 16"
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"heads of {spec.head_dim} values are not a multiple of 16 up to 256"
    return None
